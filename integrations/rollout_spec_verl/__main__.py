"""`python -m rollout_spec_verl`: does the verl that is installed here have what the option relies on?"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version

from rollout_spec_verl import compat


def main() -> int:
    """0 if everything is there."""
    print(f"verl {version('verl')}; written for {compat.TESTED}")
    found = [*compat.problems(), *compat.sender_problems(), *compat.worker_problems()]
    if "rollout_spec" not in {point.name for point in entry_points(group="verl.plugins")}:
        found.append("verl does not know our plug-in (a wrong option is then found late): pip install this package")
    for problem in found:
        print(f"MISSING  {problem}")
    if not found:
        print("Everything that the option needs is here.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
