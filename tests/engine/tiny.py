"""Tiny models with random weights, made in a moment: targets that differ by seed, and EAGLE-3 heads for them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY, DRAFT_VOCABULARY = 32, 24
HIDDEN, INTERMEDIATE, LAYERS, HEADS, HEAD_DIM = 128, 256, 4, 2, 64
CONTEXT = 512
# Hidden states that go into these layers are the head's features.
FEATURES = (1, 2, 3)


def make_target(folder: Path, seed: int) -> Path:
    """A Llama in Hugging Face format with tied embeddings (the harder case: its head must be packed again)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Large enough that layers outweigh the token they started from, and that no two logits are nearly equal.
            if weight.dim() == 2:
                weight.mul_(20.0 if "embed" in name else 6.0)
    model.save_pretrained(folder)
    return folder


def make_head(folder: Path, seed: int) -> Path:
    """An EAGLE-3 head as vLLM loads it, without the target's embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": list(FEATURES),
        "norm_before_residual": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(head_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def head_weights(seed: int) -> dict[str, torch.Tensor]:
    """Weights are [out, in]; q, k and v see the embedding beside the hidden state."""
    make = torch.Generator().manual_seed(1000 + seed)
    inner = HEADS * HEAD_DIM
    shapes = {
        "fc": (HIDDEN, HIDDEN * len(FEATURES)),
        "midlayer.self_attn.q_proj": (inner, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (inner, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (inner, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, inner),
        "midlayer.mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "midlayer.mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "lm_head": (DRAFT_VOCABULARY, HIDDEN),
    }
    weights = {f"{name}.weight": torch.randn(shape, generator=make) * 0.1 for name, shape in shapes.items()}
    # The target's features are large and much alike; the token must outweigh them, or all drafts are the same.
    weights["fc.weight"] *= 0.01
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        weights[f"{norm}.weight"] = torch.ones(HIDDEN)
    chosen = torch.randperm(VOCABULARY, generator=make)[:DRAFT_VOCABULARY].sort().values
    weights["d2t"] = chosen - torch.arange(DRAFT_VOCABULARY)
    return weights
