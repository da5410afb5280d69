"""A policy that really moves, and the acceptance of draft heads that follow it or do not.

    python experiments/drift/run.py --head out/draft/head --out out/drift   # hours on 2 cores; resumes

GRPO on arithmetic problems whose answers and form are checked, SmolLM2-135M. The head in the engine is refreshed by
measurement; beside it, on the same responses: one that never is, one that is every n updates, and suffix trees over the
responses of earlier epochs. Lengths are predicted at K=3 on each step's responses (`rollout_spec.draft.acceptance`);
`engine` is what vLLM counted for the measured arm, at whatever K the controller chose. A row a step: OUT/rows.jsonl.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from arms import HistoryArm, Shadow, judge
from plot import draw
from policy import Policy, messages, reward

from rollout_spec import provenance
from rollout_spec.config import Config, load_config
from rollout_spec.files import write_json
from rollout_spec.model import resolve
from rollout_spec.rollout.draft_refresh import DraftRefresh
from rollout_spec.rollout.types import Rollout
from rollout_spec.rollout.worker import RolloutWorker
from rollout_spec.workload import Prompt, generate_prompts

SCHEMA = 1
K = 3
PROMPT_SEED = 31
# Longer than any refresh may take: the next step waits for it, so that what it costs is seen apart.
PATIENCE = 3600.0
KEEP_VERSIONS = 2


class Run:
    """One trajectory of the policy, with everything that follows it."""

    def __init__(self, args: argparse.Namespace, out: Path) -> None:
        self.args, self.out = args, out
        self.prompts = generate_prompts(args.prompts, PROMPT_SEED)
        self.config = self._config("measured", "measured")
        self.policy = Policy(Path(str(resolve(self.config.model))), args.rate)
        self.step = self.policy.restore(out / "state")
        self.rows = [row for row in read_rows(out / "rows.jsonl") if row["step"] < self.step]
        self.history = HistoryArm(K)
        self.worker = RolloutWorker(self.config)
        self.measured = DraftRefresh(self.worker)
        self.shadow = Shadow(self._config("every", "every"))
        self.every = DraftRefresh(self.shadow)  # type: ignore[arg-type]
        if self.step:
            self._publish()

    def run(self) -> None:
        with (self.out / "rows.jsonl").open("w", encoding="utf-8") as file:
            for row in self.rows:
                file.write(json.dumps(row) + "\n")
            while self.step < self.args.steps:
                row = self._one()
                self.rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
                self.policy.keep(self.out / "state", self.step)
                said = {name: round(arm["acceptance_length"], 2) for name, arm in row["arms"].items()}
                print(f"step {row['step']}: reward {row['reward']:.2f}, {said}, {row['refresh']['reason']}", flush=True)

    def close(self) -> None:
        self.every.close()
        self.measured.close()
        self.worker.close()

    def _one(self) -> dict[str, Any]:
        """Rollout, judgement, refreshes, one optimiser step, new weights."""
        at = self.step * self.args.batch
        chosen = [self.prompts[(at + i) % len(self.prompts)] for i in range(self.args.batch)]
        began = time.monotonic()
        rollouts = self.worker.generate([messages(prompt) for prompt in chosen], n=self.args.n)
        seconds = time.monotonic() - began
        arms = judge(self._folder(), self.heads(), rollouts, 1.0, K) | {"history": self.history.judge(rollouts)}
        decision = self.measured.after_rollout(rollouts)
        self.every.after_rollout(rollouts)
        for name, refresh in (("measured", self.measured), ("every", self.every)):
            before = refresh.metrics()["rollout_spec/refresh_done"]
            refresh.wait(PATIENCE)
            arms[name]["refreshed"] = refresh.metrics()["rollout_spec/refresh_done"] > before
            arms[name]["refresh_seconds"] = refresh.metrics()["rollout_spec/refresh_total_cost_seconds"]
        rewards = self._rewards(chosen, rollouts)
        began = time.monotonic()
        norm = self.policy.learn(rollouts, rewards, self.args.n)
        learnt = time.monotonic() - began
        self.step += 1
        self._publish()
        return {
            "step": self.step - 1,
            "reward": sum(rewards) / len(rewards),
            "right": sum(value >= 1 for value in rewards) / len(rewards),
            "tokens": sum(len(each.token_ids) for each in rollouts),
            "rollout_seconds": seconds,
            "train_seconds": learnt,
            "gradient": norm,
            "engine": engine_length(rollouts),
            "refresh": {"reason": f"{decision.code}: {decision.reason}", "gain": decision.gain},
            "arms": arms,
        }

    def _publish(self) -> None:
        """The policy's weights go to the engine and to all that follow it."""
        folder = self.policy.publish(self._folder())
        self.worker.update_weights(folder, self.step)
        self.shadow.policy_version = self.step
        self.measured.after_update(folder)
        self.every.after_update(folder)
        if self.step > KEEP_VERSIONS:  # before that it is the model itself
            shutil.rmtree(self._folder(self.step - KEEP_VERSIONS), ignore_errors=True)

    def _rewards(self, prompts: list[Prompt], rollouts: list[Rollout]) -> list[float]:
        texts = [self.worker.tokenizer.decode(each.token_ids, skip_special_tokens=True) for each in rollouts]
        return [reward(prompts[each.prompt_index], text) for each, text in zip(rollouts, texts, strict=True)]

    def heads(self) -> dict[str, Path]:
        """As they are now, by arm."""
        return {"frozen": Path(self.args.head), "every": self.shadow.head, "measured": self.measured.head}

    def _folder(self, step: int | None = None) -> Path:
        step = self.step if step is None else step
        return self.out / "policy" / str(step) if step > 0 else self.policy.source

    def _config(self, arm: str, policy: str) -> Config:
        overrides = [
            "engine.max_model_len=768",
            f"engine.max_num_seqs={self.args.batch * self.args.n}",
            "engine.kv_cache_gib=1",
            "drafter.method=eagle3",
            f"drafter.model={self.args.head}",
            "drafter.k_max=5",
            f"sampling.max_tokens={self.args.max_tokens}",
            f"refresh.policy={policy}",
            f"refresh.every={self.args.every}",
            f"refresh.folder={self.out / arm}",
            "refresh.threads=2",  # the step waits for it
            f"refresh.seconds={self.args.refresh_seconds}",
            "refresh.timeout=3000",
            f"refresh.min_tokens={self.args.min_tokens}",
        ]
        return load_config(None, [*overrides, *self.args.set])


def engine_length(rollouts: list[Rollout]) -> float | None:
    """Bonus token included; None without a draft."""
    seen = [each.speculation for each in rollouts if each.speculation is not None]
    drafts = sum(each.draft_steps for each in seen)
    return 1 + sum(each.accepted_tokens for each in seen) / drafts if drafts else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Those that are whole."""
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:  # torn by a crash
            continue
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", required=True, help="an EAGLE-3 head of the policy as it begins")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=128, help="seen again and again, BATCH a step")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--every", type=int, default=15)
    parser.add_argument("--refresh-seconds", type=float, default=60)
    parser.add_argument("--min-tokens", type=int, default=20_000)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override any option")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args, args.out)
    try:
        run.run()
    finally:
        run.close()
    options = {name: str(value) for name, value in vars(args).items()}
    write_json(
        args.out / "results.json",
        {
            "schema": SCHEMA,
            "k": K,
            "options": options,
            "heads": {name: str(head) for name, head in run.heads().items()},
            "prompts": [prompt.id for prompt in run.prompts],
            "rows": run.rows,
            "provenance": provenance.collect(),
        },
    )
    draw(run.rows, args.out / "drift.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
