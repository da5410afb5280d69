"""From nothing to a head: responses, features, training, judgement; each phase goes on where it was interrupted.

Everything that can be wrong with the input is found before the first engine starts. The one module beside `judge` that
reaches up to the rollout room, to sample the policy.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from tqdm import tqdm

from rollout_spec import provenance
from rollout_spec.config import Config, ConfigError
from rollout_spec.draft.acceptance import judge_samples
from rollout_spec.draft.checkpoint import (
    HELD_OUT,
    SEEN,
    SavedHead,
    load_head,
    load_whole,
    read_provenance,
    save_head,
    save_whole,
)
from rollout_spec.draft.features import Features, Target, channel_scale, extract
from rollout_spec.draft.loss import Shared, StepStats
from rollout_spec.draft.model import Eagle3Head
from rollout_spec.draft.prompts import read_prompts, split_prompts
from rollout_spec.draft.samples import Sample, read_samples
from rollout_spec.draft.schedule import Clock
from rollout_spec.draft.shape import HeadShape
from rollout_spec.draft.target import read_target, target_fingerprint
from rollout_spec.draft.train import Progress, Trainer
from rollout_spec.draft.vocabulary import choose_vocabulary, coverage
from rollout_spec.files import write_whole

if TYPE_CHECKING:
    from rollout_spec.rollout.recording import Job

# Tokens of a forward pass of the target, padding included.
FORWARD_TOKENS = 4096
# The features may take as much of the generating time again at most.
FEATURES_SHARE = 0.25
# Seconds left of the budget for which a finished run is taken up again.
WORTH_IT = 60.0


class Training:
    """One run, in `out` (the head) and `out/training` (what it came from)."""

    def __init__(self, config: Config, out: Path, init: Path | None, policy_version: int) -> None:
        """Checks everything. Raises ConfigError that names the option."""
        self.config, self.options, self.out, self.init = config, config.draft, out, init
        self.policy_version = policy_version
        self.work = out / "training"
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out {out}: is a file; name a folder")
        memory = psutil.virtual_memory().total / 2**30
        if self.options.features_gib > memory:
            raise ConfigError(
                f"draft.features_gib {self.options.features_gib}: this machine has {memory:.1f} GiB; ask for less"
            )
        if self.options.max_tokens >= config.engine.max_model_len:
            raise ConfigError(
                f"draft.max_tokens {self.options.max_tokens}: leaves no room for a prompt in engine.max_model_len "
                f"{config.engine.max_model_len}; lower the one or raise the other"
            )
        self.target = read_target(config.model)
        self.start = load_head(init) if init else None
        self.shape = self._shape()
        fingerprint = provenance.fingerprint(
            {
                "config": config.model_dump(mode="json"),
                "init": str(init),
                "target": target_fingerprint(self.target.folder),
                "prompts": read_prompts(self.options.prompts)[1] if self.options.prompts else None,
            },
            ignore=("config.draft.minutes", "config.draft.generate_share", "config.draft.threads"),
        )
        self.clock = Clock(self.work, fingerprint, self.options.minutes)

    def run(self) -> dict[str, Any]:
        """Trains, or finishes what was begun; returns the head's provenance.

        A finished run goes on training on the same responses where `draft.minutes` was raised since.
        """
        if "evaluate" in self.clock.finished and self.clock.left < WORTH_IT:
            return read_provenance(self.out)
        torch.set_num_threads(self.options.threads or len(os.sched_getaffinity(0)))
        torch.manual_seed(self.options.seed)
        self.work.mkdir(parents=True, exist_ok=True)
        samples = self._generate()
        target = Target(self.target.folder, self.shape.aux_layers)
        features = self._features(target, samples)
        if self.start is None:
            ids = choose_vocabulary(samples, self.shape.vocab_size, self.shape.draft_vocab_size, self.target.ends)
        else:
            ids = self.start.ids
        shared = Shared.of(target.embedding, target.output, ids)
        head, progress = self._train(target, shared, features)
        return self._judge(head, target, shared, samples, progress)

    def _shape(self) -> HeadShape:
        if self.start is None:
            return HeadShape.for_target(
                self.target.config, self.options.vocabulary, self.options.aux_layers, self.options.intermediate_size
            )
        shape = self.start.head.shape
        sizes = self.target.config["hidden_size"], self.target.config["vocab_size"]
        if (shape.hidden_size, shape.vocab_size) != sizes:
            raise ConfigError(
                f"--init {self.init}: is a head for hidden size {shape.hidden_size} and {shape.vocab_size} tokens; the "
                f"model {self.config.model!r} has {sizes[0]} and {sizes[1]}"
            )
        if max(shape.aux_layers) >= self.target.config["num_hidden_layers"]:
            raise ConfigError(f"--init {self.init}: reads layer {max(shape.aux_layers)}, which the model does not have")
        return shape

    def _generate(self) -> list[Sample]:
        """Held-out responses first, so that there are some whenever the time is up."""
        path, judged_by = self.work / "responses.jsonl", self.out / HELD_OUT
        if "generate" not in self.clock.finished:
            from rollout_spec.rollout.recording import Job, in_process, record

            prompts = split_prompts(self.config)
            temperatures = self.options.temperatures
            held = [Job(p.prompt_id, p.prompt, t) for p in prompts.held_out for t in dict.fromkeys(temperatures)]
            jobs = [
                Job(p.prompt_id, p.prompt, temperatures[i % len(temperatures)]) for i, p in enumerate(prompts.training)
            ]
            with self.clock.phase("generate"):
                for wanted, file, title in ((held, judged_by, "held-out responses"), (jobs, path, "responses")):
                    left = self.options.generate_share * self.clock.budget - self.clock.seconds["generate"]
                    missing = _missing(wanted, file)
                    if missing and (left > 0 or file == judged_by):
                        in_process(record, self.config, missing, file, max(left, 60.0), title, on_look=self.clock.keep)
                        self.clock.keep()
        samples = read_samples(path)
        if not samples:
            raise ConfigError(
                f"draft.minutes {self.options.minutes}: not one response was finished in the share of it that "
                f"draft.generate_share {self.options.generate_share} leaves; raise one of them"
            )
        write_whole(self.out / SEEN, "\n".join(sorted({sample.prompt_id for sample in samples})) + "\n")
        return samples

    def _features(self, target: Target, samples: list[Sample]) -> list[Features]:
        """Computed again in each session: reading them back from disk would cost gigabytes."""
        began = self.clock.used
        share = FEATURES_SHARE * self.clock.budget
        total = sum(len(sample.tokens) for sample in samples)
        with (
            self.clock.phase("features"),
            tqdm(total=total, desc="features", unit="token", unit_scale=True, mininterval=5) as bar,
        ):
            return extract(
                target,
                samples,
                FORWARD_TOKENS,
                self.options.features_gib * 2**30,
                on_batch=bar.update,
                in_time=lambda: self.clock.used - began < share,
            )

    def _train(self, target: Target, shared: Shared, features: list[Features]) -> tuple[Eagle3Head, Progress]:
        scale = channel_scale(features)
        for each in features:
            each.aux.div_(scale)
        head = Eagle3Head(self.shape)
        if self.start is None:
            head.initialise(target.norm, shared.rows)
        else:
            head.load_state_dict(self.start.head.state_dict())
            head.scale_features(scale)
        file = self.work / "state.safetensors"
        seconds = self.clock.left + self.clock.seconds["train"]
        trainer = Trainer(head, shared, features, self.options, seconds)
        if file.exists():
            tensors, metadata = load_whole(file)
            trainer.restore(tensors, Progress(**json.loads(metadata["progress"])))
        with self.clock.phase("train"), tqdm(total=round(seconds), desc="training", unit="s", mininterval=5) as bar:

            def show(progress: Progress, loss: float, stats: Any) -> None:
                bar.set_postfix_str(_postfix(progress, loss, stats), refresh=False)
                bar.update(int(progress.seconds) - bar.n)

            def keep(state: dict[str, torch.Tensor], progress: Progress) -> None:
                save_whole(file, state, {"progress": json.dumps(_plain(progress))})
                self.clock.keep()

            trainer.run(show, keep)
            keep(trainer.state(), trainer.progress)
        head.scale_features(1 / scale)
        return head, trainer.progress

    def _judge(
        self, head: Eagle3Head, target: Target, shared: Shared, samples: list[Sample], progress: Progress
    ) -> dict[str, Any]:
        """Save the head first: nothing that goes wrong later may lose it."""
        held_out = read_samples(self.out / HELD_OUT)
        known: dict[str, Any] = {
            "target": {
                "model": self.config.model,
                "fingerprint": target_fingerprint(self.target.folder),
                "policy_version": self.policy_version,
            },
            "init": str(self.init) if self.init else None,
            "responses": len(samples),
            "response_tokens": sum(len(sample.response) for sample in samples),
            "trained": _plain(progress),
            "vocabulary_coverage": coverage(held_out, shared.ids),
            "config": self.config.model_dump(mode="json"),
            **provenance.collect(),
        }
        save_head(self.out, head, shared.ids, known | {"acceptance": []})
        with self.clock.phase("evaluate"):
            saved: SavedHead = load_head(self.out)
            acceptance = judge_samples(saved.rounded(), shared, target, held_out, FORWARD_TOKENS)
        total = sum(self.clock.seconds.values())
        known |= {"acceptance": acceptance, "seconds": {**self.clock.seconds, "total": total}}
        save_head(self.out, head, shared.ids, known)
        return read_provenance(self.out)


def _missing(jobs: list[Job], file: Path) -> list[Job]:
    done = {(sample.prompt_id, sample.temperature) for sample in read_samples(file)}
    return [job for job in jobs if (job.prompt_id, job.temperature) not in done]


def _plain(progress: Progress) -> dict[str, float]:
    return {
        "seconds": progress.seconds,
        "steps": progress.steps,
        "tokens": progress.tokens,
        "passes": progress.passes,
    }


def _postfix(progress: Progress, loss: float, stats: list[StepStats]) -> str:
    overlap = " ".join(f"{step.overlap:.2f}" for step in stats)
    return f"pass {progress.passes:.1f}, loss {loss:.2f}, overlap {overlap}"
