"""What an EAGLE-3 head costs a decode step in which nothing is drafted.

    python experiments/k0_tax/run.py [--head DIR] [--batches 1,8,32] [--rounds 12] [--steps 40]

Three engines, each in a process of its own, take turns; only one runs at a time. off: no drafter. stock: the head is
loaded, K is 0, and vLLM runs the head at every step to keep its cache whole. ours: the head is deferred. In every round
each engine decodes the same prompts at each batch, in an order that rotates; a step counts when the whole batch
decodes. The tax is the ratio of medians over a round to those of `off` in the same round. Without --head the head has
random weights, which cost the same. Writes results.json with every step time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rollout_spec import provenance
from rollout_spec.bench.arms import ArmSpec
from rollout_spec.bench.engine_process import EngineProcess
from rollout_spec.config import DrafterConfig, PolicyConfig, parse_config
from rollout_spec.model import DEFAULT_MODEL, resolve

HERE = Path(__file__).resolve().parent
SCHEMA = "rollout-spec/k0-tax/1"
PROMPT_TOKENS = 32
# The first steps after the prompts are not counted: the batch is complete only then.
SKIP = 3
DRAFT_VOCABULARY = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--head", type=Path, help="a trained EAGLE-3 head; none: random weights")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        head = args.head or random_head(Path(resolve(args.model)), Path(folder) / "head")
        engines = start(args.model, head, max(batches), Path(folder))
        try:
            samples = measure(engines, batches, args.rounds, args.steps)
        finally:
            for engine in engines.values():
                engine.close()
    record = {
        "schema": SCHEMA,
        "provenance": provenance.collect(),
        "load_average": os.getloadavg(),
        "head": "random weights" if args.head is None else str(args.head),
        "prompt_tokens": PROMPT_TOKENS,
        "rounds": args.rounds,
        "steps": args.steps,
        "summary": summary(samples, batches),
        "step_ms": samples,  # [arm][batch][round][step]
    }
    args.out.write_text(json.dumps(record) + "\n")
    print(f"{args.out}")


def start(model: str, head: Path, max_batch: int, folder: Path) -> dict[str, EngineProcess]:
    tree: dict[str, Any] = {
        "model": model,
        "engine": {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": max_batch, "kv_cache_gib": 1.0},
        "drafter": {"method": "eagle3", "model": str(head), "k_max": 3},
        "sampling": {"temperature": 1.0, "logprobs": False},
    }
    config = parse_config(tree)
    off = PolicyConfig(name="off")
    arms: dict[str, tuple[DrafterConfig | None, PolicyConfig | None]] = {
        "off": (None, None),
        "stock": (config.drafter.model_copy(update={"draft_buffer_mib": 0}), off),
        "ours": (config.drafter, off),
    }
    engines = {}
    for name, (drafter, policy) in arms.items():
        engines[name] = EngineProcess(config, ArmSpec(name, "off", drafter, policy), folder / f"{name}.log")
        try:
            engines[name].wait_ready()
        except Exception:
            print((folder / f"{name}.log").read_text()[-4000:], file=sys.stderr)
            raise
    return engines


def measure(
    engines: dict[str, EngineProcess], batches: list[int], rounds: int, steps: int
) -> dict[str, dict[int, list[list[float]]]]:
    """Milliseconds by engine, batch, round and step."""
    samples: dict[str, dict[int, list[list[float]]]] = {name: {batch: [] for batch in batches} for name in engines}
    order = list(engines)
    for engine in engines.values():
        engine.call(decode, max(batches), 5, 0)
    for number in range(rounds):
        for batch in batches:
            for name in order:
                samples[name][batch].append(engines[name].call(decode, batch, steps, number))
            order.append(order.pop(0))
    return samples


def decode(worker: Any, log: Any, batch: int, steps: int, seed: int) -> list[float]:
    """In an engine's process: milliseconds of `steps` steps in which `batch` sequences decode."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(100, 20_000, (batch, PROMPT_TOKENS)).tolist()
    length = steps + SKIP + 2
    sampling = worker.config.sampling.model_copy(update={"max_tokens": length})
    ids = worker.submit(prompts, 1, sampling, [[length]] * batch)
    times = []
    while worker.num_unfinished:
        started = time.perf_counter()
        worker.step()
        times.append(round(1e3 * (time.perf_counter() - started), 3))
    for request in ids:
        worker.take(request)
    log.take()
    return times[SKIP : SKIP + steps]


def summary(samples: dict[str, dict[int, list[list[float]]]], batches: list[int]) -> list[dict[str, Any]]:
    """By batch and arm: the median step, and the tax over `off` in percent with its quartiles over the rounds."""
    rows = []
    for batch in batches:
        reference = np.array([median(one) for one in samples["off"][batch]])
        for name, by_batch in samples.items():
            mine = np.array([median(one) for one in by_batch[batch]])
            tax = 100 * (mine / reference - 1)
            error = tax.std(ddof=1) / len(tax) ** 0.5 if len(tax) > 1 else 0.0
            low, middle, high = np.percentile(tax, [25, 50, 75])
            row = {
                "batch": batch,
                "arm": name,
                "median_ms": round(float(np.median(mine)), 3),
                "tax_percent": round(float(middle), 2),
                "tax_quartiles": [round(float(low), 2), round(float(high), 2)],
                "tax_mean": round(float(tax.mean()), 2),
                "tax_standard_error": round(float(error), 2),
            }
            rows.append(row)
            print(
                f"batch {batch:3} {name:6} {row['median_ms']:8.2f} ms  tax {row['tax_percent']:6.2f} % "
                f"[{low:.2f} {high:.2f}]  mean {row['tax_mean']:.2f} +- {row['tax_standard_error']:.2f}"
            )
    return rows


def random_head(target: Path, folder: Path) -> Path:
    """An EAGLE-3 head for the target with random weights, in the checkpoint format that vLLM loads."""
    import torch
    from safetensors.torch import save_file

    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers, size = config["num_hidden_layers"], config.get("head_dim") or hidden // heads
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "target_hidden_size": hidden,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3],
    }
    torch.manual_seed(0)
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (DRAFT_VOCABULARY, hidden),
        "midlayer.self_attn.q_proj": (heads * size, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * size),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    weights = {f"{name}.weight": (0.02 * torch.randn(shape)).bfloat16() for name, shape in shapes.items()}
    for name in ("norm", *(f"midlayer.{n}_layernorm" for n in ("input", "post_attention")), "midlayer.hidden_norm"):
        weights[f"{name}.weight"] = torch.ones(hidden).bfloat16()
    stride = config["vocab_size"] // DRAFT_VOCABULARY
    weights["d2t"] = torch.arange(DRAFT_VOCABULARY) * (stride - 1)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


if __name__ == "__main__":  # vLLM starts processes
    main()
