"""Synthetic acceptance on CPU, where vLLM's kernels refuse it.

vLLM accepts drafts by given chances (`rejection_sample_method: synthetic`), to measure without a trained drafter. Its
GPU kernels can; those of its CPU platform assert that nobody asks. `overrides` puts these in their place, only for an
engine that does ask. The text is not the model's, there or here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# The kernels that these replace, by the name of ours: for steps that are not synthetic.
STOCK: dict[str, Callable[..., None]] = {}


def accept(
    output: torch.Tensor,
    cu_drafts: torch.Tensor,
    drafts: torch.Tensor,
    otherwise: torch.Tensor,
    bonus: torch.Tensor,
    uniform: torch.Tensor,
    rates: torch.Tensor,
    mine: torch.Tensor | None,
) -> None:
    """Accept draft j of a sequence with chance rates[j], given those before it; then one token that is no draft.

    output [batch, K + 1], cu_drafts [batch], bonus [batch, 1]; drafts, otherwise and uniform [sum of drafts];
    rates [k_max]; mine [batch]: rows to write, None all. Padding (a draft below 0) is never accepted.
    """
    counts = torch.diff(cu_drafts, prepend=cu_drafts.new_zeros(1)).long()
    batch = torch.arange(len(counts))
    row = torch.repeat_interleave(batch, counts)
    column = torch.arange(len(drafts)) - (cu_drafts.long() - counts)[row]
    hit = torch.zeros(output.shape, dtype=torch.bool)
    hit[row, column] = (uniform < rates[column]) & (drafts >= 0)
    accepted = hit.long().cumprod(1).sum(1)
    new, last = torch.full_like(output, -1), torch.full_like(output, -1)
    new[row, column] = drafts.to(output.dtype)
    last[row, column] = otherwise.to(output.dtype)
    last[batch, counts] = bonus.flatten().to(output.dtype)
    new[batch, accepted] = last[batch, accepted]
    new[torch.arange(output.shape[1]) > accepted[:, None]] = -1
    output.copy_(new if mine is None else torch.where(mine[:, None], new, output))


def greedy(  # arguments by the kernel's names and order
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
    uniform_probs: torch.Tensor | None = None,
    synthetic_conditional_rates: torch.Tensor | None = None,
    SYNTHETIC_MODE: bool = False,  # noqa: N803
) -> None:
    if not SYNTHETIC_MODE:
        STOCK["greedy"](
            output_token_ids, cu_num_draft_tokens, draft_token_ids, target_argmax, bonus_token_ids, is_greedy,
            max_spec_len,
        )  # fmt: skip
        return
    assert uniform_probs is not None
    assert synthetic_conditional_rates is not None
    accept(
        output_token_ids, cu_num_draft_tokens, draft_token_ids, target_argmax, bonus_token_ids, uniform_probs,
        synthetic_conditional_rates, is_greedy,
    )  # fmt: skip


def random(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform_probs: torch.Tensor,
    is_greedy: torch.Tensor,
    max_spec_len: int,
    vocab_size: int,
    synthetic_conditional_rates: torch.Tensor | None = None,
    NO_DRAFT_PROBS: bool = False,  # noqa: N803
    SYNTHETIC_MODE: bool = False,  # noqa: N803
) -> None:
    if not SYNTHETIC_MODE:
        STOCK["random"](
            output_token_ids, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, bonus_token_ids,
            recovered_token_ids, uniform_probs, is_greedy, max_spec_len, vocab_size, None, NO_DRAFT_PROBS,
        )  # fmt: skip
        return
    assert synthetic_conditional_rates is not None
    accept(
        output_token_ids, cu_num_draft_tokens, draft_token_ids, recovered_token_ids, bonus_token_ids, uniform_probs,
        synthetic_conditional_rates, ~is_greedy,
    )  # fmt: skip
