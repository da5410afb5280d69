"""Draft weights go into the running engine: what is drafted changes, what is sampled does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from fresh import engine, run_fresh, scheduler_of

from rollout_spec.config import ConfigError, SamplingConfig
from rollout_spec.rollout.types import Span

GREEDY = SamplingConfig(temperature=0)
PROMPTS = [[(5 + 7 * i * i + 3 * j) % tiny.VOCABULARY for i in range(12 + j)] for j in range(4)]
LENGTHS = [[25]] * len(PROMPTS)
K = 3


def weights(folder: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def draft_model(folder: Path) -> dict[str, Any]:
    """The drafter begins as another model and is given the target's weights: then all that it drafts is right."""
    out: dict[str, Any] = {}
    options = {"drafter__method": "draft_model", "drafter__model": str(folder / "b"), "drafter__k_max": K}
    with engine(folder / "a", **options) as worker:

        def generate(what: str) -> None:
            rollouts = worker.generate(PROMPTS, sampling=GREEDY, output_tokens=LENGTHS)
            out[what] = [r.token_ids for r in rollouts]
            loop = scheduler_of(worker)._loop
            out[f"{what}: seen"] = loop.policy.acceptance.version
            fixed = worker.generate(PROMPTS, sampling=GREEDY, output_tokens=LENGTHS)
            out[f"{what}: rates"] = {(r.speculation.accepted_tokens, r.speculation.draft_tokens) for r in fixed}

        scheduler_of(worker)._loop.decide = always(scheduler_of(worker)._loop)
        generate("other")
        worker.refresh_draft(weights(folder / "a"), draft_version=4)
        generate("same")
        # A tied draft may come with its head, like a tied target; both at once, and what one lacks refuses both.
        both = weights(folder / "b")
        both["lm_head.weight"] = both["model.embed_tokens.weight"]
        worker.update_weights(folder / "b", 1, draft=both, draft_version=5)
        generate("both")
        out["refused"] = []
        for target, draft in [(folder / "a", {}), ({}, folder / "a")]:
            with pytest.raises(ConfigError) as error:
                worker.update_weights(target, 2, draft=draft, draft_version=6)
            out["refused"].append(str(error.value))
        generate("after refusals")
        out["versions"] = worker.policy_version, worker.draft_version

        ids = worker.submit(PROMPTS, sampling=GREEDY, output_tokens=LENGTHS)
        for _ in range(3):
            worker.step()
        worker.refresh_draft(folder / "a", draft_version=7)
        while worker.num_unfinished:
            worker.step()
        out["in flight"] = [worker.take(request_id) for request_id in ids]
    return out


def always(loop: Any) -> Any:
    """The loop's own `decide`, at K: the policy hears all events, and there are drafts at every step."""
    from rollout_spec.control.policy import Decision

    decide = loop.decide

    def at_k(view: Any) -> Decision:
        decide(view)
        return Decision(K)

    return at_k


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny.make_target(folder / "a", 0)
    tiny.make_target(folder / "b", 1)
    return folder


@pytest.fixture(scope="module")
def result(models: Path) -> dict[str, Any]:
    return run_fresh(draft_model, models)


def test_a_refreshed_draft_drafts_what_its_new_weights_say(result: dict[str, Any]) -> None:
    assert all(accepted < drafted / 2 for accepted, drafted in result["other: rates"])
    # All but what lies beyond the end of a response.
    assert all(accepted > drafted - K - 1 for accepted, drafted in result["same: rates"] | result["both: rates"])
    assert result["other"] == result["same"]


def test_target_and_draft_change_together_or_not_at_all(result: dict[str, Any]) -> None:
    assert result["both"] != result["same"]
    assert all("missing" in said for said in result["refused"])
    assert result["after refusals"] == result["both"]
    assert result["after refusals: rates"] == result["both: rates"]
    assert result["versions"] == (1, 5)


def test_the_controller_hears_of_either(result: dict[str, Any]) -> None:
    seen = [result[f"{what}: seen"] for what in ("other", "same", "both", "after refusals")]
    assert [later - seen[0] for later in seen] == [0, 1, 3, 3]


def test_a_refresh_in_flight_changes_no_token_and_is_told(result: dict[str, Any]) -> None:
    assert [rollout.token_ids for rollout in result["in flight"]] == result["both"]
    for rollout in result["in flight"]:
        first, second = rollout.spans
        assert first == Span(0, 1, 5)
        assert second == Span(second.start, 1, 7)
        assert 0 < second.start < 25


def without_weights(folder: Path) -> str:
    with engine(folder / "a") as worker, pytest.raises(ConfigError) as error:
        worker.refresh_draft({}, draft_version=1)
    return str(error.value)


def test_a_drafter_without_weights_says_so(models: Path) -> None:
    assert "drafter 'ngram' has no weights of its own" in run_fresh(without_weights, models)
