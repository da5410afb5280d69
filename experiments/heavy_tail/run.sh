#!/usr/bin/env bash
# The figures of the README: heavy-tail rollouts at temperature 0 and 1, n-gram and suffix drafters.
# About 25 minutes on 2 quiet cores; goes on where it was interrupted. Results: this folder, one subfolder a run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

bench() { # NAME OPTION...
  local name=$1
  shift
  .venv/bin/rollout-spec bench --config configs/bench/cpu.yaml --out "experiments/heavy_tail/$name" "$@"
}

# One sample a prompt at temperature 0, where siblings would be equal; groups of four at temperature 1, as in GRPO.
groups=(--temperature 1 --set workload.num_prompts=8 --set workload.n=4)
bench ngram_t0 # the same as `make bench`
bench suffix_t0 --temperature 0 --drafter suffix --arms off,fixed:3,goodput
bench suffix_t1 --drafter suffix --arms off,fixed:0,fixed:3,table,goodput "${groups[@]}"
bench ngram_t1 --drafter ngram --arms off,goodput "${groups[@]}"
