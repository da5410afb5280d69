#!/usr/bin/env bash
# An EAGLE-3 head for the policy that the job begins with, then the job with that head left alone, and with one that is
# trained on every eight steps. About an hour on two cores. From the checkout, in an environment with verl.
set -euo pipefail
bin=${BIN:-.venv/bin}
work=${WORK:-out/verl}
mkdir -p "$work"
"$bin/python" experiments/verl/prompts.py "$work/prompts.jsonl"
"$bin/rollout-spec" draft train --config configs/draft/smollm2.yaml --out "$work/head" \
    --set draft.prompts="$work/prompts.jsonl" --set draft.temperatures=[1] --set draft.max_tokens=64 \
    --set draft.minutes="${MINUTES:-12}"
"$bin/python" experiments/verl/run.py --arms frozen refreshed --seeds 1 \
    --head "$work/head" --work "$work" --out experiments/verl/head/results.json
"$bin/python" experiments/verl/report.py experiments/verl/head/results.json
