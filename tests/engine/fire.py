"""Weight updates at random moments of a running worker, with `faults` among them. All greedy, in float32.

`storm` runs the worker and records what it gave; `verdict` says what is wrong with it.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import tiny
from faults import Faults
from fresh import engine

from rollout_spec.config import SamplingConfig
from rollout_spec.rollout.types import Rollout
from rollout_spec.rollout.worker import RolloutWorker

GREEDY = SamplingConfig(temperature=0)
K = 3
LEAST, MOST = 6, 30  # tokens of a response
# Short prompts, and two longer than a cache block (128 tokens), whose stale blocks would be used if there were any.
PROMPTS = [[(5 + 7 * i * i + 3 * j) % tiny.VOCABULARY for i in range(14 + j)] for j in range(6)]
PROMPTS += [[(3 + 5 * i * i + j * i) % tiny.VOCABULARY for i in range(150 + j)] for j in range(2)]


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


class Storm(Faults):
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


def storm(folder: Path, updates: int, targets: int, heads: int, seed: int) -> dict[str, Any]:
    """Everything that `verdict.check` needs, and counts."""
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
