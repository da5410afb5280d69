"""A head trained on, as a process of its own: `python -m rollout_spec.draft.refresh_job JOB.json`.

Some of the prompts are held out; there the new head is held against the old one, by predicted acceptance. The result is
written last: who finds none knows that the job failed, and the log says why.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_spec import provenance
from rollout_spec.config import ConfigError, DraftConfig
from rollout_spec.draft.samples import Sample, read_samples
from rollout_spec.files import write_json

if TYPE_CHECKING:
    from rollout_spec.draft.acceptance import Predicted

# Tokens of a forward pass of the target, padding included.
FORWARD_TOKENS = 4096
# One prompt of so many is not trained on, to judge by.
HELD_OUT = 8
RESULT = "result.json"


@dataclass(frozen=True, slots=True)
class RefreshJob:
    """`target`, `head`: folders of the policy and of the head to go on from; `samples`: a file of JSON lines."""

    target: str
    head: str
    samples: str
    out: str
    """Folder for the new head."""
    k: int
    """Draft tokens at which heads are compared."""
    policy_version: int
    seconds: float
    threads: int
    nice: int
    cores: tuple[int, ...]
    draft: dict[str, Any]
    """Options of `DraftConfig`."""

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> RefreshJob:
        return cls(**json.loads(path.read_text("utf-8")))


def split(samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    """For training and for judging; responses to one prompt stay together. Raises ConfigError on a single prompt."""
    prompts = sorted({sample.prompt_id for sample in samples})
    if len(prompts) < 2:
        raise ConfigError(f"refresh: {len(samples)} responses to {len(prompts)} prompts; it takes two prompts at least")
    held = set(prompts[::HELD_OUT])
    return [s for s in samples if s.prompt_id not in held], [s for s in samples if s.prompt_id in held]


def run(job: RefreshJob) -> dict[str, Any]:
    """Trains, judges, saves; returns what is known of it. Sets the threads of this process."""
    import torch

    from rollout_spec.draft.acceptance import acceptance_chances, predict
    from rollout_spec.draft.checkpoint import load_head, save_head
    from rollout_spec.draft.features import Target, channel_scale, extract
    from rollout_spec.draft.loss import Shared
    from rollout_spec.draft.target import target_fingerprint
    from rollout_spec.draft.train import Trainer
    from rollout_spec.draft.vocabulary import coverage

    torch.set_num_threads(job.threads)
    began = time.monotonic()
    head, ids, _ = load_head(Path(job.head))
    training, judging = split(read_samples(Path(job.samples)))
    options = DraftConfig.model_validate(job.draft)
    torch.manual_seed(options.seed)
    target = Target(Path(job.target), head.shape.aux_layers)
    shared = Shared.of(target.embedding, target.output, ids)
    features = extract(target, training, FORWARD_TOKENS, options.features_gib * 2**30)
    judged = extract(target, judging, FORWARD_TOKENS)

    def predicted(folder: str) -> list[Predicted]:
        """At each K, of a head as vLLM will see it: rounded."""
        rounded = load_head(Path(folder)).rounded()
        chances = acceptance_chances(rounded, shared, judged, job.k, FORWARD_TOKENS)
        return [predict(chances, k) for k in range(1, job.k + 1)]

    before = predicted(job.head)[-1].acceptance_length
    scale = channel_scale(features)
    for each in features:
        each.aux.div_(scale)
    head.scale_features(scale)
    ready = time.monotonic()
    trainer = Trainer(head, shared, features, options, job.seconds)
    trainer.run(lambda *_: None, lambda *_: None)
    trained = time.monotonic()
    head.scale_features(1 / scale)
    known: dict[str, Any] = {
        "target": {
            "model": job.target,
            "fingerprint": target_fingerprint(Path(job.target)),
            "policy_version": job.policy_version,
        },
        "init": job.head,
        "responses": len(training),
        "response_tokens": sum(len(sample.response) for sample in training),
        "trained": asdict(trainer.progress),
        "vocabulary_coverage": coverage(judging, ids),
        **provenance.collect(),
    }
    save_head(Path(job.out), head, ids, known | {"acceptance": []})
    after = predicted(job.out)
    temperatures = {sample.temperature for sample in judging}
    rows = [
        {"temperature": t, "k": p.k, "acceptance_length": p.acceptance_length, "survival": p.survival}
        for t in temperatures
        for p in after
    ]
    # One temperature is what a policy's rollouts have; a mixture has no row of its own in the table.
    save_head(Path(job.out), head, ids, known | {"acceptance": rows if len(temperatures) == 1 else []})
    return {
        "policy_version": job.policy_version,
        "k": job.k,
        "before": before,
        "after": after[-1].acceptance_length,
        "tokens": sum(len(sample.tokens) for sample in training),
        "held_out_tokens": sum(len(sample.response) for sample in judging),
        "trained": asdict(trainer.progress),
        "seconds": {"features": ready - began, "train": trained - ready, "total": time.monotonic() - began},
        "cpu_seconds": time.process_time(),
    }


def main() -> int:
    path = Path(sys.argv[1])
    job = RefreshJob.read(path)
    # vLLM binds the thread that started us to a core; before torch makes threads of its own.
    os.sched_setaffinity(0, job.cores)
    os.nice(job.nice)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result = run(job)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    write_json(path.parent / RESULT, result)
    return 0


def _end_with_parent() -> None:
    """Standard input is a pipe that ends when the parent does, however it ends."""
    sys.stdin.read()
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
