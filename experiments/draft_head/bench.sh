#!/usr/bin/env bash
# What the head of run.sh gains: the controller, started from a profile, against each fixed K and vLLM's table filled in
# from the same profile; and the simulator against what was measured, with a profile from before and one from after.
# About an hour on two cores; goes on where it was interrupted. Results: this folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=experiments/draft_head
source experiments/profiled.sh

simulated() { # OUT BENCH PROFILE...
  local out=$1 bench=$2
  shift 2
  $bin/python experiments/simulated/run.py "$here/$bench" --profile "$@" --out "experiments/simulated/$out"
}

head=configs/bench/head.yaml
rounds=(--set profile.rounds=5)
t0=(--set sampling.temperature=0)
profile t1 $head "${rounds[@]}"
bench t1_heavy t1 $head off,fixed:0,fixed:1,fixed:2,fixed:3,table,goodput --set bench.repeats=5
profile t0 $head "${rounds[@]}" "${t0[@]}"
bench t0_heavy t0 $head off,fixed:1,fixed:3,fixed:5,table,goodput "${t0[@]}" --set bench.repeats=5
bench t1_clipped t1 $head off,fixed:1,fixed:2,fixed:3,table,goodput --workload clipped_math
profile t1_after $head "${rounds[@]}"
simulated head_t1_real_clipped t1_clipped "$here/t1.json" "$here/t1_after.json"
simulated head_t1_real_heavy t1_heavy "$here/t1.json" "$here/t1_after.json"
bench t0_clipped t0 $head off,fixed:1,fixed:3,fixed:5,table,goodput --workload clipped_math "${t0[@]}"
