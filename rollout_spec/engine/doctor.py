"""`rollout-spec doctor`: what is installed here, whether it will work, and in one sentence what is missing."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help="check device, versions and the vLLM extension points we need")
    parser.set_defaults(handler=handle)


def handle(args: argparse.Namespace) -> int:
    """0 if everything holds or only an optional drafter is missing, 1 otherwise."""
    import importlib
    import importlib.util

    # With torch loaded, the provenance names its GPUs.
    if importlib.util.find_spec("torch"):
        importlib.import_module("torch")
    from rollout_spec.engine.compat import OPTIONAL, Check, checks
    from rollout_spec.provenance import collect

    record = collect()
    device = record["device"]
    processor = ", ".join(device["gpus"]) or device["cpu"]
    print(f"device      {processor} ({device['cores']} cores, {device['memory_gib']} GiB)")
    print("versions    " + ", ".join(f"{name} {found}" for name, found in record["versions"].items() if found))
    if not device["gpus"] and importlib.util.find_spec("torch"):
        from rollout_spec.precision import cpu_dtype

        print(f"precision   {str(cpu_dtype()).removeprefix('torch.')}, the fastest on this processor")
    results: list[Check] = []
    for check in checks():
        results.append(check)
        print(f"{'ok' if check.problem is None else 'MISSING':8}    {check.name} ({check.purpose})")
        if check.problem is not None:
            print(f"            {check.problem}")
    broken = [check for check in results if check.problem is not None]
    needed = [check for check in broken if check.purpose not in OPTIONAL]
    if not broken:
        print("\nEverything that dynamic speculation needs is here.")
    elif not needed:
        print(f"\nWorks, but without {broken[0].purpose}: {broken[0].problem}")
    else:
        print(f"\nDynamic speculation cannot run here: {needed[0].problem}")
    return 1 if needed else 0
