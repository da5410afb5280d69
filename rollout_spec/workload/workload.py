"""What a rollout generates: groups of samples, each with a prompt and, where imposed, the length of every sample."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NoReturn

import numpy as np

from rollout_spec.config import ConfigError, WorkloadConfig
from rollout_spec.workload.lengths import MAX_TOKENS, PROFILES, length_profile, sample_lengths
from rollout_spec.workload.prompts import Prompt, generate_prompts

ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = ("prompt", "n", "output_tokens", "answer", "id")
# Lengths are left to the model.
NATURAL = ("natural", "mixed")
# Of one prompt; more is a slip.
MAX_SAMPLES = 100_000


@dataclass(frozen=True, slots=True)
class Group:
    """`n` samples of one prompt. `output_tokens` imposes the length of each, in tokens; None leaves it to the model."""

    prompt_id: str
    prompt: str | tuple[dict[str, str], ...] | tuple[int, ...]
    """Text, a chat, or token ids."""
    n: int
    output_tokens: tuple[int, ...] | None
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups in the order in which they are submitted; `source` says where they came from, for a result file."""

    name: str
    groups: tuple[Group, ...]
    seed: int
    source: Mapping[str, Any]

    @property
    def num_samples(self) -> int:
        return sum(group.n for group in self.groups)


def build_workload(config: WorkloadConfig, seed: int, repeat: int) -> Workload:
    """The workload of one repeat: every arm gets the same, each repeat has fresh prompts and lengths.

    A file gives the same in each repeat. Raises ConfigError for an unknown name or a bad file.
    """
    if config.name.endswith(".jsonl"):
        return _read(config, seed)
    if config.name not in (*PROFILES, *NATURAL):
        choices = ", ".join((*PROFILES, *NATURAL))
        raise ConfigError(f"--workload {config.name!r}: no such workload; choose {choices} or a path to a .jsonl file")
    for_prompts, for_lengths = np.random.SeedSequence([seed, repeat]).spawn(2)
    prompts = _prompts(config, int(for_prompts.generate_state(1, np.uint64)[0]))
    source: dict[str, Any] = {"prompts": "generated", "seed": seed, "repeat": repeat}
    lengths: list[tuple[int, ...] | None] = [None] * len(prompts)
    if config.name not in NATURAL:
        rng = np.random.default_rng(for_lengths)
        sample = sample_lengths(config.name, len(prompts) * config.n, config.scale, rng, config.min_tokens)
        lengths = [tuple(row) for row in sample.reshape(len(prompts), config.n).tolist()]
        source |= {"lengths": length_profile(config.name).source, "scale": config.scale}
    groups = (Group(p.id, p.messages, config.n, row, p.answer) for p, row in zip(prompts, lengths, strict=True))
    return Workload(config.name, tuple(groups), seed, source)


def _prompts(config: WorkloadConfig, seed: int) -> list[Prompt]:
    """Reasoning problems, and spread among them the share of tasks that copy from their prompt."""
    share = 0.5 if config.name == "mixed" else config.copying
    copies = [math.floor((i + 1) * share) > math.floor(i * share) for i in range(config.num_prompts)]
    copying = iter(generate_prompts(sum(copies), seed, ["copy"]) if share else ())
    free = iter(generate_prompts(config.num_prompts - sum(copies), seed))
    return [next(copying if copy else free) for copy in copies]


def _read(config: WorkloadConfig, seed: int) -> Workload:
    path = Path(config.name).expanduser()
    if config.copying:
        raise ConfigError(f"workload.copying {config.copying}: prompts of a file are what they are; leave it at 0")
    groups, digest = read_groups(path, config.n, f"--workload {config.name}")
    return Workload(config.name, groups, seed, {"file": str(path.resolve()), "sha256": digest})


def read_groups(path: Path, default_n: int, option: str) -> tuple[tuple[Group, ...], str]:
    """The groups of a file of prompts, and the SHA-256 of the file. `option`: names the file in a ConfigError, which
    is raised for a file or a line that is bad."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}: cannot be read ({error.strerror or error})") from error
    groups: dict[str, Group] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            where = Row(f"{option}:{number}", number)
            group = where.group(where.parsed(line), default_n)
            if group.prompt_id in groups:
                where.fail(f"id {group.prompt_id!r} is taken by an earlier line; ids must differ")
            groups[group.prompt_id] = group
    if not groups:
        raise ConfigError(f'{option}: has no prompts; give lines such as {{"prompt": "2 + 2 = ?"}}')
    return tuple(groups.values()), hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file of prompts; every fault is a ConfigError that begins with `where`."""

    where: str
    number: int

    def fail(self, problem: str) -> NoReturn:
        raise ConfigError(f"{self.where}: {problem}")

    def parsed(self, line: bytes) -> dict[str, Any]:
        """The object that a line of JSON holds."""
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            self.fail(f"is not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8")
        except (ValueError, RecursionError) as error:
            what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            self.fail(f'is not valid JSON ({what}); each line must be one object, such as {{"prompt": "2 + 2 = ?"}}')
        if not isinstance(row, dict):
            self.fail(f'is a JSON {type(row).__name__}; must be an object, such as {{"prompt": "2 + 2 = ?"}}')
        return row

    def group(self, row: Mapping[str, Any], default_n: int) -> Group:
        for key in row:
            if key not in FIELDS:
                self.fail(f"unknown key {key!r}; keys are {', '.join(FIELDS)}")
        if "prompt" not in row:
            self.fail("has no 'prompt'; give a string, a list of {role, content} or token ids")
        n = self._count("n", row.get("n", default_n), MAX_SAMPLES)
        return Group(
            prompt_id=self._label("id", row.get("id", f"line-{self.number}")),
            prompt=self._prompt(row["prompt"]),
            n=n,
            output_tokens=self._lengths(row["output_tokens"], n) if "output_tokens" in row else None,
            answer=self._label("answer", row["answer"]) if "answer" in row else None,
        )

    def _prompt(self, value: Any) -> str | tuple[dict[str, str], ...] | tuple[int, ...]:
        if isinstance(value, str):
            return self._text("prompt", value)
        if not isinstance(value, list) or not value:
            self.fail(f"prompt {brief(value)}: must be a string or a list of {{role, content}} or token ids")
        if type(value[0]) is int:
            for i, token in enumerate(value):
                if type(token) is not int or token < 0:
                    self.fail(f"prompt[{i}] {brief(token)}: must be a token id, as the first one is")
            return tuple(value)
        for i, message in enumerate(value):
            if not isinstance(message, dict) or set(message) != {"role", "content"}:
                self.fail(f"prompt[{i}] {brief(message)}: must be an object with role and content, nothing else")
            if message["role"] not in ROLES:
                self.fail(f"prompt[{i}].role {brief(message['role'])}: must be one of {', '.join(ROLES)}")
            self._text(f"prompt[{i}].content", message["content"])
        return tuple(value)

    def _lengths(self, value: Any, n: int) -> tuple[int, ...]:
        if not isinstance(value, list):
            return (self._count("output_tokens", value, MAX_TOKENS),) * n
        if len(value) != n:
            self.fail(f"output_tokens has {len(value)} lengths for n={n} samples; must be one length or {n} of them")
        return tuple(self._count(f"output_tokens[{i}]", length, MAX_TOKENS) for i, length in enumerate(value))

    def _count(self, key: str, value: Any, most: int) -> int:
        if type(value) is not int or not 1 <= value <= most:
            self.fail(f"{key} {brief(value)}: must be an integer from 1 to {most}")
        return value

    def _label(self, key: str, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            self.fail(f"{key} {brief(value)}: must be a string or a number")
        return self._text(key, str(value))

    def _text(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            self.fail(f"{key} {brief(value)}: must be a string that is not empty")
        if any("\ud800" <= char <= "\udfff" for char in value):
            self.fail(f"{key} has half a surrogate pair, which is no character; write it as UTF-8")
        return value
