"""Speculation changes the speed and nothing else: greedy tokens, the law of sampled tokens, log-probabilities."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fresh import engine, run_fresh, scheduler_of
from heads import look_up_pair
from policies import Cycle
from safetensors.torch import load_file, save_file

from rollout_spec.config import SamplingConfig, parse_config
from rollout_spec.engine.launch import engine_arguments
from rollout_spec.workload import generate_prompts

GREEDY = SamplingConfig(temperature=0, max_tokens=32)


def greedy_tokens(model: Path, arm: str) -> tuple[list[list[int]], int]:
    """Tokens of 100 prompts, and how many draft tokens were accepted."""
    prompts = [prompt.messages for prompt in generate_prompts(100, seed=7)]
    options: dict[str, Any] = {"engine__max_model_len": 256}
    arguments = None
    if arm != "dynamic":
        config = parse_config(
            {
                "model": str(model),
                "engine": {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 32, "kv_cache_gib": 0.5},
                "drafter": {"k_max": 3},
            }
        )
        arguments = engine_arguments(config, drafter=config.drafter if arm == "fixed" else None, policy=None)
    with engine(model, arguments, **options) as worker:
        if arm == "dynamic":
            scheduler_of(worker)._loop.policy = Cycle()
        rollouts = worker.generate(prompts, sampling=GREEDY)
        return [r.token_ids for r in rollouts], sum(r.speculation.accepted_tokens for r in rollouts if r.speculation)


def test_greedy_tokens_are_identical_in_float32(smollm: Path) -> None:
    off, _ = run_fresh(greedy_tokens, smollm, "off")
    assert len(off) == 100
    for arm in ("fixed", "dynamic"):
        tokens, accepted = run_fresh(greedy_tokens, smollm, arm)
        assert tokens == off, arm
        assert accepted > 100, f"{arm} hardly speculated"


# Each token is in each prompt, so that an n-gram of length one always finds a draft.
LAW_PROMPTS = [np.random.default_rng(seed).permutation(np.repeat(np.arange(2, 32), 2)).tolist() for seed in range(4)]
SAMPLES, HORIZON = 5000, 4
ENDED = -1


def samples(
    model: Path, method: str | None, bias: float = 0.0, head: Path | None = None
) -> tuple[list[list[int]], int]:
    """20,000 short samples, and the number of draft tokens accepted. method None: no speculation."""
    options = {"engine__max_num_seqs": 256, "drafter__prompt_lookup_min": 1, "drafter__method": method or "ngram"}
    if head is not None:
        options["drafter__model"] = str(head)
    arguments = None
    if method is None:
        tree = {
            "model": str(model),
            "engine": {
                "dtype": "float32",
                "max_model_len": 512,
                "max_num_seqs": 256,
                "kv_cache_gib": 0.5,
                "extra": {"skip_tokenizer_init": True},
            },
        }
        arguments = engine_arguments(parse_config(tree), drafter=None, policy=None)
    with engine(model, arguments, **options) as worker:
        if method is not None:
            scheduler_of(worker)._loop.policy = Cycle()
        if bias:
            accept_some_drafts_blindly(bias)
        sampling = SamplingConfig(temperature=1.0, max_tokens=HORIZON, logprobs=False)
        rollouts = worker.generate(LAW_PROMPTS, n=SAMPLES, sampling=sampling)
    accepted = sum(r.speculation.accepted_tokens for r in rollouts if r.speculation)
    # A sample may end early, which is an outcome like any other.
    return [[*r.token_ids, *[ENDED] * (HORIZON - len(r.token_ids))] for r in rollouts], accepted


def accept_some_drafts_blindly(share: float) -> None:
    """Bias the sampler on purpose: this share of first drafts is accepted without being judged."""
    from vllm.v1.sample import rejection_sampler

    rng = np.random.default_rng(0)
    judge = rejection_sampler.rejection_sample

    def biased(draft_token_ids: Any, num_draft_tokens: list[int], *args: Any, **kwargs: Any) -> Any:
        output = judge(draft_token_ids, num_draft_tokens, *args, **kwargs)
        start = 0
        for row, drafts in enumerate(num_draft_tokens):
            if drafts and rng.random() < share and output[row, 0] != draft_token_ids[start]:
                output[row, 0] = draft_token_ids[start]
            start += drafts
        return output

    rejection_sampler.rejection_sample = biased


def p_value(first: list[list[int]], second: list[list[int]]) -> float:
    """Chi-square test that two sets of samples have one law, by prompt and position.

    Two views, Bonferroni-corrected: which token came, and whether it is one that follows its predecessor in the
    prompt. The second is where drafts come from, so a sampler that is partial to drafts shows there.
    """
    from scipy.stats import chi2

    views = np.zeros((2, 2))
    for number, prompt in enumerate(LAW_PROMPTS):
        follows = set(itertools.pairwise(prompt))
        rows = slice(number * SAMPLES, (number + 1) * SAMPLES)
        for position in range(HORIZON):
            views[0] += homogeneity(*(Counter(tokens[position] for tokens in drawn[rows]) for drawn in (first, second)))
            if position:
                views[1] += homogeneity(
                    *(
                        Counter((tokens[position - 1], tokens[position]) in follows for tokens in drawn[rows])
                        for drawn in (first, second)
                    )
                )
    return float(min(1.0, 2 * min(chi2.sf(statistic, freedom) for statistic, freedom in views)))


def homogeneity(first: Counter[Any], second: Counter[Any]) -> tuple[float, int]:
    """Chi-square statistic and degrees of freedom for two counts of equal size; rare outcomes are pooled."""
    common = [key for key in first.keys() | second.keys() if first[key] + second[key] >= 10]
    table = np.array([[counts[key] for key in common] for counts in (first, second)], dtype=float)
    rest = np.array([[sum(counts.values())] for counts in (first, second)]) - table.sum(1, keepdims=True)
    if rest.sum() >= 10:
        table = np.hstack([table, rest])
    expected = table.sum(0) / 2
    return float(((table - expected) ** 2 / expected).sum()), table.shape[1] - 1


def test_the_law_of_sampled_tokens_is_unchanged(tiny_model: Path) -> None:
    reference, _ = run_fresh(samples, tiny_model, None)
    assert len(reference) == 20_000
    for method in ("ngram", "suffix"):
        drawn, accepted = run_fresh(samples, tiny_model, method)
        assert accepted > 1000, f"{method} hardly speculated"
        assert p_value(reference, drawn) > 1e-3, method
    biased, _ = run_fresh(samples, tiny_model, "ngram", bias=0.03)
    assert p_value(reference, biased) < 1e-6


def test_the_law_is_unchanged_with_a_head_that_samples_its_drafts(tmp_path: Path) -> None:
    """K changes at every step, so that the head misses steps and catches up. It drafts what followed the last token
    before, which is where `p_value` looks for a sampler that is partial to drafts.
    """
    target, head = look_up_pair(tmp_path)
    weights = load_file(target / "model.safetensors")
    broad = 0.25 * torch.randn(weights["lm_head.weight"].shape, generator=torch.Generator().manual_seed(0))
    save_file(weights | {"lm_head.weight": broad}, target / "model.safetensors", {"format": "pt"})
    reference, _ = run_fresh(samples, target, None)
    drawn, accepted = run_fresh(samples, target, "eagle3", head=head)
    assert accepted > 1000, "hardly speculated"
    assert p_value(reference, drawn) > 1e-3
    biased, _ = run_fresh(samples, target, "eagle3", bias=0.03, head=head)
    assert p_value(reference, biased) < 1e-6


def with_logprobs(model: Path, sampling: SamplingConfig) -> tuple[list[Any], int]:
    prompts = [prompt.messages for prompt in generate_prompts(6, seed=11)]
    with engine(model, drafter__prompt_lookup_min=1) as worker:
        scheduler_of(worker)._loop.policy = Cycle()
        rollouts = worker.generate(prompts, sampling=sampling)
        drafts = sum(r.speculation.draft_tokens for r in rollouts if r.speculation)
        return [(r.prompt_token_ids, r.token_ids, r.logprobs) for r in rollouts], drafts


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=1.0, max_tokens=48),
        SamplingConfig(temperature=0.7, top_k=20, max_tokens=48),
    ],
    ids=["temperature_1", "temperature_0.7_top_k_20"],
)
def test_log_probabilities_are_those_of_a_teacher_forced_pass(smollm: Path, sampling: SamplingConfig) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    rollouts, drafts = run_fresh(with_logprobs, smollm, sampling)
    assert drafts > 50, "asking for log-probabilities must not turn speculation off"
    reference = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    for prompt, tokens, logprobs in rollouts:
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / sampling.temperature
        if sampling.top_k:
            least = logits.topk(sampling.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
        assert np.allclose(logprobs, expected.numpy(), atol=2e-3)


def start_without_the_right_kernel(model: Path) -> str:
    from vllm.platforms import current_platform

    from rollout_spec.config import ConfigError
    from rollout_spec.engine import overrides, sampler_check

    # The fault cannot be had otherwise: our plug-in mends the kernel in every process.
    overrides.fix_cpu_expand_kernel = lambda: None
    if not current_platform.is_cpu() or sampler_check.kernel_is_right():
        return "upstream is right"
    try:
        with engine(model):
            return "started"
    except ConfigError as error:
        return str(error)


def test_a_sampler_known_to_be_wrong_is_refused(tiny_model: Path) -> None:
    said = run_fresh(start_without_the_right_kernel, tiny_model)
    assert "rejection sampler" in said or said == "upstream is right"
