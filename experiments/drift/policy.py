"""A small policy that learns by GRPO on problems whose answer can be checked."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollout_spec.rollout.types import Rollout
from rollout_spec.workload import Prompt
from rollout_spec.workload.prompts import check_answer

# What the form is worth beside a right answer, which a small model gives too rarely to learn from alone.
STATED, NUMBERED = 0.3, 0.7
# Steps that are asked for, at least.
STEPS = 4
ASK = "\nNumber your steps: begin each on a new line with 'Step 1:', 'Step 2:' and so on, at least four of them."
CLIP = 1.0
# Tokens of a forward and backward pass, padding included.
BATCH_TOKENS = 2048


def messages(prompt: Prompt) -> list[dict[str, str]]:
    """The problem, with the form that `reward` pays for."""
    *before, last = prompt.messages
    return [*before, {**last, "content": last["content"] + ASK}]


def reward(prompt: Prompt, text: str) -> float:
    """1 for the right answer, STATED for any that is stated as asked, NUMBERED for STEPS numbered steps in order."""
    stated = any(words in text for words in ("The answer is", "\\boxed{", "Answer:"))
    numbers = [int(number) for number in re.findall(r"^Step (\d{1,3}):", text, re.MULTILINE)]
    steps = next((i for i, number in enumerate(numbers) if number != i + 1), len(numbers))
    return float(check_answer(prompt, text) or 0) + STATED * stated + NUMBERED * min(steps, STEPS) / STEPS


class Policy:
    """Weights in float32, forward passes in bfloat16."""

    def __init__(self, folder: Path, rate: float) -> None:
        from transformers import AutoModelForCausalLM

        self.source = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.0, fused=True)

    def learn(self, rollouts: Sequence[Rollout], rewards: Sequence[float], n: int) -> float:
        """One step on groups of `n` responses each; the advantage is the reward against its group's. Returns the norm
        of the gradient."""
        groups = torch.tensor(rewards).view(-1, n)
        advantages = ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten().tolist()
        useful = [(r, a) for r, a in zip(rollouts, advantages, strict=True) if a and r.token_ids]
        useful.sort(key=lambda each: len(each[0].prompt_token_ids) + len(each[0].token_ids))
        total = sum(len(r.token_ids) for r, _ in useful)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        while useful:
            longest = len(useful[-1][0].prompt_token_ids) + len(useful[-1][0].token_ids)
            count = max(1, BATCH_TOKENS // longest)
            batch, useful = useful[-count:], useful[:-count]
            (self._loss(batch, longest) / total).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP))
        self.optimizer.step()
        return norm

    def _loss(self, batch: Sequence[tuple[Rollout, float]], longest: int) -> Tensor:
        """Minus advantage times log-probability, summed over response tokens."""
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        weights = torch.zeros(len(batch), longest)
        for row, (rollout, advantage) in enumerate(batch):
            start, end = len(rollout.prompt_token_ids), len(rollout.prompt_token_ids) + len(rollout.token_ids)
            ids[row, :end] = torch.tensor(rollout.prompt_token_ids + rollout.token_ids)
            weights[row, start:end] = advantage
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(ids, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
        )
        return (losses * weights[:, 1:].flatten()).sum()

    def publish(self, folder: Path) -> Path:
        """The weights as a Hugging Face folder in bfloat16, for the engine, the refresher and the judge."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.source.iterdir():
            if file.suffix in (".json", ".jinja"):  # the chat template is one of its own
                shutil.copyfile(file, folder / file.name)
        state = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in self.model.named_parameters()}
        save_file(state, folder / "model.safetensors", {"format": "pt"})
        return folder

    def keep(self, folder: Path, step: int) -> None:
        """Weights and moments, to go on from; the step is written last."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"weight.{name}": p.detach() for name, p in self.model.named_parameters()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"moment.{index}.{name}": value for name, value in moments.items()}
        save_file(tensors, folder / f"{step}.safetensors")
        (folder / "step.json").write_text(json.dumps(step))
        for old in folder.glob("*.safetensors"):
            if old.stem != str(step):
                old.unlink()

    def restore(self, folder: Path) -> int:
        """The step that was kept last, 0 if none was."""
        if not (folder / "step.json").exists():
            return 0
        step = int(json.loads((folder / "step.json").read_text()))
        tensors = load_file(folder / f"{step}.safetensors")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[f"weight.{name}"])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("moment."):
                _, index, moment = name.split(".")
                state.setdefault(int(index), {})[moment] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        return step
