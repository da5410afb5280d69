"""Weight updates at random moments of a running worker, with faults among them, and what each token should have been.

`storm` runs the worker and records what it gave; `check` asks new engines, one for each target (without speculation)
and one for each pair of target and head, what every span of every rollout should be. All greedy, in float32.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import tiny
from fresh import engine, run_fresh

from rollout_spec.config import ConfigError, SamplingConfig
from rollout_spec.rollout.types import Rollout
from rollout_spec.rollout.update import UpdateFailed
from rollout_spec.rollout.worker import RolloutWorker

GREEDY = SamplingConfig(temperature=0)
K = 3
LEAST, MOST = 6, 30  # tokens of a response
# Short prompts, and two longer than a cache block (128 tokens), whose stale blocks would be used if there were any.
PROMPTS = [[(5 + 7 * i * i + 3 * j) % tiny.VOCABULARY for i in range(14 + j)] for j in range(6)]
PROMPTS += [[(3 + 5 * i * i + j * i) % tiny.VOCABULARY for i in range(150 + j)] for j in range(2)]
# A step may round differently in another batch: log-probabilities agree to this.
TOLERANCE = 2e-3

# Writes half of a file and waits to be killed.
SENDER = """
import sys, time
content = open(sys.argv[1], "rb").read()
file = open(sys.argv[2], "wb")
file.write(content[: len(content) // 2])
file.flush()
print("half", flush=True)
time.sleep(600)
"""


def make_models(folder: Path, targets: int, heads: int) -> None:
    for seed in range(targets):
        tiny.make_target(folder / f"target{seed}", seed)
    for seed in range(heads):
        tiny.make_head(folder / f"head{seed}", seed)


def fire_engine(folder: Path, target: int, head: int | None) -> Any:
    options: dict[str, Any] = {"engine__kv_cache_gib": 0.05, "policy__name": "fixed", "policy__k": K}
    if head is None:
        options |= {"policy__name": "off", "policy__k": 0}
    drafter = folder / f"head{head or 0}"
    options |= {"drafter__method": "eagle3", "drafter__model": str(drafter), "drafter__k_max": K}
    return engine(folder / f"target{target}", **options)


class Storm:
    """One worker under fire. Versions are counted up; `targets` and `heads` say which weights each one is."""

    def __init__(self, worker: RolloutWorker, folder: Path, targets: int, heads: int, seed: int) -> None:
        self.worker = worker
        self.folder = folder
        self.random = random.Random(seed)
        self.count = targets, heads
        self.targets, self.heads = [0], [0]
        self.modes = ["drained"]  # of the update that brought each policy version
        self.running: list[str] = []
        self.disturbed: set[str] = set()  # their drafts were not those of one head
        self.rollouts: list[tuple[str, Rollout]] = []
        self.done: Counter[str] = Counter()
        self.memory: list[float] = []  # MiB, after each update

    def run(self, updates: int) -> None:
        faults = [self.cut_off, self.wrong_shape, self.incomplete, self.not_finite, self.shared_layer]
        faults += [self.killed_sender, self.breaks_while_loading, self.asleep, self.damaged_draft]
        chances = (self.submit, 4), (self.steps, 4), (self.update, 4), (self.abort, 0.5), (None, 1.2)
        actions, weights = [action for action, _ in chances], [weight for _, weight in chances]
        while self.done["updates"] < updates:
            action = self.random.choices(actions, weights)[0] or self.random.choice(faults)
            action()
        self.drain()

    # -- requests

    def submit(self) -> None:
        if len(self.running) > 12:
            return
        prompts = self.random.choices(PROMPTS, k=self.random.randint(1, 3))
        lengths = [[self.random.randint(LEAST, MOST)] for _ in prompts]
        self.running += self.worker.submit(prompts, sampling=GREEDY, output_tokens=lengths)
        self.done["submitted"] += len(prompts)

    def steps(self) -> None:
        for _ in range(self.random.randint(1, 8)):
            self.worker.step()
        self.take()

    def abort(self) -> None:
        if self.running:
            self.worker.abort([self.random.choice(self.running)])
            self.done["aborted"] += 1
            self.take()

    def drain(self) -> None:
        while self.worker.num_unfinished:
            self.worker.step()
        self.take()

    def take(self) -> None:
        for request_id in list(self.running):
            rollout = self.worker.take(request_id)
            if rollout is not None:
                self.running.remove(request_id)
                self.rollouts.append((request_id, rollout))

    # -- updates

    def update(self) -> None:
        mode = self.random.choice(["drained", "abort_resume", "in_flight"])
        if mode == "drained" and self.worker.num_unfinished:
            if self.random.random() < 0.5:
                self.refused("while requests run", RuntimeError, self.folder / "target0", 99)
                return
            self.drain()
        what: dict[str, Any] = {"mode": mode}
        kind = self.random.choice(["target", "head", "both"])
        if kind != "head":
            self.targets.append(self.random.randrange(self.count[0]))
            self.modes.append(mode)
            what |= {"weights": self.source(f"target{self.targets[-1]}"), "policy_version": len(self.targets) - 1}
        if kind != "target":
            self.heads.append(self.random.randrange(self.count[1]))
            what |= {"draft": self.source(f"head{self.heads[-1]}"), "draft_version": len(self.heads) - 1}
        self.worker.update_weights(**what)
        self.done["updates"] += 1
        self.done[f"updates of {kind}"] += 1
        self.done[f"updates {mode}" + (" while requests run" if self.worker.num_unfinished else "")] += 1
        self.note_memory()

    def source(self, name: str) -> Any:
        """Weights as a folder, a file or named tensors."""
        from safetensors.torch import load_file

        folder = self.folder / name
        file = folder / "model.safetensors"
        return self.random.choice([lambda: folder, lambda: file, lambda: load_file(file)])()

    def note_memory(self) -> None:
        import psutil

        gc.collect()
        self.memory.append(psutil.Process().memory_info().rss / 2**20)

    # -- faults: each must be refused, with everything as it was

    def refused(
        self, what: str, error: type[Exception], target: Any = None, version: int | None = None, **more: Any
    ) -> None:
        before = self.worker.policy_version, self.worker.draft_version
        mode = "drained" if what == "while requests run" else "in_flight"
        try:
            self.worker.update_weights(target, version, mode=mode, **more)
        except error:
            self.done[f"refused: {what}"] += 1
        else:
            raise AssertionError(f"accepted: {what}")
        assert (self.worker.policy_version, self.worker.draft_version) == before

    def some(self) -> tuple[str, dict[str, Any]]:
        from safetensors.torch import load_file

        name = self.random.choice(["target0", "head1"])
        return name, load_file(self.folder / name / "model.safetensors")

    def refused_part(self, what: str, name: str, weights: Any) -> None:
        """`weights` for the target or the head that `name` is, at times with a good one of the other kind."""
        both = self.random.random() < 0.5
        if name.startswith("target"):
            other = {"draft": self.folder / "head0", "draft_version": 99} if both else {}
            self.refused(what, ConfigError, weights, 99, **other)
        else:
            other = {"target": self.folder / "target1", "version": 99} if both else {}
            self.refused(what, ConfigError, draft=weights, draft_version=99, **other)

    def cut_off(self) -> None:
        name, _ = self.some()
        content = (self.folder / name / "model.safetensors").read_bytes()
        file = self.folder / "cut.safetensors"
        file.write_bytes(content[: self.random.randrange(len(content))])
        self.refused_part("file cut off", name, file)

    def wrong_shape(self) -> None:
        name, weights = self.some()
        chosen = self.random.choice(sorted(weights))
        self.refused_part("wrong shape", name, weights | {chosen: weights[chosen][:-1]})

    def incomplete(self) -> None:
        name, weights = self.some()
        weights.pop(self.random.choice(sorted(weights)))
        self.refused_part("incomplete", name, weights)

    def not_finite(self) -> None:
        name, weights = self.some()
        chosen = self.random.choice([key for key in sorted(weights) if weights[key].is_floating_point()])
        weights[chosen].view(-1)[-1] = self.random.choice([float("nan"), float("inf")])
        self.refused_part("not finite", name, weights)

    def shared_layer(self) -> None:
        weights = tiny.head_weights(0)
        self.refused_part("shared layer", "head", weights | {"embed_tokens.weight": weights["lm_head.weight"]})

    def killed_sender(self) -> None:
        name, _ = self.some()
        place = self.folder / "sent"
        place.mkdir(exist_ok=True)
        command = [sys.executable, "-c", SENDER, self.folder / name / "model.safetensors", place / "model.safetensors"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as sender:
            assert sender.stdout is not None
            assert sender.stdout.readline() == b"half\n"
            sender.send_signal(signal.SIGKILL)
        self.refused_part("killed sender", name, place)

    def breaks_while_loading(self) -> None:
        """A fault that our checks can't foresee: the model raises in the midst of loading. Made by a hook in it."""
        which = self.random.choice(["target", "draft"])
        self.worker._rpc(break_loading, which, self.random.randint(1, 8))
        more = {"draft": self.folder / "head1", "draft_version": 99}
        if which == "target" or self.random.random() < 0.5:
            more |= {"target": self.folder / "target1", "version": 99}
        self.refused(f"{which} broke while loading", UpdateFailed, **more)
        self.worker._rpc(mend_loading, which)

    def asleep(self) -> None:
        """vLLM has no sleep mode on CPU: it is refused, and nothing happens."""
        try:
            self.worker.sleep(2)
        except RuntimeError:
            self.done["refused: sleep"] += 1
        else:
            raise AssertionError("slept")

    def damaged_draft(self) -> None:
        """What a level 2 sleep does on a GPU, made by hand: the head's weights are gone, without an error."""
        if self.random.random() < 0.5:
            self.worker._rpc(zero_draft)
            self.disturbed |= set(self.running)
            self.steps_disturbed()
            assert self.worker.mend_weights() is True
            self.done["draft mended"] += 1
        assert self.worker.mend_weights() is False

    def steps_disturbed(self) -> None:
        for _ in range(2):
            self.worker.step()
        self.disturbed |= set(self.running)
        self.take()


def break_loading(worker: Any, which: str, after: int) -> None:
    from rollout_spec.engine import reload

    model = reload.models(worker.model_runner)[which]
    load = type(model).load_weights

    def broken(weights: Any) -> Any:
        def some() -> Any:
            for number, item in enumerate(weights):
                if number == after:
                    raise RuntimeError("broken on purpose")
                yield item

        return load(model, some())

    model.load_weights = broken


def mend_loading(worker: Any, which: str) -> None:
    from rollout_spec.engine import reload

    del reload.models(worker.model_runner)[which].load_weights


def zero_draft(worker: Any) -> None:
    from rollout_spec.engine import reload

    weights = tiny.head_weights(0)
    zeros = {name: tensor * 0 for name, tensor in weights.items() if name != "d2t"} | {"d2t": weights["d2t"]}
    reload.load(worker, reload.DRAFT, zeros.items())


def storm(folder: Path, updates: int, targets: int, heads: int, seed: int) -> dict[str, Any]:
    """Everything that `check` needs, and counts."""
    with fire_engine(folder, 0, 0) as worker:
        fire = Storm(worker, folder, targets, heads, seed)
        began = time.perf_counter()
        fire.run(updates)
        left = sorted(path.name for path in Path("/dev/shm").glob(f"rollout_spec_{os.getpid()}_*"))
        return {
            "rollouts": fire.rollouts,
            "targets": fire.targets,
            "heads": fire.heads,
            "modes": fire.modes,
            "disturbed": fire.disturbed,
            "done": dict(fire.done),
            "memory_mib": fire.memory,
            "left_in_shared_memory": left,
            "seconds": time.perf_counter() - began,
            "metrics": worker.metrics(),
        }


def spans_to_check(rollout: Rollout, modes: list[str]) -> list[tuple[int, int, int]]:
    """(start, end, policy version) of what must be a fresh engine's: not what runs on over a stale cache."""
    spans: list[tuple[int, int, int]] = []
    ends = [span.start for span in rollout.spans[1:]] + [len(rollout.token_ids)]
    for span, end in zip(rollout.spans, ends, strict=True):
        if spans and spans[-1][2] == span.policy_version:
            spans[-1] = (spans[-1][0], end, span.policy_version)
        else:
            spans.append((span.start, end, span.policy_version))
    return [one for one in spans if one[0] < one[1] and (one[0] == 0 or modes[one[2]] != "in_flight")]


Query = tuple[tuple[int, ...], int]  # context, tokens to generate
Pair = tuple[int, int | None]  # target, head; None: without speculation


def answers(folder: Path, wanted: dict[Pair, list[Query]]) -> dict[Pair, dict[Query, Any]]:
    """Tokens, log-probabilities and draft statistics from a new engine for each pair, one after the other."""
    found: dict[Pair, dict[Query, Any]] = {}
    for (target, head), queries in wanted.items():
        lengths = [[length] for _, length in queries]
        with fire_engine(folder, target, head) as worker:
            rollouts = worker.generate(
                [list(context) for context, _ in queries], sampling=GREEDY, output_tokens=lengths
            )
        given = [(r.token_ids, r.logprobs, r.speculation) for r in rollouts]
        found[target, head] = dict(zip(queries, given, strict=True))
    return found


def agree(rollout: Rollout, start: int, answer: Any) -> float | None:
    """The largest difference of a log-probability; None where a token differs."""
    tokens, logprobs, _ = answer
    end = start + len(tokens)
    if rollout.token_ids[start:end] != tokens:
        return None
    return max(abs(a - b) for a, b in zip(rollout.logprobs[start:end], logprobs, strict=True))  # type: ignore[index]


def check(folder: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Compare every span with new engines; what was compared, and what was wrong.

    The other targets and heads are asked the same: `told_apart` is the share of spans (`drafts_told_apart` of
    responses) that would have been found wrong had the engine held another target (head).
    """
    spans: list[tuple[Rollout, int, Query, int]] = []
    drafts: list[tuple[Rollout, Query, int, int]] = []
    for request_id, rollout in result["rollouts"]:
        for start, end, version in spans_to_check(rollout, result["modes"]):
            query = (tuple(rollout.prompt_token_ids + rollout.token_ids[:start]), end - start)
            spans.append((rollout, start, query, result["targets"][version]))
        # Drafts are compared where one head made all of them, and none of its cache was another's.
        whole = len(rollout.spans) == 1 and rollout.finish_reason == "length" and request_id not in result["disturbed"]
        if whole and len(rollout.prompt_token_ids) < 100:
            span = rollout.spans[0]
            query = (tuple(rollout.prompt_token_ids), len(rollout.token_ids))
            drafts.append((rollout, query, result["targets"][span.policy_version], result["heads"][span.draft_version]))
    targets = sorted({target for *_, target in spans})
    heads = sorted({head for *_, head in drafts})
    wanted: dict[Pair, list[Query]] = {(t, None): sorted({query for _, _, query, _ in spans}) for t in targets}
    for target in sorted({target for _, _, target, _ in drafts}):
        wanted |= {(target, head): sorted({q for _, q, t, _ in drafts if t == target}) for head in heads}
    fresh = run_fresh(answers, folder, wanted)

    wrong: list[Any] = []
    errors, apart, drafts_apart = [0.0], [], []
    for rollout, start, query, target in spans:
        error = agree(rollout, start, fresh[target, None][query])
        if error is None or error > TOLERANCE:
            wrong.append(["tokens", target, error, rollout.token_ids[start:], fresh[target, None][query][0]])
        else:
            errors.append(error)
        others = [agree(rollout, start, fresh[other, None][query]) for other in targets if other != target]
        apart += [other is None or other > TOLERANCE for other in others]
    for rollout, query, target, head in drafts:
        if rollout.speculation != fresh[target, head][query][2]:
            wrong.append(["drafts", target, head, str(rollout.speculation), str(fresh[target, head][query][2])])
        drafts_apart += [rollout.speculation != fresh[target, h][query][2] for h in heads if h != head]
    return {
        "spans": len(spans),
        "tokens": sum(length for _, _, (_, length), _ in spans),
        "logprob_error": max(errors),
        "told_apart": sum(apart) / max(len(apart), 1),
        "drafts": len(drafts),
        "accepted": sum(rollout.speculation.accepted_tokens for rollout, *_ in drafts if rollout.speculation),
        "drafts_told_apart": sum(drafts_apart) / max(len(drafts_apart), 1),
        "wrong": wrong,
    }
