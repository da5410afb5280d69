"""Speculation changes the speed and nothing else: greedy tokens, the law of sampled tokens, log-probabilities."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fresh import engine, run_fresh, scheduler_of
from look_up import Pair, broad_pair
from policies import Cycle

from rollout_spec.config import SamplingConfig
from rollout_spec.rollout.worker import RolloutWorker
from rollout_spec.workload import generate_prompts

GREEDY = SamplingConfig(temperature=0, max_tokens=32, logprobs=False)


def greedy_tokens(model: Path, arm: str) -> tuple[list[list[int]], int]:
    """Tokens of 100 prompts, and how many draft tokens were accepted. dynamic: another K at every step."""
    # Without the chat around them, which would be half of the test's time.
    prompts = [prompt.messages[0]["content"] for prompt in generate_prompts(100, seed=7)]
    k_max = 3 if arm == "stock" else 5
    with engine(model, "ours" if arm == "dynamic" else arm, engine__max_model_len=256, drafter__k_max=k_max) as worker:
        if arm == "dynamic":
            scheduler_of(worker)._loop.policy = Cycle()
        rollouts = worker.generate(prompts, sampling=GREEDY)
        return [r.token_ids for r in rollouts], sum(r.speculation.accepted_tokens for r in rollouts if r.speculation)


def test_greedy_tokens_are_identical_in_float32(smollm: Path) -> None:
    off, _ = run_fresh(greedy_tokens, smollm, "off")
    assert len(off) == 100
    for arm in ("stock", "dynamic"):
        tokens, accepted = run_fresh(greedy_tokens, smollm, arm)
        assert tokens == off, arm
        assert accepted > 100, f"{arm} hardly speculated"


# Each token is in each prompt, so that an n-gram of length one always finds a draft. All but the last of 65 tokens fill
# two blocks of the cache, which the samples of a prompt share.
LAW_PROMPTS = [np.random.default_rng(seed).permutation(np.resize(np.arange(2, 32), 65)).tolist() for seed in range(4)]
SAMPLES, HORIZON = 5000, 5
ENDED = -1
LAW = {
    "compiled": True,
    "engine__max_num_seqs": 512,
    "engine__max_num_batched_tokens": 16384,
    "engine__extra": {"skip_tokenizer_init": True, "block_size": 32},
    "drafter__prompt_lookup_min": 1,
}


class Drawn(NamedTuple):
    tokens: list[list[int]]
    """20,000 short samples, prompt by prompt. One may end early, which is an outcome like any other."""
    accepted: int
    """Draft tokens among them."""


def draw(worker: RolloutWorker) -> Drawn:
    sampling = SamplingConfig(temperature=1.0, max_tokens=HORIZON, logprobs=False)
    rollouts = worker.generate(LAW_PROMPTS, n=SAMPLES, sampling=sampling)
    accepted = sum(r.speculation.accepted_tokens for r in rollouts if r.speculation)
    return Drawn([[*r.token_ids, *[ENDED] * (HORIZON - len(r.token_ids))] for r in rollouts], accepted)


def draw_without_drafts(target: Path) -> Drawn:
    with engine(target, "off", **LAW) as worker:
        return draw(worker)


def draw_with_drafts(pair: Pair, method: str, bias: float) -> tuple[Drawn, Drawn | None]:
    """By a right sampler and, unless `bias` is 0, by one that is off by so much. K changes at every step, so that a
    head misses steps and catches up.
    """
    head = {"drafter__model": str(pair.head)} if method == "eagle3" else {}
    with engine(pair.target, drafter__method=method, **LAW, **head) as worker:
        scheduler_of(worker)._loop.policy = Cycle()
        drawn = draw(worker)
        if not bias:
            return drawn, None
        accept_some_drafts_blindly(bias)
        return drawn, draw(worker)


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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Its head drafts what followed the last token before, which is where `p_value` looks for a sampler that is partial
    to drafts."""
    return broad_pair(tmp_path_factory.mktemp("broad"))


@pytest.fixture(scope="module")
def reference(pair: Pair) -> Drawn:
    return run_fresh(draw_without_drafts, pair.target)


@pytest.mark.parametrize(("method", "bias"), [("ngram", 0.03), ("suffix", 0.0), ("eagle3", 0.03)])
def test_the_law_of_sampled_tokens_is_unchanged(method: str, bias: float, pair: Pair, reference: Drawn) -> None:
    assert len(reference.tokens) == 20_000
    drawn, biased = run_fresh(draw_with_drafts, pair, method, bias)
    assert drawn.accepted > 1000, "hardly speculated"
    assert p_value(reference.tokens, drawn.tokens) > 1e-3
    if biased is not None:
        assert p_value(reference.tokens, biased.tokens) < 1e-6


SAMPLINGS = {
    "temperature 1": SamplingConfig(temperature=1.0, max_tokens=48),
    "temperature 0.7, top-k 20": SamplingConfig(temperature=0.7, top_k=20, max_tokens=48),
}


def with_logprobs(model: Path) -> dict[str, tuple[list[Any], int]]:
    """By name of the sampling: prompts, tokens and log-probabilities, and how many drafts there were."""
    prompts = [prompt.messages for prompt in generate_prompts(6, seed=11)]
    made = {}
    with engine(model, compiled=True, drafter__prompt_lookup_min=1) as worker:
        scheduler_of(worker)._loop.policy = Cycle()
        for name, sampling in SAMPLINGS.items():
            rollouts = worker.generate(prompts, sampling=sampling)
            drafts = sum(r.speculation.draft_tokens for r in rollouts if r.speculation)
            made[name] = [(r.prompt_token_ids, r.token_ids, r.logprobs) for r in rollouts], drafts
    return made


def test_log_probabilities_are_those_of_a_teacher_forced_pass(smollm: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = run_fresh(with_logprobs, smollm)
    teacher = AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    for name, sampling in SAMPLINGS.items():
        rollouts, drafts = made[name]
        assert drafts > 50, "asking for log-probabilities must not turn speculation off"
        for prompt, tokens, logprobs in rollouts:
            with torch.no_grad():
                logits = teacher(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / sampling.temperature
            if sampling.top_k:
                least = logits.topk(sampling.top_k).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
            assert np.allclose(logprobs, expected.numpy(), atol=2e-3), name


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
