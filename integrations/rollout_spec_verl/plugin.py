"""`verl.plugins` entry point: verl imports this in every process, while it is being imported itself.

verl swallows what is raised here, so a fault is logged. Jobs without our option must not notice us.
"""

from __future__ import annotations

import logging

from rollout_spec_verl import overrides

try:
    overrides.check_early()
except Exception:  # verl changed; the option is then checked later, by its dataclass
    logging.getLogger("rollout_spec").exception("rollout_spec: verl's configuration cannot be checked before it starts")
