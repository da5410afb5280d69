#!/usr/bin/env bash
# What the head of run.sh gains: the controller, started from a profile, against each fixed K and vLLM's table filled in
# from the same profile; and the simulator against what was measured, with a profile from before and one from after.
# About 35 minutes on two quiet cores; goes on where it was interrupted. Results: this folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=experiments/draft_head
bin=.venv/bin
config=configs/bench/head.yaml

profile() { # NAME OPTION...
  local name=$1
  shift
  [ -e "$here/$name.json" ] || $bin/rollout-spec profile --config $config --out "$here/$name.json" \
    --set profile.rounds=5 "$@"
}

bench() { # NAME PROFILE ARMS OPTION...
  local name=$1 profile=$here/$2.json arms=$3 table
  shift 3
  table=$($bin/python -c 'import json, sys
print(json.load(open(sys.argv[1]))["exports"]["num_speculative_tokens_per_batch_size"])' "$profile")
  $bin/rollout-spec bench --config $config --out "$here/$name" --arms "$arms" \
    --set policy.profile="$profile" --set bench.table="$table" --set bench.warmup_tokens=24 "$@"
}

simulated() { # OUT BENCH PROFILE...
  local out=$1 bench=$2
  shift 2
  $bin/python experiments/simulated/run.py "$here/$bench" --profile "$@" --out "experiments/simulated/$out"
}

t0=(--set sampling.temperature=0)
profile t1
bench t1_heavy t1 off,fixed:0,fixed:1,fixed:2,fixed:3,table,goodput
profile t0 "${t0[@]}"
bench t0_heavy t0 off,fixed:1,fixed:3,fixed:5,table,goodput "${t0[@]}"
bench t1_clipped t1 off,fixed:1,fixed:2,table,goodput --workload clipped_math
profile t1_after
simulated head_t1_real_clipped t1_clipped "$here/t1.json" "$here/t1_after.json"
simulated head_t1_real_heavy t1_heavy "$here/t1.json" "$here/t1_after.json"
bench t0_clipped t0 off,fixed:1,fixed:3,table,goodput --workload clipped_math "${t0[@]}"
