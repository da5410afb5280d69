#!/usr/bin/env bash
# What the option costs when it is switched off: rollouts of 400 tokens beside plain verl's, each arm on each core. About
# half an hour.
set -euo pipefail
bin=${BIN:-.venv/bin}
"$bin/python" experiments/verl/run.py --arms plain off --seeds 1 2 --at-once --steps 15 --rollout-only \
    --work "${WORK:-out/verl/off}" --out experiments/verl/off/results.json
"$bin/python" experiments/verl/report.py experiments/verl/off/results.json
