#!/usr/bin/env bash
# The controller, started from a profile, against every fixed K and vLLM's table filled in from the same profile; and
# the simulator against what was measured. About 70 minutes on 2 quiet cores; goes on where it was interrupted.
# Results: this folder, a profile for each drafter and temperature and a subfolder for each benchmark.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=experiments/controller
source experiments/profiled.sh

[ -e out/emulated/draft ] || $bin/python experiments/moe/make_model.py --out out/emulated
head_t1=(--temperature 1 --set "drafter.synthetic_acceptance=[0.51,0.26,0.12,0.06,0.03]")
ngram=configs/bench/cpu.yaml head=configs/bench/emulated_head.yaml
arms=off,fixed:1,fixed:3,table,goodput

profile ngram_t0 $ngram
bench ngram_t0_heavy ngram_t0 $ngram off,fixed:1,fixed:3,fixed:5,table,goodput,fixed:8
profile head_t1 $head --set sampling.temperature=1 "${head_t1[@]:2}"
bench head_t1_heavy head_t1 $head $arms "${head_t1[@]}"
bench head_t1_clipped head_t1 $head $arms --workload clipped_math "${head_t1[@]}"
# Without a profile: this one ran alone, after tokens were weighed by what they are worth for the end of the rollout.
$bin/rollout-spec bench --config $ngram --out "$here/mixed" --arms off,fixed:3,goodput,budget --workload mixed \
  --set workload.max_tokens=256 --set bench.warmup_tokens=24
profile ngram_t0_again $ngram --set profile.rounds=5
bench ngram_t0_clipped ngram_t0_again $ngram off,fixed:3,fixed:5,table,goodput --workload clipped_math

# Not run yet:
profile head_t0 $head
bench head_t0_heavy head_t0 $head $arms
bench head_t0_clipped head_t0 $head $arms --workload clipped_math
