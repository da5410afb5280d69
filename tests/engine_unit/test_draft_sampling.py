"""Drafts sampled in the head's own vocabulary, held against vLLM's, which are sampled in the target's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from vllm.v1.spec_decode.eagle import EagleProposer

from rollout_spec.engine.draft_cache import DeferringEagleProposer

VOCABULARY, DRAFT, HIDDEN = 40, 7, 5
IDS = torch.tensor([1, 4, 5, 11, 20, 38, 39])


def proposer(cls: type, head: torch.Tensor, probabilistic: bool = True) -> Any:
    """The class without an engine: it has what sampling asks for and no more."""
    offsets = IDS - torch.arange(DRAFT)

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(hidden), VOCABULARY), float("-inf"))
        logits[:, IDS] = hidden @ head.T
        return logits

    made = object.__new__(cls)
    made.model = SimpleNamespace(
        draft_id_to_target_id=offsets,
        lm_head=head,
        logits_processor=lambda lm_head, hidden: hidden @ lm_head.T,
        config=SimpleNamespace(vocab_size=VOCABULARY),
        compute_logits=compute_logits,
    )
    made.use_local_argmax_reduction = made.use_heterogeneous_vocab = made.use_fp64_gumbel = False
    made._enable_probabilistic_draft_probs = probabilistic
    return made


def metadata(temperature: list[float]) -> Any:
    return SimpleNamespace(
        temperature=torch.tensor(temperature),
        all_greedy=not any(temperature),
        all_random=all(temperature),
    )


def test_sampled_drafts_have_vllms_probabilities_and_follow_them() -> None:
    torch.manual_seed(0)
    head, hidden = torch.randn(DRAFT, HIDDEN), torch.randn(2, HIDDEN)
    at = metadata([1.0, 0.6])
    _, stock = proposer(EagleProposer, head)._sample_draft_tokens(hidden, at)
    _, ours = proposer(DeferringEagleProposer, head)._sample_draft_tokens(hidden, at)
    assert ours.shape == stock.shape == (2, VOCABULARY)
    assert ours.dtype == stock.dtype
    torch.testing.assert_close(ours, stock)
    many = metadata([1.0, 0.6] * 20_000)
    tokens, _ = proposer(DeferringEagleProposer, head)._sample_draft_tokens(hidden.repeat(20_000, 1), many)
    for row in (0, 1):
        counts = torch.bincount(tokens[row::2], minlength=VOCABULARY)
        assert counts.sum() == counts[IDS].sum()
        assert chisquare(counts[IDS], 20_000 * ours[row, IDS].double() / ours[row, IDS].double().sum()).pvalue > 1e-4


@pytest.mark.parametrize(("probabilistic", "temperature"), [(True, [0.0] * 9), (False, [1.0] * 9)])
def test_greedy_drafts_are_vllms(probabilistic: bool, temperature: list[float]) -> None:
    torch.manual_seed(1)
    head, hidden = torch.randn(DRAFT, HIDDEN), torch.randn(9, HIDDEN)
    stock, _ = proposer(EagleProposer, head, probabilistic)._sample_draft_tokens(hidden, metadata(temperature))
    ours, probs = proposer(DeferringEagleProposer, head, probabilistic)._sample_draft_tokens(
        hidden, metadata(temperature)
    )
    assert ours.tolist() == stock.tolist()
    assert probs is None


def test_greedy_and_sampled_requests_in_one_batch() -> None:
    torch.manual_seed(2)
    head, hidden = torch.randn(DRAFT, HIDDEN), torch.randn(4, HIDDEN)
    at = metadata([0.0, 1.0, 0.0, 1.0])
    tokens, probs = proposer(DeferringEagleProposer, head)._sample_draft_tokens(hidden, at)
    _, stock = proposer(EagleProposer, head)._sample_draft_tokens(hidden, at)
    torch.testing.assert_close(probs, stock)
    assert tokens[::2].tolist() == IDS[(hidden @ head.T).argmax(-1)][::2].tolist()


def test_a_head_with_the_targets_vocabulary_is_left_to_vllm() -> None:
    head = torch.randn(DRAFT, HIDDEN)
    made = proposer(DeferringEagleProposer, head)
    made.model.draft_id_to_target_id = None
    made.model.compute_logits = lambda hidden: hidden @ head.T
    _, probs = made._sample_draft_tokens(torch.randn(3, HIDDEN), metadata([1.0] * 3))
    assert probs.shape == (3, DRAFT)
