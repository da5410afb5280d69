"""Small targets with EAGLE-3 heads, in the checkpoint format that vLLM loads, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

VOCABULARY = 32
HIDDEN = 64
INNER = 64
LAYERS = 4
AUX_LAYERS = (1, 2, 3)
# Two cycles; a prompt stays in the one that it starts in.
CYCLES = (range(20), range(20, 32))
SUCCESSOR = {token: cycle[(i + 1) % len(cycle)] for cycle in CYCLES for i, token in enumerate(cycle)}


class Pair(NamedTuple):
    target: Path
    head: Path


def look_up_pair(folder: Path) -> Pair:
    """A target that says each token's SUCCESSOR, and a head that knows it from its cache alone.

    The head's query is the last token, its keys are tokens and its values their successors: it drafts what followed
    the last token before. Where its cache has a hole it drafts what chance has it.
    """
    one_hot = torch.zeros(VOCABULARY, HIDDEN)  # a token has its own of the first 32 dimensions
    one_hot[:, :VOCABULARY] = torch.eye(VOCABULARY)
    target = _blank_target()
    target["model.embed_tokens.weight"] = one_hot
    for token, successor in SUCCESSOR.items():
        target["lm_head.weight"][successor] = 10 * one_hot[token]
    head = _blank_head()
    # Rotary embeddings hardly turn the slow half of each half: tokens are matched there.
    slow = torch.cat([torch.arange(16, 32), torch.arange(48, 64)])
    match = torch.zeros(HIDDEN, HIDDEN)
    match[slow, torch.arange(VOCABULARY)] = 2.0
    head["fc.weight"][:, :HIDDEN] = torch.eye(HIDDEN)  # of the first auxiliary state, which is the embedding
    head["midlayer.self_attn.q_proj.weight"][:, :HIDDEN] = match  # of the token after
    head["midlayer.self_attn.k_proj.weight"][:, HIDDEN:] = match  # of the token
    head["midlayer.self_attn.v_proj.weight"][:, :HIDDEN] = torch.eye(HIDDEN)  # of the token after
    head["midlayer.self_attn.o_proj.weight"][VOCABULARY:, :VOCABULARY] = 10 * torch.eye(VOCABULARY)
    head["lm_head.weight"] = one_hot.roll(VOCABULARY, 1)  # what attention wrote, beside the token
    return _save(folder, target, head, rope_theta=1e12)


def random_pair(folder: Path) -> Pair:
    """Random weights, large enough that each token and position leaves its mark."""
    torch.manual_seed(0)
    target, head = _blank_target(), _blank_head()
    for weights in (target, head):
        for name, weight in weights.items():
            if weight.dim() == 2:
                weights[name] = torch.randn(weight.shape) * (1.0 if "embed" in name else 1.5 * weight.shape[1] ** -0.5)
    return _save(folder, target, head, rope_theta=1e4)


def _blank_target() -> dict[str, torch.Tensor]:
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        shapes |= _layer(f"model.layers.{layer}", HIDDEN)
        norms += [f"model.layers.{layer}.{name}_layernorm" for name in ("input", "post_attention")]
    return _blank(shapes, norms)


def _blank_head() -> dict[str, torch.Tensor]:
    shapes = {"fc": (HIDDEN, len(AUX_LAYERS) * HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    norms = ["norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"]
    return _blank(shapes | _layer("midlayer", 2 * HIDDEN), norms)


def _layer(name: str, attention_input: int) -> dict[str, tuple[int, int]]:
    shapes = {f"{name}.self_attn.{part}_proj": (HIDDEN, attention_input) for part in "qkv"}
    shapes |= {f"{name}.mlp.{part}_proj": (INNER, HIDDEN) for part in ("gate", "up")}
    return shapes | {f"{name}.self_attn.o_proj": (HIDDEN, HIDDEN), f"{name}.mlp.down_proj": (HIDDEN, INNER)}


def _blank(shapes: dict[str, tuple[int, int]], norms: list[str]) -> dict[str, torch.Tensor]:
    weights = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    return weights | {f"{name}.weight": torch.ones(HIDDEN) for name in norms}


def _save(folder: Path, target: dict[str, torch.Tensor], head: dict[str, torch.Tensor], rope_theta: float) -> Pair:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
    eagle = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "target_hidden_size": HIDDEN,
        "draft_vocab_size": VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "norm_before_residual": True,
    }
    pair = Pair(folder / "target", folder / "head")
    for path, tree, weights in ((pair.target, config, target), (pair.head, config | eagle, head)):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(tree))
        weights = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
    return pair
