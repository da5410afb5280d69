"""Prompts for a rollout: reasoning problems with an answer to check, and tasks that copy from the prompt."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from random import Random

from rollout_spec.config import ConfigError
from rollout_spec.workload.copying import COPY_TASKS
from rollout_spec.workload.problems import PROBLEMS

REASONING = tuple(PROBLEMS)
FAMILIES = (*REASONING, "copy")

ASK = (
    "Think step by step and end with 'The answer is' and the number.",
    "Show your reasoning, then put the final number in \\boxed{}.",
    "Explain each step. Finish with a line 'Answer:' and the number.",
)
# Draws in a row that were all seen before: the families asked for have nothing new.
EXHAUSTED = 1000

# Ten groups of thousands at most: a model that repeats ',111' for ever must not cost quadratic time.
_NUMBER = re.compile(
    r"(?<!\w)(?<!\d\.)(?P<minus>(?<![)\]}])[-\u2212])?\$?"
    r"(?P<top>(?:\d{1,3}(?:,\d{3}){1,10}(?![,\d])|\d+)(?:\.\d+)?|(?<!\.)\.\d+)(?:\s?/\s?(?P<bottom>\d*[1-9]\d*))?"
)
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_STATED = re.compile(r"answer\W{0,4}(?:is\b|[:=])", re.IGNORECASE)
_FRAC = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
# A longer number is a model that repeats itself; Python refuses to parse far longer ones.
MAX_DIGITS = 100


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat to answer. `id` names the content: equal prompts have equal ids. `answer` is None if unchecked."""

    id: str
    messages: tuple[dict[str, str], ...]
    answer: str | None
    family: str


def generate_prompts(count: int, seed: int, families: Sequence[str] | None = None) -> list[Prompt]:
    """`count` distinct prompts, the same ones for the same arguments, in turn from each family.

    `families` are of FAMILIES; None means REASONING, the ones with answers. Raises ConfigError for an unknown
    family or when the families have fewer than `count` distinct prompts.
    """
    rng = Random(seed)
    turn = list(REASONING if families is None else families)
    for family in turn:
        if family not in FAMILIES:
            raise ConfigError(f"families {family!r}: no such family of prompts; choose from {', '.join(FAMILIES)}")
    if not turn:
        raise ConfigError(f"families is empty; choose from {', '.join(FAMILIES)}")
    rng.shuffle(turn)
    prompts: dict[str, Prompt] = {}
    stale = 0
    while len(prompts) < count:
        prompt = _draw(turn[len(prompts) % len(turn)], rng)
        stale = stale + 1 if prompt.id in prompts else 0
        prompts.setdefault(prompt.id, prompt)
        if stale == EXHAUSTED:
            raise ConfigError(f"{count} prompts: {', '.join(turn)} have only about {len(prompts)} distinct ones")
    return list(prompts.values())


def check_answer(prompt: Prompt, text: str) -> bool | None:
    """Whether `text` gives the prompt's answer; None if the prompt has none."""
    return None if prompt.answer is None else matches(prompt.answer, text)


def matches(answer: str, text: str) -> bool:
    """Whether the final answer in `text` is `answer`.

    The final answer is what the last \\boxed{} holds, else what follows the last 'answer is' or 'answer:', else the
    last number. Numbers are compared by value (1,250.50 = 1250.5; 3/4 = 0.75), other answers without case and spaces.
    """
    text = _plain(text).strip()
    boxed = _BOXED.findall(text)
    stated = [rest.partition("\n")[0] for rest in _STATED.split(text)[1:]]
    wanted = _numbers(answer)[0] if _NUMBER.fullmatch(answer) else None
    if wanted is None:
        given = (boxed or stated or text.split("\n"))[-1]
        return _tidy(given) == _tidy(_plain(answer))
    for place, which in ((boxed, -1), (stated, 0)):
        if place and (found := _numbers(place[-1])):
            return found[which] == wanted
    found = _numbers(text)
    return bool(found) and found[-1] == wanted


def _draw(family: str, rng: Random) -> Prompt:
    answer: str | None = None
    if family == "copy":
        question = content = rng.choice(COPY_TASKS)(rng)
    else:
        question, answer = rng.choice(PROBLEMS[family])(rng)
        content = f"{question}\n{rng.choice(ASK)}"
    digest = hashlib.sha256(question.encode()).hexdigest()[:12]
    return Prompt(f"{family}-{digest}", ({"role": "user", "content": content},), answer, family)


def _plain(text: str) -> str:
    """LaTeX fractions and thousands separators as plain text, for example 1{,}250 as 1,250."""
    return _FRAC.sub(r"\1/\2", text.replace("{,}", ",").replace("\\,", "").replace("\\!", ""))


def _numbers(text: str) -> list[Fraction | None]:
    """The numbers in `text` in order; None stands for one too long to be meant."""
    found: list[Fraction | None] = []
    for number in _NUMBER.finditer(text):
        top, bottom = number["top"].replace(",", ""), number["bottom"] or "1"
        if len(top) + len(bottom) > MAX_DIGITS:
            found.append(None)
        else:
            value = Fraction(top) / int(bottom)
            found.append(-value if number["minus"] else value)
    return found


def _tidy(text: str) -> str:
    return "".join(text.casefold().split()).strip(".:$*`")
