"""The simulator's step-time models against published figures; writes results.json and published.png beside this file.

.venv/bin/python experiments/published/run.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from scipy.optimize import least_squares

from rollout_spec import provenance
from rollout_spec.simulate import roofline
from rollout_spec.simulate.acceptance_curve import AcceptanceCurve
from rollout_spec.simulate.step_model import Analytic, Work, steady

HERE = Path(__file__).parent
PUBLISHED = json.loads((HERE / "published.json").read_text("utf-8"))


def lengths(survival: list[float], k_max: int) -> np.ndarray:
    """AL(K), K = 0 .. k_max."""
    return AcceptanceCurve.from_positions(survival, k_max).mean_length(np.ones(1), np.ones(1))


def dense_70b() -> dict[str, Any]:
    """70B with a 1B draft. Not stated there: the machine. Four H100, bf16, the draft on each GPU whole."""
    row = PUBLISHED["speedup_by_batch_70b_target_1b_draft"]
    model = roofline.step_model(
        roofline.device("H100"), roofline.model("llama-3-70b"), roofline.Drafter(1.24e9, sharded=False), gpus=4
    )
    batch = np.array(row["batch"], dtype=float)
    seconds = steady(model, batch, batch * 1000, 4)
    ours = lengths([0.7**j for j in range(1, 5)], 4)[4] * seconds[:, 0] / seconds[:, 4]
    return compare(row["batch"], row["speedup"], ours.tolist()) | {
        "assumed": "H100 x 4 (TP4), bf16, 1.24B draft not sharded, context 1000, reading and computing don't overlap, "
        f"{roofline.COMPUTE_EFFICIENCY:.0%} of peak compute (these two chosen with this table in view), "
        f"{roofline.BANDWIDTH_EFFICIENCY:.0%} of bandwidth",
        "otherwise": "with 60 % of peak, or with reading and computing overlapped, the middle of the table (batch 16 "
        "to 128) comes out 15 to 30 % higher than published",
    }


def vllm_profile() -> dict[str, Any]:
    """Fitted to the eight step times given (batch 1 and 256); batch 16 and 64 are predicted."""
    row = PUBLISHED["vllm_dynamic_sd_profile"]
    points = [(int(b), int(k[1:]), ms) for b, times in row["step_ms"].items() for k, ms in times.items()]

    def build(x: np.ndarray) -> Analytic:
        weights, token, kv, draft_pass, draft_token, verify = np.exp(x)
        return Analytic(
            fixed=0.5,  # ms: host; it cannot be told from the weights
            weights=weights,
            token=token,
            kv_token=kv,
            draft_pass=draft_pass,
            draft_token=draft_token,
            verify_fixed=verify,
            sharpness=4.0,
        )

    def ms(model: Analytic, b: float, k: int) -> float:
        return float(model.seconds(Work(b, b * k, b * 1000, k, b)))

    start = np.log([6.0, 0.03, 5e-6, 0.7, 1e-3, 0.1])
    fit = least_squares(lambda x: [np.log(ms(build(x), b, k) / t) for b, k, t in points], start)
    model = build(fit.x)
    al = lengths(row["per_position_acceptance"], 5)
    cells, stated, ours = [], [], []
    for batch, speedups in row["speedup_over_off"].items():
        for k, speedup in speedups.items():
            given = row["step_ms"].get(batch)
            b, kk = int(batch), int(k[1:])
            ratio = given["K0"] / given[k] if given else ms(model, b, 0) / ms(model, b, kk)
            cells.append(f"{batch}/{k}")
            stated.append(speedup)
            ours.append(float(al[kk] * ratio))
    fitted = {f"{b}/K{k}": [t, round(ms(model, b, k), 2)] for b, k, t in points}
    return compare(cells, stated, ours) | {
        "assumed": "batch 1 and 256 from the step times given; batch 16 and 64 from a step model fitted to those eight "
        "(host 0.5 ms, context 1000, reading and computing overlap)",
        "step_ms_given_and_fitted": fitted,
    }


def command_a() -> dict[str, Any]:
    """Command A: neither machine nor acceptance nor the cost of a speculating step is stated there."""
    row = PUBLISHED["dynamic_vs_fixed_dense"]["rows"]
    survival = PUBLISHED["vllm_dynamic_sd_profile"]["per_position_acceptance"][:3]
    batch = np.array([r["batch"] for r in row], dtype=float)
    stated = [r[key] for r in row for key in ("dynamic_over_fixed", "dynamic_over_off")]
    al = lengths(survival, 3)

    def figures(device: str, weight_bytes: float, overhead: float) -> tuple[list[float], list[int]]:
        model = roofline.step_model(
            roofline.device(device, weight_bytes),
            roofline.model("command-a"),
            roofline.Drafter(2.5e9),
            gpus=4,
            weight_bytes=weight_bytes,
        )
        model = replace(model, verify_fixed=model.verify_fixed + overhead)
        seconds = steady(model, batch, batch * 1000, 3)
        gain = al / seconds * seconds[:, :1]
        best = gain.max(axis=1)
        return [v for i in range(len(row)) for v in (best[i] / gain[i, 3], best[i])], gain.argmax(axis=1).tolist()

    def points(ours: list[float]) -> list[float]:
        return [round(100 * (x - y), 1) for x, y in zip(ours, stated, strict=True)]

    ours, best_k = figures("H200", 1.0, 2e-3)
    tried = {
        f"{device}, {'fp8' if size == 1 else 'bf16'}, {1e3 * more:.0f} ms": points(figures(device, size, more)[0])
        for device in ("H100", "H200")
        for size in (1.0, 2.0)
        for more in (0.0, 2e-3, 4e-3)
    }
    cells = [f"{r['batch']} {key}" for r in row for key in ("over fixed K=3", "over off")]
    return compare(cells, stated, ours) | {
        "points_off": points(ours),
        "best_k": best_k,
        "assumed": "H200 x 4 (TP4), fp8, EAGLE head of one layer and the output matrix (2.5B), context 1000, "
        "acceptance as in vLLM's profile, efficiencies as for 70B, 2 ms a step beyond the roofline (vLLM's "
        "profile shows such a jump from K=0 to K=1). Machine and overhead were chosen among those in `tried`",
        "otherwise": "from the roofline alone (0 ms) speculation comes out 6 to 10 points too good over off: the input "
        "it takes is the measured cost of a speculating step at batch 128 and 256, which the source does not give",
        "tried": tried,
    }


def compare(cells: list[Any], stated: list[float], ours: list[float]) -> dict[str, Any]:
    off = [a / b - 1 for a, b in zip(ours, stated, strict=True)]
    return {
        "cells": cells,
        "stated": stated,
        "ours": [round(v, 3) for v in ours],
        "off": [round(v, 3) for v in off],
        "worst": max(map(abs, off)),
    }


def plot(results: dict[str, Any], path: Path) -> None:
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for axes, (name, part) in zip(panels, results["checks"].items(), strict=True):
        x = np.arange(len(part["cells"]))
        axes.plot(x, part["stated"], "o", color="#222222", label="published")
        axes.plot(x, part["ours"], "x", color="#0072B2", ms=8, label="ours")
        axes.set_xticks(x, [str(c).replace(" ", "\n", 1) for c in part["cells"]], rotation=90 if len(x) > 6 else 0)
        axes.axhline(1.0, color="#dddddd", lw=0.8)
        axes.set_title(f"{name}: worst {100 * part['worst']:.0f} %", loc="left", weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    panels[0].set_ylabel("speed-up")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    checks = {"70B by batch": dense_70b(), "vLLM profile": vllm_profile(), "Command A": command_a()}
    results = {"schema": 1, "provenance": provenance.collect(), "checks": checks}
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, HERE / "published.png")
    print(json.dumps(checks, indent=1))


if __name__ == "__main__":
    main()
