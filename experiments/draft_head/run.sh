#!/usr/bin/env bash
# A head from nothing, and what vLLM accepts of its drafts on prompts that it has not seen. About 50 minutes on two cores.
# The head stays in out/draft/head (HEAD=... for another place); figures and the log come here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=experiments/draft_head
head=${HEAD:-out/draft/head}
# Threads that spin for long starve each other where anything else runs.
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-20000}
bin=${BIN:-.venv/bin/rollout-spec}
mkdir -p "$(dirname "$head")"

$bin draft train --config configs/draft/smollm2.yaml --out "$head" "$@" 2>&1 | tee "$head.log"
$bin draft eval --head "$head" --engine --ks 1,3,5 --out "$here/eval.json" 2>&1 | tee -a "$head.log"
cp "$head/provenance.json" "$here/provenance.json"
$bin draft info "$head" | tee "$here/info.txt"
