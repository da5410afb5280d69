"""Files that a reader, or a crash, finds whole: the old content or the new."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any


def write_json(path: str | Path, tree: Any) -> None:
    """Indented, a list of numbers on one line; raises ValueError on a number that JSON does not have."""
    text = json.dumps(tree, indent=1, allow_nan=False)
    # JSON strings hold no raw line break, so none can be altered.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: re.sub(r"\s*\n\s*", " ", found.group()), text)
    write_whole(path, text + "\n")


def write_whole(path: str | Path, text: str) -> None:
    """Replace the file at `path`; its folder is made where it is missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
