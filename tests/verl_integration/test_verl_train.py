"""verl's own trainer through our rollout: real verl, Ray, vLLM and weight synchronisation, on this CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import verl_job as job

from rollout_spec.model import DEFAULT_MODEL, resolve

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama of random weights that repeats itself, so that n-grams are found, with a real tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve(DEFAULT_MODEL))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        # Tied embeddings this large make the last token likely again, at about six to one.
        made.model.embed_tokens.weight.mul_(11.0)
    folder = tmp_path_factory.mktemp("model")
    made.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_two_steps_of_grpo_with_speculation(tmp_path: Path, model: Path) -> None:
    group = "actor_rollout_ref.rollout.rollout_spec"
    # A fixed K, so that there are drafts whatever this machine's step times are.
    status, output = job.run(tmp_path, model, [f"++{group}.policy={{name: fixed, k: 3}}"])
    found = job.steps(tmp_path)
    assert (status, len(found)) == (0, 2), output[-6000:]
    first, second = found
    assert second["rollout_spec/weight_updates"] == first["rollout_spec/weight_updates"] + 1
    for step in found:
        # Plain verl has 0.0018 and 0.014 with this model.
        assert step["training/rollout_probs_diff_mean"] < 0.005
        assert step["training/rollout_probs_diff_max"] < 0.05
        assert step["rollout_spec/engines"] == 1
        assert step["rollout_spec/controller_failed"] == 0
        assert 0 < step["rollout/spec_accept_rate"] <= 1
        assert 1 < step["rollout/spec_accept_length"] <= 4
        assert any(name.startswith("rollout_spec/mean_k/live_from_") for name in step)


def test_a_wrong_option_ends_the_job_before_ray_starts(tmp_path: Path, model: Path) -> None:
    status, output = job.run(tmp_path, model, ["++actor_rollout_ref.rollout.rollout_spec.drafter.k_max=0"])
    assert status not in (0, -1)
    assert "actor_rollout_ref.rollout.rollout_spec: drafter.k_max: value 0" in output
    assert "ray init" not in output


def test_an_engine_that_fails_in_a_weight_update_ends_the_job(tmp_path: Path, model: Path) -> None:
    """Plain verl waits for ever."""
    rollout = "actor_rollout_ref.rollout"
    failing = f"{rollout}.engine_kwargs.vllm.worker_extension_cls=failing_worker.FailingExtension"
    status, output = job.run(tmp_path, model, [failing, f"++{rollout}.rollout_spec.weight_sync_seconds=5"])
    assert status not in (0, -1)
    assert "a planted failure" in output
    assert "did not take new weights within 5 s" in output
