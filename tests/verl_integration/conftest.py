from __future__ import annotations

import sys
from pathlib import Path

# For a checkout whose editable install is older than the package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integrations"))
