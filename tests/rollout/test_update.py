"""Checks and order of an update, on workers that only say what they were told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_spec.config import ConfigError
from rollout_spec.rollout.update import UpdateFailed, WeightSync

TARGET = {"model.embed_tokens.weight": torch.ones(8, 4), "model.norm.weight": torch.ones(4)}
HEAD = {"fc.weight": torch.ones(4, 12), "d2t": torch.tensor([0, 0, 3, 4])}


class Workers:
    """Two of them. `says[method]` are their answers."""

    def __init__(self, shared: list[str] | None = None) -> None:
        self.says: dict[str, list[Any]] = {"rollout_spec_shared_layers": [shared or []] * 2}
        self.told: list[tuple[Any, ...]] = []
        self.draft: dict[str, torch.Tensor] = {}

    def __call__(self, method: str, *args: Any) -> list[Any]:
        if method == "rollout_spec_load_weights":
            self.draft = {name: tensor for file in args[1] for name, tensor in load_file(file).items()}
            args = tuple(len(files) for files in args)
        self.told.append((method.removeprefix("rollout_spec_"), *args))
        return self.says.get(method, [None, None])


def make(tmp_path: Path, workers: Workers, head: dict[str, torch.Tensor] = HEAD, method: str = "eagle3") -> WeightSync:
    for name, tensors in (("target", TARGET), ("head", head)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    (tmp_path / "own").mkdir()
    spec = {"method": method, "model": str(tmp_path / "head")}
    arguments = {"model": str(tmp_path / "target"), "speculative_config": spec}
    return WeightSync(workers, arguments, tmp_path / "own")


def test_both_go_in_as_one_load_and_are_kept(tmp_path: Path) -> None:
    workers = Workers()
    make(tmp_path, workers).load(TARGET, HEAD, vocabulary=8)
    assert workers.told == [("shared_layers",), ("load_weights", 1, 1), ("settle_weights", True)]


def test_one_worker_that_fails_makes_all_go_back(tmp_path: Path) -> None:
    workers = Workers()
    workers.says["rollout_spec_load_weights"] = [None, "OSError: gone"]
    with pytest.raises(UpdateFailed, match="the old ones stay in force: OSError: gone"):
        make(tmp_path, workers).load(TARGET, None, vocabulary=8)
    assert workers.told[-1] == ("settle_weights", False)


def test_a_worker_that_cannot_go_back_is_named(tmp_path: Path) -> None:
    workers = Workers()
    workers.says["rollout_spec_load_weights"] = [None, "OSError: gone"]
    workers.says["rollout_spec_settle_weights"] = [None, "draft weights are not what they were"]
    with pytest.raises(
        UpdateFailed, match=r"did not come back.*draft weights are not what they were.*start a new engine"
    ):
        make(tmp_path, workers).load(TARGET, None, vocabulary=8)


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        (TARGET, {"fc.weight": HEAD["fc.weight"]}, "1 tensors are missing, for example 'd2t'"),
        (TARGET, HEAD | {"d2t": torch.tensor([0, 0, 3, 9])}, "beyond the target's vocabulary"),
        (TARGET, HEAD | {"d2t": HEAD["d2t"].int()}, "'d2t' is I32, the model has I64"),
        (TARGET, HEAD | {"embed_tokens.weight": torch.ones(8, 4)}, "would overwrite the target's"),
        (TARGET | {"lm_head.weight": torch.zeros(8, 4)}, HEAD, "these two differ"),
        ({}, HEAD, "2 tensors are missing"),
    ],
)
def test_what_does_not_fit_reaches_no_worker(tmp_path: Path, target: Any, draft: Any, said: str) -> None:
    workers = Workers(shared=["embed_tokens"])
    with pytest.raises(ConfigError, match=said):
        make(tmp_path, workers).load(target, draft, vocabulary=8)
    assert {method for method, *_ in workers.told} <= {"shared_layers"}


def test_a_head_with_layers_of_its_own_must_bring_them(tmp_path: Path) -> None:
    head = HEAD | {"embed_tokens.weight": torch.ones(8, 4)}
    sync = make(tmp_path, Workers(), head)
    sync.load(None, head, vocabulary=8)
    with pytest.raises(ConfigError, match=r"missing, for example 'embed_tokens\.weight'"):
        sync.load(None, HEAD, vocabulary=8)


def test_the_draft_comes_back_as_it_was_last_given(tmp_path: Path) -> None:
    workers = Workers(shared=["embed_tokens"])
    # As many heads are published: with a copy of the embedding that vLLM does not use.
    sync = make(tmp_path, workers, HEAD | {"embed_tokens.weight": torch.ones(8, 4)})
    sync.reload_draft()
    assert workers.draft.keys() == HEAD.keys()
    new = HEAD | {"fc.weight": HEAD["fc.weight"] * 5}
    save_file(new, tmp_path / "sent.safetensors")
    sync.load(None, tmp_path / "sent.safetensors", vocabulary=8)
    (tmp_path / "sent.safetensors").unlink()
    workers.draft = {}
    sync.reload_draft()
    assert torch.equal(workers.draft["fc.weight"], new["fc.weight"])


def test_a_refused_draft_is_not_kept(tmp_path: Path) -> None:
    workers = Workers()
    sync = make(tmp_path, workers)
    workers.says["rollout_spec_load_weights"] = ["OSError: gone", None]
    with pytest.raises(UpdateFailed):
        sync.load(None, HEAD | {"fc.weight": HEAD["fc.weight"] * 5}, vocabulary=8)
    del workers.says["rollout_spec_load_weights"]
    sync.reload_draft()
    assert torch.equal(workers.draft["fc.weight"], HEAD["fc.weight"])


@pytest.mark.parametrize("method", ["ngram", "suffix", "mtp"])
def test_a_drafter_without_a_checkpoint_cannot_be_refreshed(tmp_path: Path, method: str) -> None:
    sync = make(tmp_path, Workers(), method=method)
    assert not sync.has_draft
    with pytest.raises(ConfigError, match=f"drafter '{method}' has no weights of its own"):
        sync.load(None, HEAD, vocabulary=8)


def test_damage_in_any_worker_counts(tmp_path: Path) -> None:
    workers = Workers()
    workers.says["rollout_spec_changed_weights"] = [[], ["draft"]]
    assert make(tmp_path, workers).changed() == ["draft"]
