from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer
from vllm.v1.worker import gpu_model_runner

from rollout_spec.engine import overrides, plugin, sampler_check
from rollout_spec.engine.overrides import IncompatibleVLLM

cpu_only = pytest.mark.skipif(not current_platform.is_cpu(), reason="on a GPU the kernel is Triton's")
KERNEL = "_expand_kernel_impl"


@pytest.fixture
def stock_module() -> ModuleType:
    """A second copy of vLLM's module: in the first one the plug-in may have replaced the kernel already."""
    spec = importlib.util.spec_from_file_location("stock_cpu_triton_utils", str(cpu_triton_utils.__file__))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expanded(values: list[float], counts: list[int], replace_from: float, replace_to: float) -> list[float]:
    """What the kernel has to write, spelled out."""
    return [
        replace_to if value == replace_from else value
        for value, count in zip(values, counts, strict=True)
        for _ in range(count)
    ]


def run(kernel: Any, values: list[float], counts: list[int], dtype: torch.dtype) -> list[float]:
    output = torch.full((sum(counts),), -9, dtype=dtype)
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    kernel(output, torch.tensor(values, dtype=dtype), ends, 0, 1, MAX_NUM_TOKENS=128)
    return [round(value, 5) for value in output.tolist()]


CASES: list[tuple[list[float], list[int], torch.dtype]] = [
    ([0.7, 0.0, 1.3], [2, 3, 1], torch.float32),
    ([0.0, 0.0], [1, 4], torch.float32),
    ([0.5, 0.25, 2.0, 0.0], [0, 3, 0, 2], torch.float32),  # requests without drafts
    ([50, 0, 7], [1, 2, 3], torch.int32),  # top-k
    ([1.5], [8], torch.float32),
]


@pytest.mark.parametrize(("values", "counts", "dtype"), CASES)
def test_our_kernel_expands(values: list[float], counts: list[int], dtype: torch.dtype) -> None:
    assert run(sampler_check.expand, values, counts, dtype) == expanded(values, counts, 0, 1)


@cpu_only
def test_the_check_tells_a_right_kernel_from_a_wrong_one(
    stock_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own is judged by its results here: a later vLLM may have mended it."""
    stock = getattr(stock_module, KERNEL)
    try:
        stock_is_right = all(run(stock, *case) == expanded(case[0], case[1], 0, 1) for case in CASES)
    except (AttributeError, RuntimeError):  # the compiled kernel is not loaded in this process
        stock_is_right = False
    monkeypatch.setattr(cpu_triton_utils, KERNEL, stock)
    assert sampler_check.kernel_is_right() == stock_is_right
    monkeypatch.setattr(cpu_triton_utils, KERNEL, sampler_check.expand)
    assert sampler_check.kernel_is_right()

    def drops_its_result(output: torch.Tensor, *args: Any) -> None:
        sampler_check.expand(output.clone(), *args)

    def rounds(output: torch.Tensor, input_val: torch.Tensor, *args: Any) -> None:
        sampler_check.expand(output, input_val.long().float(), *args)

    def replaces_nothing(output: torch.Tensor, input_val: torch.Tensor, ends: torch.Tensor, *args: Any) -> None:
        sampler_check.expand(output, input_val, ends, -1, -1)

    for wrong in (drops_its_result, rounds, replaces_nothing, lambda: None):
        monkeypatch.setattr(cpu_triton_utils, KERNEL, wrong)
        assert not sampler_check.kernel_is_right()


@cpu_only
def test_a_wrong_kernel_is_replaced_and_a_right_one_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_triton_utils, KERNEL, lambda *args: None)
    overrides.fix_cpu_expand_kernel()
    assert getattr(cpu_triton_utils, KERNEL) is sampler_check.expand

    def mended(*args: Any) -> None:
        sampler_check.expand(*args)

    monkeypatch.setattr(cpu_triton_utils, KERNEL, mended)
    overrides.fix_cpu_expand_kernel()
    assert getattr(cpu_triton_utils, KERNEL) is mended


@cpu_only
def test_a_kernel_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpu_triton_utils, KERNEL)
    with pytest.raises(IncompatibleVLLM, match="no _expand_kernel_impl any more"):
        overrides.fix_cpu_expand_kernel()


def test_nothing_is_touched_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.delattr(cpu_triton_utils, KERNEL)
    overrides.fix_cpu_expand_kernel()
    assert not hasattr(cpu_triton_utils, KERNEL)
    assert sampler_check.kernel_is_right()


def test_the_runner_finds_our_suffix_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout_spec.engine.suffix import SuffixProposer

    monkeypatch.setattr(gpu_model_runner, "SuffixDecodingProposer", SuffixDecodingProposer)
    if current_platform.is_cpu():
        monkeypatch.setattr(cpu_triton_utils, KERNEL, lambda *args: None)
    for _ in range(2):  # vLLM may load plug-ins more than once in a process
        plugin.register()
        assert gpu_model_runner.SuffixDecodingProposer is SuffixProposer
        assert sampler_check.kernel_is_right()


def test_another_signature_of_the_suffix_drafter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_model_runner, "SuffixDecodingProposer", SuffixDecodingProposer)
    monkeypatch.setattr(SuffixDecodingProposer, "propose", lambda self, input_batch, sampled: [])
    with pytest.raises(IncompatibleVLLM, match=r"propose takes \['self', 'input_batch', 'sampled'\]"):
        overrides.offer_suffix_drafter()
    assert gpu_model_runner.SuffixDecodingProposer is SuffixDecodingProposer


def test_a_runner_that_constructs_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gpu_model_runner, "SuffixDecodingProposer")
    with pytest.raises(IncompatibleVLLM, match="no longer names SuffixDecodingProposer"):
        overrides.offer_suffix_drafter()


def test_a_vllm_that_changed_stops_our_engines_and_no_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(gpu_model_runner, "SuffixDecodingProposer")
    monkeypatch.setattr(plugin.logger, "propagate", True)
    plugin.register()  # in every vLLM of the machine
    assert "no longer names SuffixDecodingProposer" in caplog.text
    overrides.require("ngram")
    overrides.require(None)
    with pytest.raises(IncompatibleVLLM):
        overrides.require("suffix")


def test_synthetic_acceptance_replaces_the_kernels_that_refuse_it_and_leaves_other_steps_to_them(monkeypatch):
    from vllm.utils import cpu_triton_utils

    from rollout_spec.engine import synthetic

    calls = []
    for kind in ("greedy", "random"):
        name = f"_rejection_{kind}_sample_kernel_impl"
        monkeypatch.setattr(cpu_triton_utils, name, getattr(cpu_triton_utils, name))
    overrides.allow_synthetic_acceptance()
    overrides.allow_synthetic_acceptance()
    assert cpu_triton_utils._rejection_greedy_sample_kernel_impl is synthetic.greedy
    monkeypatch.setitem(synthetic.STOCK, "greedy", lambda *args: calls.append(("greedy", len(args))))
    monkeypatch.setitem(synthetic.STOCK, "random", lambda *args: calls.append(("random", len(args))))
    synthetic.greedy(*range(7))
    synthetic.random(*range(11))
    assert calls == [("greedy", 7), ("random", 13)]
    monkeypatch.setattr(cpu_triton_utils, "_rejection_random_sample_kernel_impl", lambda output: None)
    with pytest.raises(overrides.IncompatibleVLLM, match="_rejection_random_sample_kernel_impl takes"):
        overrides.allow_synthetic_acceptance()


def test_the_eagle_drafter_is_ours_only_where_it_may_defer(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer

    from rollout_spec.engine.draft_cache import DeferringEagleProposer

    def config(method: str = "eagle3", ranks: int = 1, connector: object = None, **settings: object) -> Any:
        return SimpleNamespace(
            additional_config={"rollout_spec": settings} if settings else {},
            speculative_config=SimpleNamespace(method=method),
            parallel_config=SimpleNamespace(data_parallel_size=ranks),
            kv_transfer_config=connector,
        )

    def made(vllm_config: Any, cls: type = EagleProposer) -> type:
        return type(cls.__new__(cls, vllm_config, torch.device("cpu"), None))

    for _ in range(2):
        overrides.offer_deferring_eagle()
    assert made(config(suffix={})) is DeferringEagleProposer
    assert made(config(method="eagle", draft_buffer_mib=1)) is DeferringEagleProposer
    assert made(config()) is EagleProposer
    assert made(config(draft_buffer_mib=0)) is EagleProposer
    assert made(config(method="mtp", suffix={})) is EagleProposer
    assert made(config(ranks=2, suffix={})) is EagleProposer
    assert made(config(connector=object(), suffix={})) is EagleProposer
    assert made(config(suffix={}), Step3p5MTPProposer) is Step3p5MTPProposer


def test_another_signature_of_the_eagle_drafter_stops_engines_with_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.spec_decode.eagle import EagleProposer

    monkeypatch.setattr(EagleProposer, "propose", lambda self, tokens: tokens)
    overrides.require("ngram")
    with pytest.raises(IncompatibleVLLM, match=r"EagleProposer.propose takes \['self', 'tokens'\]"):
        overrides.require("eagle3")
    overrides.require("eagle3", deferring=False)
