from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_spec.config import ConfigError
from rollout_spec.rollout.weights import as_files, check_shapes, safetensors_files, shapes_of

MODEL = {"embed.weight": (8, 4), "norm.weight": (4,)}


def test_shapes_are_read_from_every_file_and_type(tmp_path: Path) -> None:
    save_file({"embed.weight": torch.zeros(8, 4, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"norm.weight": torch.zeros(4), "scale": torch.zeros(())}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text("{}")
    files = safetensors_files(tmp_path)
    assert [file.name for file in files] == ["model-1.safetensors", "model-2.safetensors"]
    assert shapes_of(files) == MODEL | {"scale": ()}


@pytest.mark.parametrize("where", ["empty", "nowhere", "a.safetensors"])
def test_a_folder_without_weights_is_named(tmp_path: Path, where: str) -> None:
    (tmp_path / "empty").mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=rf"{where}'.*no \*\.safetensors there; give a Hugging Face model folder"):
        safetensors_files(tmp_path / where)


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\xff" * 64])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors'.*not a readable safetensors file"):
        shapes_of([file])


def test_a_file_cut_off_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(1000)}, file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        shapes_of([file])


def test_fitting_weights_pass_with_or_without_a_tied_head() -> None:
    check_shapes(dict(MODEL), MODEL)
    check_shapes(MODEL | {"lm_head.weight": (8, 4)}, MODEL)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (MODEL | {"model.extra": (1,)}, "'model.extra' is not in the model"),
        (MODEL | {"norm.weight": (5,)}, r"'norm.weight' has shape \(5,\), the model has \(4,\)"),
        (MODEL | {"embed.weight": (4, 8)}, r"'embed.weight' has shape \(4, 8\)"),
        ({"norm.weight": (4,)}, "1 tensors are missing, for example 'embed.weight'"),
        ({}, "2 tensors are missing"),
    ],
)
def test_unfit_weights_are_named(new: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_shapes(new, MODEL)


def test_a_head_of_its_own_must_fit() -> None:
    model = MODEL | {"lm_head.weight": (8, 4)}
    with pytest.raises(ConfigError, match=r"lm_head\.weight' has shape"):
        check_shapes(MODEL | {"lm_head.weight": (9, 4)}, model)


def test_tensors_travel_unchanged_however_they_are_stored() -> None:
    base = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    tensors = {
        "tied.a": base,
        "tied.b": base,  # safetensors refuses shared memory
        "slice": base[2:4],
        "transposed": base.T,
        "trained": torch.nn.Parameter(torch.ones(3)),
        "bf16": base.bfloat16(),
        "scalar": torch.tensor(2.5),
    }
    with as_files(tensors) as (file,):
        loaded = load_file(file)
        assert shapes_of([file]) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_the_file_is_gone_afterwards_even_after_an_error() -> None:
    seen: list[Path] = []

    def load() -> None:
        with as_files({"x": torch.zeros(2)}) as (file,):
            assert file.exists()
            seen.append(file)
            raise RuntimeError("while loading")

    with pytest.raises(RuntimeError, match="while loading"):
        load()
    assert not seen[0].exists()
    assert not seen[0].parent.exists()


@pytest.mark.parametrize("as_type", [str, Path])
def test_a_folder_is_used_where_it_is(tmp_path: Path, as_type: type) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with as_files(as_type(tmp_path)) as files:
        assert files == [tmp_path / "model.safetensors"]
    assert files[0].exists()
