#!/usr/bin/env bash
# The figures of the README: heavy-tail rollouts at temperature 0 and 1, n-gram and suffix drafters, every policy.
# About 30 minutes on 2 quiet cores; goes on where it was interrupted. Results: this folder, one subfolder a run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

bench() { # NAME OPTION...
  local name=$1
  shift
  .venv/bin/rollout-spec bench --config configs/bench/cpu.yaml --out "experiments/heavy_tail/$name" "$@"
}

# One sample a prompt at temperature 0, where siblings would be equal; groups of four at temperature 1, as in GRPO.
bench ngram_t0 # the same as `make bench`
bench suffix_t1 --temperature 1 --drafter suffix --arms off,fixed:0,fixed:1,fixed:3,fixed:5,table,goodput \
  --set workload.num_prompts=8 --set workload.n=4
bench suffix_t0 --temperature 0 --drafter suffix --arms off,fixed:0,fixed:3,table,goodput
bench ngram_t1 --temperature 1 --drafter ngram --arms off,fixed:1,fixed:3,table,goodput \
  --set workload.num_prompts=8 --set workload.n=4
