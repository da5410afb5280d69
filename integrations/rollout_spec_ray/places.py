"""Where prompts are read and output is written: a local path, or a URI that pyarrow knows (s3://, gs://, hdfs://, ..).

No secret may get into a log, a result or Ray's list of jobs, and all three name the places: a URI that carries
credentials is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from rollout_spec.config import ConfigError

# One letter before "://" would be a drive.
_URI = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")
# "max_tokens", "tokenizer" and "prefix_caching_hash_algo" hold none.
_SECRET = re.compile(r"(?:^|_)(?:token|api_?key|access_key|secret\w*|passw\w*|credentials?)$", re.IGNORECASE)
HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class Place:
    """A file or folder on one of pyarrow's filesystems."""

    uri: str
    """As given, a local path made absolute: free of secrets."""
    filesystem: Any
    path: str
    """On `filesystem`."""

    @property
    def local(self) -> Path | None:
        from pyarrow.fs import LocalFileSystem

        return Path(self.path) if isinstance(self.filesystem, LocalFileSystem) else None


def place(text: str, option: str) -> Place:
    """ConfigError, which names the option, for a URI that pyarrow doesn't know or that holds credentials."""
    from pyarrow import ArrowException
    from pyarrow.fs import FileSystem, LocalFileSystem

    if not text:
        raise ConfigError(f"{option}: is empty; give a path or a URI such as s3://bucket/folder")
    if not _URI.match(text):
        path = Path(text).expanduser().absolute()
        return Place(str(path), LocalFileSystem(), str(path))
    check_public(text, option)
    try:
        filesystem, path = FileSystem.from_uri(text)
    except (ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{option} {text}: is no place that pyarrow can reach ({error})") from error
    return Place(text, filesystem, path)


def absolute(text: str) -> str:
    """The same for another working directory."""
    return text if _URI.match(text) else str(Path(text).expanduser().absolute())


def check_public(uri: str, option: str) -> None:
    """ConfigError if the URI carries credentials; the message doesn't repeat them."""
    parts = urlsplit(uri)
    secrets = [name for name, _ in parse_qsl(parts.query) if _SECRET.search(name)]
    if "@" in parts.netloc or secrets:
        what = "a user or a key before '@'" if "@" in parts.netloc else f"{secrets[0]!r}"
        raise ConfigError(
            f"{option}: the URI holds {what}, which would show in logs and results; give credentials by the "
            "environment of the cluster's nodes, or by their role"
        )


def without_secrets(tree: Any) -> Any:
    """A copy of plain values in which what is named like a secret (`hf_token`, ..) is hidden."""
    if isinstance(tree, Mapping):
        return {
            key: HIDDEN if value and _SECRET.search(str(key)) else without_secrets(value) for key, value in tree.items()
        }
    return [without_secrets(value) for value in tree] if isinstance(tree, list | tuple) else tree


def command_without_secrets(command: list[str]) -> list[str]:
    """The same of a command line with `--set key=value`."""
    shown = []
    for word in command:
        key, sep, _ = word.partition("=")
        shown.append(f"{key}={HIDDEN}" if sep and _SECRET.search(key.rpartition(".")[2]) else word)
    return shown
