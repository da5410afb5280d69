"""A target and a head made by hand, which say what followed the last token before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import tiny
import torch
from tiny import HIDDEN, VOCABULARY

from rollout_spec.draft.checkpoint import save_head
from rollout_spec.draft.model import Eagle3Head

# Two cycles; a prompt stays in the one that it starts in.
CYCLES = (range(2, 20), range(20, 32))
SUCCESSOR = {token: cycle[(i + 1) % len(cycle)] for cycle in CYCLES for i, token in enumerate(cycle)}
# A token has its own of the first dimensions.
ONE_HOT = torch.eye(VOCABULARY, HIDDEN)
ALL = torch.arange(VOCABULARY)
# What a head with a vocabulary of its own can draft.
MOST = ALL[ALL % 8 != 5]


class Pair(NamedTuple):
    target: Path
    head: Path


def look_up_pair(folder: Path) -> Pair:
    """A target that says each token's SUCCESSOR, and a head that knows it from its cache alone: see `look_up_head`."""
    model = tiny.llama(tie_word_embeddings=False)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(ONE_HOT)
        for token, successor in SUCCESSOR.items():
            model.lm_head.weight[successor] = 10 * ONE_HOT[token]
    model.save_pretrained(folder / "target")
    return _with_head(folder, look_up_head())


def broad_pair(folder: Path) -> Pair:
    """The same head, for most tokens, with a target that may say anything, by a law that all so far have a part in."""
    model = tiny.spread(tiny.llama(tie_word_embeddings=False))
    first = model.model.layers[0]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(ONE_HOT)
        for out in (first.self_attn.o_proj, first.mlp.down_proj):
            out.weight.zero_()  # the head's first feature has to be the token
    model.save_pretrained(folder / "target")
    return _with_head(folder, look_up_head(MOST), MOST)


def random_pair(folder: Path) -> Pair:
    """Weights large enough that each token and position leaves its mark."""
    torch.manual_seed(0)
    head = Eagle3Head(tiny.head_shape(VOCABULARY))
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.5 * weight.shape[1] ** -0.5)
    tiny.make_target(folder / "target", tie_word_embeddings=False)
    return _with_head(folder, head)


def look_up_head(ids: torch.Tensor = ALL) -> Eagle3Head:
    """Over the tokens `ids`. Its query is the last token, its keys are tokens, its values their successors: it drafts
    what followed the last token before. Where its cache has a hole it drafts what chance has it.
    """
    # So slow that rotary embeddings hardly turn the second half of each half: tokens are matched there.
    head = Eagle3Head(tiny.head_shape(len(ids), rope_theta=1e12))
    attention = head.midlayer.self_attn
    half, quarter = attention.width // 2, attention.width // 4
    slow = torch.cat([torch.arange(quarter, half), torch.arange(half + quarter, attention.width)])
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 2:
                weight.zero_()
        head.fc.weight[:, :HIDDEN] = torch.eye(HIDDEN)  # of the first auxiliary state, which is the embedding
        attention.q_proj.weight[slow, ALL] = 2.0  # of the token after
        attention.k_proj.weight[slow, HIDDEN + ALL] = 2.0  # of the token
        attention.v_proj.weight[ALL, ALL] = 1.0  # of the token after
        attention.o_proj.weight[VOCABULARY + ALL, ALL] = 10.0
        head.lm_head.weight.copy_(ONE_HOT.roll(VOCABULARY, 1)[ids])  # what attention wrote, beside the token
    return head


def _with_head(folder: Path, head: Eagle3Head, ids: torch.Tensor = ALL) -> Pair:
    save_head(folder / "head", head, ids, provenance={})
    # Else what a draft step wrote would stand beside what the next one writes, and as large.
    config = folder / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"norm_before_residual": True}))
    return Pair(folder / "target", folder / "head")
