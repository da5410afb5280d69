"""What sampling one draft token costs at temperature 1, in the head's vocabulary and as vLLM does it, spread over the
target's; without the head's forward.

    .venv/bin/python experiments/draft_sampling.py   # half a minute; writes experiments/results/draft_sampling.json
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.spec_decode.eagle import EagleProposer

from rollout_spec import provenance
from rollout_spec.engine.draft_cache import DeferringEagleProposer

OUT = Path(__file__).parent / "results" / "draft_sampling.json"
VOCABULARY, DRAFT, HIDDEN = 49152, 4096, 576
BATCHES = (1, 4, 16, 32)
ROUNDS, CALLS = 30, 5


class Head(torch.nn.Module):
    """A head's output layer, and vLLM's spreading of its logits."""

    def __init__(self) -> None:
        super().__init__()
        ids = torch.randperm(VOCABULARY)[:DRAFT].sort().values
        self.ids, self.draft_id_to_target_id = ids, ids - torch.arange(DRAFT)
        self.lm_head = torch.randn(DRAFT, HIDDEN, dtype=torch.bfloat16) * HIDDEN**-0.5
        self.config = SimpleNamespace(vocab_size=VOCABULARY)

    def logits_processor(self, lm_head: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ lm_head.T

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = hidden.new_full((len(hidden), VOCABULARY), float("-inf"))
        logits[:, self.ids] = hidden @ self.lm_head.T
        return logits


def proposer(cls: type, head: Head) -> Any:
    made = object.__new__(cls)
    made.model = head
    made.use_local_argmax_reduction = made.use_heterogeneous_vocab = made.use_fp64_gumbel = False
    made._enable_probabilistic_draft_probs = True
    return made


def seconds(made: Any, hidden: torch.Tensor, sampling: Any) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        made._sample_draft_tokens(hidden, sampling)
    return (time.perf_counter() - started) / CALLS


def main() -> None:
    torch.set_num_threads(2)
    head = Head()
    stock, ours = proposer(EagleProposer, head), proposer(DeferringEagleProposer, head)
    rows = []
    for batch in BATCHES:
        hidden = torch.randn(batch, HIDDEN, dtype=torch.bfloat16)
        sampling = SimpleNamespace(temperature=torch.ones(batch), all_greedy=False, all_random=True)
        pairs = [(seconds(stock, hidden, sampling), seconds(ours, hidden, sampling)) for _ in range(ROUNDS)]
        ratios = sorted(a / b for a, b in pairs)
        rows.append(
            {
                "batch": batch,
                "stock_ms": 1e3 * median(a for a, _ in pairs),
                "ours_ms": 1e3 * median(b for _, b in pairs),
                "ratio": median(ratios),
                "ratio_p10": ratios[ROUNDS // 10],
                "ratio_p90": ratios[-1 - ROUNDS // 10],
            }
        )
        print({name: round(value, 2) for name, value in rows[-1].items()})
    OUT.write_text(json.dumps({"schema": 1, "rows": rows, "provenance": provenance.collect()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
