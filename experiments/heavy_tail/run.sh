#!/usr/bin/env bash
# The figures of the README: heavy-tail rollouts at temperature 0 and 1, n-gram and suffix drafters, every policy.
# About 35 minutes on 2 quiet cores; goes on where it was interrupted. Results: this folder, one subfolder a run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

bench() { # NAME ARMS OPTION...
  local name=$1 arms=$2
  shift 2
  .venv/bin/rollout-spec bench --config configs/bench/cpu.yaml --out "experiments/heavy_tail/$name" --arms "$arms" "$@"
}

all="off,fixed:0,fixed:1,fixed:3,fixed:5,threshold:8:3,table,goodput"
fewer="off,fixed:0,fixed:1,fixed:3,fixed:5,table,goodput"
# One sample a prompt at temperature 0, where siblings would be equal; groups of four at temperature 1, as in GRPO.
bench ngram_t0 "$all" --temperature 0 --drafter ngram
bench suffix_t0 "$fewer" --temperature 0 --drafter suffix
bench suffix_t1 "$fewer" --temperature 1 --drafter suffix --set workload.num_prompts=8 --set workload.n=4
bench ngram_t1 "$fewer" --temperature 1 --drafter ngram --set workload.num_prompts=8 --set workload.n=4
