"""Tests with real vLLM engines: marked `engine`, each engine in a process of its own (see `fresh`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_spec.model import DEFAULT_MODEL, resolve

VOCABULARY = 32


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The default model, with trained weights."""
    return Path(resolve(DEFAULT_MODEL))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights over 32 tokens: broad next-token laws, steps of 2 ms."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # Random logits are nearly equal; spread out, some tokens are likely and drafts are sometimes accepted.
        model.lm_head.weight.mul_(8.0)
        model.model.embed_tokens.weight.mul_(20.0)
    folder = tmp_path_factory.mktemp("tiny_model")
    model.float().save_pretrained(folder)
    return folder
