"""Step times computed from vLLM's configuration, with stand-ins for it: the real one needs a model and a GPU."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scheduler_harness import make_config

from rollout_spec.engine import control_loop, prior
from rollout_spec.engine.prior import drafter_of, model_of, roofline_prior, times_on

LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "hidden_act": "silu",
}  # fmt: skip
QWEN3_30B_A3B = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MIXTRAL_8X7B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
DEEPSEEK_V3 = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
GPT_OSS_120B = {
    "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 128, "experts_per_token": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip


def engine(text: dict[str, Any], gpus: int = 4, method: str = "ngram", **changes: Any) -> Any:
    """What of a VllmConfig is read. `changes` are fields of the model's part and of the speculative part."""
    spec = {"method": method, "draft_model_config": None, "draft_parallel_config": None}
    model = {"dtype": torch.bfloat16, "quantization": None, "max_model_len": 32768}
    for name, value in changes.items():
        (spec if name.startswith("draft") else model)[name] = value
    hf = SimpleNamespace(**text, quantization_config=model.pop("quantization_config", None))
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=hf, hf_config=hf, **model),
        parallel_config=SimpleNamespace(tensor_parallel_size=gpus, pipeline_parallel_size=1),
        speculative_config=SimpleNamespace(**spec),
        scheduler_config=SimpleNamespace(max_num_seqs=1024),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


@pytest.mark.parametrize(
    ("text", "total", "active", "experts"),
    [
        # Published figures in billions; what is read of them leaves the input embeddings out.
        (LLAMA_70B, 70.6 - 1.05, 70.6 - 1.05, (1, 1)),
        (QWEN3_30B_A3B, 30.5 - 0.31, 3.3 - 0.31, (128, 8)),
        (MIXTRAL_8X7B, 46.7 - 0.13, 12.9 - 0.13, (8, 2)),
        (DEEPSEEK_V3, 671 - 0.93, 37 - 0.93, (256, 8)),
        (GPT_OSS_120B, 116.8 - 0.58, 5.1, (128, 4)),  # the published 5.1 leave them out, too
    ],
)
def test_parameters_are_the_published_ones(
    text: dict[str, Any], total: float, active: float, experts: tuple[int, int]
) -> None:
    model = model_of(SimpleNamespace(**text))
    assert model.params / 1e9 == pytest.approx(total, rel=0.01)
    assert model.active_params / 1e9 == pytest.approx(active, rel=0.02)
    assert (model.experts, model.experts_a_token) == experts


def test_keys_and_values_of_a_token() -> None:
    assert (model_of(SimpleNamespace(**QWEN3_30B_A3B)).kv_heads, 128) == (4, 128)
    # Beyond its heads a GPU more saves nothing.
    assert model_of(SimpleNamespace(**QWEN3_30B_A3B), gpus=8).kv_heads == 8
    latent = model_of(SimpleNamespace(**DEEPSEEK_V3), gpus=8)
    assert 2 * latent.kv_heads * latent.head_dim / 8 == 576


def speculates_up_to(times: Any, rate: float, k_max: int = 8) -> int:
    """The largest batch at which some K > 0 has the most tokens a second, `rate` being the chance of a draft."""
    length = [sum(rate**j for j in range(k + 1)) for k in range(k_max + 1)]
    best = 0
    for batch in range(1, 1024):
        seconds = times.by_k(batch, k_max)
        goodput = [tokens / time for tokens, time in zip(length, seconds, strict=True)]
        best = batch if goodput.index(max(goodput)) else best
    return best


@pytest.mark.parametrize("gpus", [4, 8])
def test_k_falls_to_0_near_the_ridge_point(gpus: int) -> None:
    """At half the drafts accepted K=1 is the last to go: there B (K + 1) tokens are about those of the ridge."""
    times = times_on("NVIDIA H200", engine(LLAMA_70B, gpus), 8)
    assert times is not None
    ridge = 989e12 / 4.8e12  # a token has as many operations as a weight has bytes
    assert speculates_up_to(times, 0.5) == pytest.approx(ridge / 2, rel=0.4)  # host and all-reduces delay it
    assert speculates_up_to(times, 0.3) < speculates_up_to(times, 0.5) < speculates_up_to(times, 0.7)
    # Eight bits: both sides of the ridge move by two.
    fp8 = times_on("NVIDIA H200", engine(LLAMA_70B, gpus, quantization="fp8"), 8)
    assert fp8 is not None
    assert fp8.by_k(1, 0)[0] < 0.7 * times.by_k(1, 0)[0]
    # Four bits are read sooner, and computed with in sixteen.
    awq = times_on("NVIDIA H200", engine(LLAMA_70B, gpus, quantization="awq_marlin"), 8)
    assert awq is not None
    assert speculates_up_to(awq, 0.5) < 0.5 * speculates_up_to(times, 0.5)


def test_times_are_of_the_right_size() -> None:
    times = times_on("NVIDIA H200", engine(LLAMA_70B), 5)
    assert times is not None
    assert 0.008 < times.by_k(1, 0)[0] < 0.015  # 140 GB on four GPUs of 4.8 TB/s
    assert times.by_k(64, 0, 30_000)[0] > 1.5 * times.by_k(64, 0, 0)[0]
    assert times.spread == prior.SPREAD
    assert times.k == (0, 1, 2, 3, 4, 5)
    assert (times.batch[0], times.batch[-1]) == (1, 1024)
    assert times.batch[:8] == (1, 2, 3, 4, 6, 8, 12, 16)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA B200", True),
        ("NVIDIA H100 PCIe", False),
        ("NVIDIA H100 NVL", False),
        ("NVIDIA GH200 480GB", False),
        ("NVIDIA A100-SXM4-80GB", False),
        ("CPU", False),
    ],
)
def test_devices(name: str, known: bool) -> None:
    assert (times_on(name, engine(QWEN3_30B_A3B, 1), 4) is not None) == known


def test_drafters() -> None:
    assert drafter_of(engine(LLAMA_70B, method="suffix")).params == 0
    eagle = drafter_of(engine(LLAMA_70B, method="eagle3"))
    assert eagle.params / 1e9 == pytest.approx(0.856 + 1.05, rel=0.01)
    small = SimpleNamespace(hf_config=SimpleNamespace(draft_vocab_size=32000))
    assert drafter_of(engine(LLAMA_70B, method="eagle3", draft_model_config=small)).params / 1e9 == pytest.approx(
        0.856 + 0.26, rel=0.01
    )
    assert 1e9 < drafter_of(engine(DEEPSEEK_V3, 8, method="deepseek_mtp")).params < 3e9
    alone = {"draft_parallel_config": SimpleNamespace(tensor_parallel_size=1)}
    text = SimpleNamespace(**(LLAMA_70B | {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}))
    draft = drafter_of(
        engine(LLAMA_70B, method="draft_model", draft_model_config=SimpleNamespace(hf_text_config=text), **alone)
    )
    assert draft.params == model_of(text).params
    assert not draft.sharded
    # A drafter that reads weights makes drafting a large part of what K costs.
    shares = [times_on("NVIDIA H200", engine(LLAMA_70B, method=m), 4).draft_share for m in ("ngram", "eagle3")]  # type: ignore[union-attr]
    assert 0 < shares[0] < shares[1] < 1


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps what its loggers say from pytest."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "vllm.rollout_spec"]


@pytest.mark.parametrize(
    "config",
    [
        engine(LLAMA_70B | {"linear_num_value_heads": 32}),
        engine(LLAMA_70B | {"layer_types": ["linear_attention", "full_attention"]}),
        engine({"hidden_size": 64}),
        engine({**MIXTRAL_8X7B, "num_experts_per_tok": None}),
        engine(LLAMA_70B, quantization="unheard_of"),
        engine(LLAMA_70B, method="custom_class"),
        engine(LLAMA_70B, dtype=torch.float32),
        engine(DEEPSEEK_V3, gpus=4),  # does not fit
        engine(LLAMA_70B, method="draft_model"),  # without a draft model
        SimpleNamespace(),
    ],
)
def test_on_any_doubt_there_is_no_prior_and_one_warning(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "get_device_name", lambda self, index=0: "NVIDIA H200")
    with caplog.at_level(logging.INFO, "vllm.rollout_spec"):
        assert roofline_prior(config, 4) is None
    assert [record.levelno for record in ours(caplog)] == [logging.WARNING]
    caplog.clear()
    with caplog.at_level(logging.INFO, "vllm.rollout_spec"):
        assert roofline_prior(engine(LLAMA_70B), 4) is not None
    assert ["roofline of NVIDIA H200" in record.message for record in ours(caplog)] == [True]


def test_on_this_machine_the_real_configuration_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, settings={"policy": {"name": "goodput"}}, dtype="bfloat16")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # making it sets this back
    assert times_on("NVIDIA H200", config, 4) is not None
    with caplog.at_level(logging.INFO, "vllm.rollout_spec"):
        assert roofline_prior(config, 4) is None
    assert ["starts from nothing" in record.message for record in ours(caplog)] == [True]


@pytest.mark.parametrize(("policy", "starts"), [("goodput", True), ("budget", True), ("aimd", False)])
def test_a_policy_that_reckons_with_step_times_starts_from_the_prior(
    policy: str, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, settings={"policy": {"name": policy}}, dtype="bfloat16")
    times = times_on("NVIDIA H200", config, 4)
    monkeypatch.setattr(control_loop, "roofline_prior", lambda config, k_max: times)
    loop = control_loop.ControlLoop.from_vllm(config)
    assert loop is not None
    cost = getattr(loop.policy, "cost", None)
    assert (cost is not None and cost.known) == starts
