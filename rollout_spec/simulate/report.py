"""What a simulation found, as a table, a file and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def render(results: dict[str, Any]) -> str:
    rows = results["policies"]
    off = next((row["seconds"] for row in rows if row["policy"] == "off"), None)
    lines = [f"{'policy':<14}{'seconds':>10}{'vs off':>9}{'tokens/s':>12}{'mean K':>8}"]
    for row in sorted(rows, key=lambda row: -row["seconds"]):
        gain = f"{off / row['seconds']:.3f}x" if off else "-"
        steps = row["steps_by_bucket_and_k"]
        total = sum(map(sum, steps))
        mean_k = sum(k * count for counts in steps for k, count in enumerate(counts)) / max(total, 1)
        rate = row["tokens"] / sum(row["rollout_seconds"])
        lines.append(f"{row['policy']:<14}{row['seconds']:>10.1f}{gain:>9}{rate:>12.0f}{mean_k:>8.2f}")
    lines += ["", "steady batch    best K   speed-up   K=0 step"]
    for row in results["by_batch"]:
        lines.append(f"{row['batch']:>12}{row['k']:>10}{row['speedup']:>10.2f}x{row['off_ms']:>8.1f} ms")
    if results["better_drafters"]:
        lines += ["", "one draft accepted with   off      ours    speed-up"]
        for row in results["better_drafters"]:
            gain = row["off"] / row["goodput"]
            lines.append(f"{row['rate']:>12.2f}{row['off']:>18.1f}{row['goodput']:>10.1f}{gain:>10.2f}x")
    return "\n".join(lines)


def write(results: dict[str, Any], folder: Path) -> Path:
    """results.json, and simulation.png where matplotlib is installed; the path of the former."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    try:
        import matplotlib as mpl
    except ImportError:
        return path
    mpl.use("Agg")
    _plot(results, folder / "simulation.png")
    return path


def _plot(results: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    rows = sorted(results["policies"], key=lambda row: -row["seconds"])
    colours = ["#0072B2" if row["policy"] in ("goodput", "budget") else "#999999" for row in rows]
    left.barh([row["policy"] for row in rows], [row["seconds"] for row in rows], color=colours)
    left.set_xlabel("seconds, simulated")
    left.set_title("Total time", loc="left", weight="bold")
    table = results["by_batch"]
    middle.plot([row["batch"] for row in table], [row["speedup"] for row in table], "o-", color="#0072B2")
    for row in table:
        middle.annotate(f"K={row['k']}", (row["batch"], row["speedup"]), textcoords="offset points", xytext=(0, 6))
    middle.set_xscale("log", base=2)
    middle.set_xlabel("sequences in the batch")
    middle.set_ylabel("speed-up of the best K")
    middle.set_title("Where speculation pays", loc="left", weight="bold")
    for row in results["policies"]:
        if row["policy"] in ("off", "goodput"):
            line = row["timeline"]
            colour = "#0072B2" if row["policy"] == "goodput" else "#999999"
            right.plot([p[0] for p in line], [p[1] for p in line], color=colour, label=row["policy"])
            if row["policy"] == "goodput":
                twin = right.twinx()
                twin.step([p[0] for p in line], [p[2] for p in line], color="#D55E00", lw=0.6, alpha=0.6)
                twin.set_ylabel("K", color="#D55E00")
    right.set_xlabel("seconds, simulated")
    right.set_ylabel("sequences, replica 0")
    right.set_title("The last rollout", loc="left", weight="bold")
    right.legend(frameon=False)
    for axes in (left, middle, right):
        axes.spines[["top"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
