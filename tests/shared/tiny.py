"""Tiny Llamas and EAGLE-3 heads with random weights, as vLLM loads them, made in a moment.

Of one shape, unless a test needs another. `look_up` and `chain` have some of them that know things.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollout_spec.draft.checkpoint import save_head
from rollout_spec.draft.model import Eagle3Head
from rollout_spec.draft.shape import HeadShape
from rollout_spec.draft.vocabulary import d2t

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

VOCABULARY, DRAFT_VOCABULARY = 32, 24
BEGIN, END = 0, 1
HIDDEN, LAYERS, CONTEXT = 128, 4, 512
# Hidden states that go into these layers are a head's features.
FEATURES = (1, 2, 3)
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "pad_token_id": END,
    "tie_word_embeddings": True,  # the harder case: the output layer must be packed again after an update
}


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """With the weights that training would start from, CONFIG but for the changes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(CONFIG | changes))).float()


def spread(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same with larger weights: layers outweigh the token they started from, and no two logits are nearly equal."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.mul_(20.0 if "embed" in name else 8.0 if "lm_head" in name else 6.0)
    return model


def make_target(folder: Path, seed: int = 0, **changes: Any) -> Path:
    spread(llama(seed, **changes)).save_pretrained(folder)
    return folder


def head_shape(draft_vocabulary: int = DRAFT_VOCABULARY, **changes: Any) -> HeadShape:
    return replace(HeadShape.for_target(CONFIG, draft_vocabulary, FEATURES, None), **changes)


def random_head(seed: int = 0) -> tuple[Eagle3Head, torch.Tensor]:
    """And the target's ids [draft vocabulary] of its tokens."""
    torch.manual_seed(1000 + seed)
    head = Eagle3Head(head_shape())
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.1)
        # The target's features are large and much alike; the token must outweigh them, or all drafts are the same.
        head.fc.weight.mul_(0.01)
    return head, torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values


def make_head(folder: Path, seed: int = 0) -> Path:
    save_head(folder, *random_head(seed), provenance={})
    return folder


def head_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """As the file of `make_head` has them, before they are rounded to bfloat16."""
    head, ids = random_head(seed)
    return {**head.state_dict(), "d2t": d2t(ids)}
