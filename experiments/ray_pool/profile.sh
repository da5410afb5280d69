#!/usr/bin/env bash
# The profile that run.py predicts from: an engine of one core, measured while a second one is measured on the other core,
# for that is how the pool runs them. Six minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=experiments/ray_pool
options=(--config configs/ray/local.yaml --set sampling.temperature=0 --set engine.kv_cache_gib=0.5
  --set engine.max_model_len=1024 --set workload.name=heavy_tail --set workload.scale=0.02 --set workload.num_prompts=64
  --set workload.min_tokens=4 --set workload.n=1 --set profile.rounds=4)
neighbour=$(mktemp -d)
taskset -c 1 .venv/bin/rollout-spec profile "${options[@]}" --out "$neighbour/profile.json" >"$neighbour/log" 2>&1 &
taskset -c 0 .venv/bin/rollout-spec profile "${options[@]}" --out "$here/profile.json"
wait
rm -r "$neighbour"
