"""Prints what has to be exported for verl on a CPU: `export $(python -m rollout_spec_verl.cpu)`."""

from __future__ import annotations

from rollout_spec_verl.cpu import ENVIRONMENT

for name, value in ENVIRONMENT.items():
    print(f"{name}={value}")
