"""What an EAGLE-3 head costs a decode step in which nothing is drafted.

    python experiments/k0_tax/run.py [--head DIR] [--batches 1,8,32] [--rounds 12] [--steps 40] [--threads N]

Three engines, each in a process of its own, take turns; only one runs at a time. off: no drafter. stock: the head is
loaded, K is 0, and vLLM runs the head at every step to keep its cache whole. ours: the head is deferred. In every round
each engine decodes the same prompts at each batch, in an order that rotates; a step counts when the whole batch
decodes. Two taxes over `off`, in percent: of medians, round by round; and of the quickest tenth of all steps, which a
busy machine disturbs less. With --threads 1 also of processor time, which it does not disturb at all (with more threads
that counts waiting). At the end, what the switch costs: the first steps with drafts after so many without. Without
--head the head has random weights, which cost the same. Writes every step's times.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rollout_spec import provenance
from rollout_spec.bench.arms import ArmSpec
from rollout_spec.bench.engine_process import EngineProcess
from rollout_spec.config import DrafterConfig, PolicyConfig, parse_config
from rollout_spec.control.policy import Decision
from rollout_spec.model import DEFAULT_MODEL, resolve

HERE = Path(__file__).resolve().parent
SCHEMA = "rollout-spec/k0-tax/1"
PROMPT_TOKENS = 32
# The first steps after the prompts are not counted: the batch is complete only then.
SKIP = 3
DRAFT_VOCABULARY = 4096
# Sequences that are alive, and tokens that each has missed beside its prompt.
SWITCHES = ((1, 400), (4, 200), (8, 100))

ARMS = ("off", "stock", "ours")
# Milliseconds (wall, processor) by arm, batch, round and step.
Samples = dict[str, dict[int, list[list[tuple[float, float]]]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--head", type=Path, help="a trained EAGLE-3 head; none: random weights")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, help="of OpenMP, an engine; none: vLLM's choice")
    parser.add_argument("--seconds", type=float, default=1e9, help="no new round after so many")
    parser.add_argument("--no-switch", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    if args.threads:
        os.environ |= {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    samples: Samples = {arm: {batch: [] for batch in batches} for arm in ARMS}
    switches: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        head = args.head or random_head(Path(resolve(args.model)), Path(folder) / "head")
        engines = start(args.model, head, max(batches), Path(folder))
        until = time.monotonic() + args.seconds
        try:
            for number in range(args.rounds):
                if number and time.monotonic() > until:
                    break
                measure(engines, samples, number, args.steps)
                write(args, samples, switches)
            for live, missed in () if args.no_switch else SWITCHES:
                for arm in ("stock", "ours"):
                    times = engines[arm].call(switch, live, missed)
                    switches.append({"arm": arm, "sequences": live, "missed": missed, "ms": times})
        finally:
            for engine in engines.values():
                engine.close()
    for row in write(args, samples, switches):
        print(
            f"batch {row['batch']:3} {row['arm']:6} {row['median_ms']:8.2f} ms, tax {row['tax_mean']:6.2f} "
            f"+- {row['tax_standard_error']:.2f} %; quickest tenth {row['quick_ms']:8.2f} ms, "
            f"tax {row['quick_tax']:6.2f} %; processor {row['processor_ms']:8.2f} ms, tax {row['processor_tax']:6.2f} %"
        )
    for row in switches:
        print(f"switch of {row['sequences']} after {row['missed']} steps, {row['arm']:6}: {row['ms']} ms")
    print(f"{len(samples['off'][batches[-1]])} rounds; {args.out}")


def write(args: argparse.Namespace, samples: Samples, switches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The result file, as far as it goes; returns its summary."""
    rows = [row for batch in samples["off"] for row in summary(samples, batch)]
    record = {
        "schema": SCHEMA,
        "provenance": provenance.collect(),
        "load_average": os.getloadavg(),
        "head": "random weights" if args.head is None else str(args.head),
        "prompt_tokens": PROMPT_TOKENS,
        "threads": args.threads,
        "summary": rows,
        "switch_ms": switches,  # the step that catches up, and two after it
        "step_ms": samples,  # [arm][batch][round][step]: wall, processor
    }
    args.out.write_text(json.dumps(record) + "\n")
    return rows


def start(model: str, head: Path, max_batch: int, folder: Path) -> dict[str, EngineProcess]:
    tree: dict[str, Any] = {
        "model": model,
        "engine": {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": max_batch, "kv_cache_gib": 1.0},
        "drafter": {"method": "eagle3", "model": str(head), "k_max": 3},
        "sampling": {"temperature": 0.0, "logprobs": False},  # the least a step can take
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
        engines[name].wait_ready()
    return engines


def measure(engines: dict[str, EngineProcess], samples: Samples, number: int, steps: int) -> None:
    """One round: at each batch, every engine in turn."""
    for turn, (batch, arm) in enumerate((batch, arm) for batch in samples["off"] for arm in rotated(number)):
        if not number and turn < len(ARMS):
            engines[arm].call(decode, batch, 5, number)
        samples[arm][batch].append(engines[arm].call(decode, batch, steps, number))


def rotated(number: int) -> list[str]:
    first = number % len(ARMS)
    return [*ARMS[first:], *ARMS[:first]]


def decode(worker: Any, log: Any, batch: int, steps: int, seed: int) -> list[tuple[float, float]]:
    """In an engine's process: milliseconds of `steps` steps in which `batch` sequences decode."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(100, 20_000, (batch, PROMPT_TOKENS)).tolist()
    length = steps + SKIP + 2
    sampling = worker.config.sampling.model_copy(update={"max_tokens": length})
    ids = worker.submit(prompts, 1, sampling, [[length]] * batch)
    times = []
    while worker.num_unfinished:
        wall, processor = time.perf_counter(), time.process_time()
        worker.step()
        ended = time.perf_counter(), time.process_time()
        times.append((round(1e3 * (ended[0] - wall), 3), round(1e3 * (ended[1] - processor), 3)))
    for request in ids:
        worker.take(request)
    log.take()
    return times[SKIP : SKIP + steps]


def switch(worker: Any, log: Any, sequences: int, missed: int) -> list[float]:
    """In an engine's process: milliseconds of the first and the second step with drafts after `missed` without."""
    loop = worker._engine.engine_core.engine_core.scheduler._loop
    k = [0] * missed + [3, 3, 3]

    class Script:
        def decide(self, view: Any) -> Decision:
            return Decision(k.pop(0) if k else 0)

        def observe(self, result: Any) -> None:
            pass

        def metrics(self) -> dict[str, float]:
            return {}

    policy, loop.policy = loop.policy, Script()
    times = decode(worker, log, sequences, missed + 20, 0)
    loop.policy = policy
    # Of the steps with drafts the first verifies none yet; from the second on they are alike.
    return [wall for wall, _ in times[missed - SKIP :][:3]]


def summary(samples: Samples, batch: int) -> list[dict[str, Any]]:
    """By arm: milliseconds a step at this batch, and percent over `off`."""
    rows = []
    steps = {name: np.array(by_batch[batch]) for name, by_batch in samples.items()}  # [rounds, steps, 2]
    medians = {name: np.median(times[..., 0], axis=1) for name, times in steps.items()}
    quick = {name: float(np.percentile(times[..., 0], 10)) for name, times in steps.items()}
    processor = {name: float(np.median(times[..., 1])) for name, times in steps.items()}
    for name in samples:
        tax = 100 * (medians[name] / medians["off"] - 1)
        error = tax.std(ddof=1) / len(tax) ** 0.5 if len(tax) > 1 else 0.0
        row = {
            "batch": batch,
            "arm": name,
            "median_ms": float(np.median(medians[name])),
            "tax_mean": float(tax.mean()),
            "tax_standard_error": float(error),
            "tax_rounds": [round(float(one), 2) for one in tax],
            "quick_ms": quick[name],
            "quick_tax": 100 * (quick[name] / quick["off"] - 1),
            "processor_ms": processor[name],
            "processor_tax": 100 * (processor[name] / processor["off"] - 1),
        }
        rows.append({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
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
