"""What the measurements allow to be said, in sentences. A difference is claimed only if every pair shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollout_spec.bench.results import Arm, Ratio, Results, paired, speedup

OURS = "goodput"
# With no true difference all of n pairs fall on one side with chance 2^(1-n): two would "show" one half the time.
LEAST_PAIRS = 3
POLICIES = {
    "off": "no speculation",
    "fixed": "the same number of draft tokens in every step",
    "threshold": "draft tokens only while few sequences are live",
    "table": "vLLM's own table from batch size to number of draft tokens",
    "goodput": "this project's controller, which chooses the number of draft tokens anew for every engine step",
}

Kind = Literal["faster", "slower", "undecided"]


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    arm: str
    base: str
    sentence: str


def kind_of(arm: Arm) -> str:
    """The policy without its argument."""
    return arm.policy.partition(":")[0]


def ours(results: Results) -> list[Arm]:
    return [arm for arm in results.arms if kind_of(arm) == OURS and arm.runs]


def judge(ratio: Ratio | None, pairs: int) -> Kind:
    """Judged on the figures as printed, so that no claim rests on a digit the reader can't see."""
    if ratio is None or pairs < LEAST_PAIRS:
        return "undecided"
    if round(ratio.low, 2) > 1:
        return "faster"
    return "slower" if round(ratio.high, 2) < 1 else "undecided"


def compare(arm: Arm, base: Arm, described: str) -> Verdict:
    """`arm` against `base`; `described` says in the sentence what the base is."""
    ratio, pairs = speedup(arm, base), len(paired(arm, base))
    kind = judge(ratio, pairs)
    if ratio is None:
        return Verdict(kind, arm.name, base.name, f"{arm.name} and {described} share no repeat: nothing to compare.")
    times, spread = f"{ratio.median:.2f}x", f"{ratio.low:.2f} to {ratio.high:.2f} over {pairs} paired runs"
    if pairs < LEAST_PAIRS:
        few = "in the only pair of runs" if pairs == 1 else f"({spread})"
        sentence = (
            f"Undecided between {arm.name} and {described}: {times} its speed {few}, "
            f"and it takes {LEAST_PAIRS} pairs to tell a difference from chance."
        )
    elif kind == "faster":
        sentence = f"{arm.name} is faster than {described}: {times} its speed ({spread})."
    elif kind == "slower":
        longer = 100 * (1 / ratio.median - 1)
        sentence = (
            f"{arm.name} is slower than {described}: {times} its speed ({spread}), "
            f"so the rollout takes {longer:.0f} % longer."
        )
    else:
        sentence = f"No difference shown between {arm.name} and {described}: {times} its speed ({spread})."
    return Verdict(kind, arm.name, base.name, sentence)


def verdicts(results: Results) -> list[Verdict]:
    """Ours against off, the best fixed K and the table; without ours, every other arm against off."""
    found: list[Verdict] = []
    off = results.off if results.off and results.off.runs else None
    for arm in ours(results):
        if off:
            found.append(compare(arm, off, f"{off.name} ({POLICIES['off']})"))
        if fixed := _rivals(results, arm, "fixed"):
            how = "fixed K" if len(fixed) == 1 else f"the best of {len(fixed)} fixed K, picked after the runs"
            found.append(compare(arm, fixed[0], f"{fixed[0].name} ({how}{_other_drafter(arm, fixed[0])})"))
        if table := _rivals(results, arm, "table"):
            how = f"vLLM's batch-size table{_other_drafter(arm, table[0])}"
            found.append(compare(arm, table[0], f"{table[0].name} ({how})"))
    if not ours(results) and off:
        rest = [arm for arm in results.arms if arm is not off and arm.runs]
        found += [compare(arm, off, f"{off.name} ({POLICIES['off']})") for arm in rest]
    return found


def no_verdict(results: Results) -> str:
    """What to say where `verdicts` has nothing."""
    names = [arm.name for arm in results.arms if arm.runs]
    if not names:
        return "No run has finished yet, so there is nothing to report."
    if len(names) == 1:
        return f"Only {names[0]} was run, so there is nothing to compare it with."
    return f"Neither {OURS} nor off was run, so no comparison is drawn between {', '.join(names)}."


def _other_drafter(arm: Arm, base: Arm) -> str:
    return "" if arm.drafter == base.drafter else f", but with drafter {base.drafter or 'none'}"


def _rivals(results: Results, arm: Arm, policy: str) -> list[Arm]:
    """Arms of a policy, fastest first: with our drafter if there are any, else with whatever drafter they had."""
    arms = [rival for rival in results.arms if kind_of(rival) == policy and rival.makespan_s]
    arms = [rival for rival in arms if rival.drafter == arm.drafter] or arms
    return sorted(arms, key=lambda rival: rival.makespan_s.median if rival.makespan_s else 0.0)
