"""What goes wrong in the storm: each must be refused, or mended, with everything as it was."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny

from rollout_spec.config import ConfigError
from rollout_spec.rollout.update import UpdateFailed
from rollout_spec.rollout.worker import RolloutWorker

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


class Faults:
    """Of a storm, the subclass, which has what is declared here; two targets and two heads are in its folder."""

    worker: RolloutWorker
    folder: Path
    random: random.Random
    running: list[str]
    disturbed: set[str]
    done: Counter[str]
    take: Callable[[], None]

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
