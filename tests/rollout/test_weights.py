from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_spec.config import ConfigError
from rollout_spec.rollout import weights as module
from rollout_spec.rollout.weights import Entry, check_layout, check_values, layout_of, safetensors_files, staged

MODEL = {"embed.weight": Entry("F32", (8, 4)), "norm.weight": Entry("F32", (4,))}
HEAD = Entry("F32", (8, 4))


def test_types_and_shapes_are_read_from_every_file(tmp_path: Path) -> None:
    save_file({"embed.weight": torch.zeros(8, 4, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"d2t": torch.zeros(4, dtype=torch.long), "scale": torch.zeros(())}, tmp_path / "model-2.safetensors")
    (tmp_path / "config.json").write_text("{}")
    files = safetensors_files(tmp_path)
    assert [file.name for file in files] == ["model-1.safetensors", "model-2.safetensors"]
    assert layout_of(files) == {
        "embed.weight": Entry("BF16", (8, 4)),
        "d2t": Entry("I64", (4,)),
        "scale": Entry("F32", ()),
    }
    assert safetensors_files(files[0]) == [files[0]]


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("model-1", "model-2"):
        save_file({"embed.weight": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match=r"model-2.*'embed.weight' is in another file too"):
        layout_of(safetensors_files(tmp_path))


@pytest.mark.parametrize("where", ["empty", "nowhere", "a.bin"])
def test_a_folder_without_weights_is_named(tmp_path: Path, where: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=rf"{where}'.*no \*\.safetensors there; give a Hugging Face model folder"):
        safetensors_files(tmp_path / where)


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\xff" * 64])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors'.*not a readable safetensors file"):
        layout_of([file])


def test_a_file_cut_off_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(1000)}, file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        layout_of([file])


def test_fitting_weights_pass_with_or_without_a_tied_head() -> None:
    check_layout(dict(MODEL), MODEL)
    check_layout(MODEL | {"lm_head.weight": HEAD}, MODEL)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F64"])
def test_floating_types_are_converted(dtype: str) -> None:
    check_layout({name: Entry(dtype, entry.shape) for name, entry in MODEL.items()}, MODEL)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (MODEL | {"model.extra": Entry("F32", (1,))}, "'model.extra' is not in the model"),
        (MODEL | {"norm.weight": Entry("F32", (5,))}, r"'norm.weight' has shape \(5,\), the model has \(4,\)"),
        (MODEL | {"embed.weight": Entry("F32", (4, 8))}, r"'embed.weight' has shape \(4, 8\)"),
        (MODEL | {"norm.weight": Entry("I32", (4,))}, "'norm.weight' is I32, the model has F32"),
        (MODEL | {"norm.weight": Entry("F8_E4M3", (4,))}, "'norm.weight' is F8_E4M3, the model has F32"),
        ({"norm.weight": MODEL["norm.weight"]}, "1 tensors are missing, for example 'embed.weight'"),
        ({}, "2 tensors are missing"),
    ],
)
def test_unfit_weights_are_named(new: dict[str, Entry], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_layout(new, MODEL)


def test_whole_numbers_must_have_the_models_type() -> None:
    with pytest.raises(ConfigError, match="'d2t' is I32, the model has I64"):
        check_layout({"d2t": Entry("I32", (4,))}, {"d2t": Entry("I64", (4,))})


def test_a_head_of_its_own_must_fit_and_be_there() -> None:
    model = MODEL | {"lm_head.weight": HEAD}
    with pytest.raises(ConfigError, match=r"lm_head\.weight' has shape"):
        check_layout(MODEL | {"lm_head.weight": Entry("F32", (9, 4))}, model)
    with pytest.raises(ConfigError, match=r"1 tensors are missing, for example 'lm_head\.weight'"):
        check_layout(MODEL, model)


def test_what_vllm_does_not_read_may_be_there_or_not() -> None:
    model = MODEL | {"t2d": Entry("BOOL", (8,))}
    check_layout(MODEL, model, optional=["t2d"])
    check_layout(model, MODEL, optional=["t2d"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_must_be_finite(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(1000, dtype=dtype)
    file = tmp_path / "a.safetensors"
    save_file({"good": tensor, "bad": tensor * 1}, file)
    check_values([file])
    tensor[777] = value
    save_file({"good": torch.ones(3), "bad": tensor}, file)
    with pytest.raises(ConfigError, match="'bad' holds numbers that are not finite"):
        check_values([file])


@pytest.mark.parametrize(
    ("d2t", "said"),
    [
        ([0, 0, 3, 4], None),
        ([0, 0, 3, 5], "beyond the target's vocabulary of 8"),
        ([-1, 0, 3, 4], "beyond the target's vocabulary of 8"),
        ([1, 0, 3, 4], "same target token twice"),
    ],
)
def test_draft_tokens_must_be_the_targets(tmp_path: Path, d2t: list[int], said: str | None) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"d2t": torch.tensor(d2t)}, file)
    if said is None:
        check_values([file], vocabulary=8)
        return
    with pytest.raises(ConfigError, match=said):
        check_values([file], vocabulary=8)


def test_a_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    embedding = torch.ones(4, 2)
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}, file)
    check_values([file], tied=True)
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": embedding * 2}, file)
    check_values([file])
    with pytest.raises(ConfigError, match="these two differ"):
        check_values([file], tied=True)


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
    with staged(tensors) as (file,):
        loaded = load_file(file)
        assert {n: e.shape for n, e in layout_of([file]).items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(ConfigError, match="'x' is a list, not a tensor"), staged({"x": [1.0]}):  # type: ignore[dict-item]
        pass


def test_the_file_is_gone_afterwards_even_after_an_error() -> None:
    seen: list[Path] = []

    def load() -> None:
        with staged({"x": torch.zeros(2)}) as (file,):
            assert file.exists()
            seen.append(file)
            raise RuntimeError("while loading")

    with pytest.raises(RuntimeError, match="while loading"):
        load()
    assert not seen[0].exists()
    assert not seen[0].parent.exists()


@pytest.mark.parametrize("as_type", [str, Path])
def test_a_sender_may_write_on_meanwhile(tmp_path: Path, as_type: type) -> None:
    save_file({"x": torch.ones(1000)}, tmp_path / "model.safetensors")
    with staged(as_type(tmp_path)) as files:
        (tmp_path / "model.safetensors").write_bytes(b"")  # under a memory map this would be a bus error
        assert torch.equal(load_file(files[0])["x"], torch.ones(1000))
    assert not files[0].exists()
    assert (tmp_path / "model.safetensors").exists()


def test_where_shared_memory_is_too_small_the_temporary_folder_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEADROOM", 1e18)
    with staged({"x": torch.zeros(2)}) as (file,):
        assert module.SHARED_MEMORY not in file.parents
