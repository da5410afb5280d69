"""A profile in the terminal and as a picture."""

from __future__ import annotations

from pathlib import Path

from rollout_spec.profile import shape
from rollout_spec.profile.cell import Cell
from rollout_spec.profile.knee import knee
from rollout_spec.profile.record import Profile, best_k, by_context


def render(profile: Profile) -> str:
    times = profile.step_times()
    length, drafts = profile.acceptance.length(), profile.acceptance.drafts()
    known = len(length) > 1
    lines = [f"{key:<14}{value}" for key, value in profile.engine.items()]
    lines += [
        "",
        f"{'batch':>6}{'K=0 ms':>9}{'no drafter':>18}{'best K':>8}{'speed-up':>10}   parts of the best K's step, ms",
    ]
    best = []
    for batch in times.batch:
        k = best_k(times, length, drafts, batch, times.context[0]) if known else 0
        best.append(k)
        base = times.at(batch, times.context[0])[0]
        off = profile.off.get(batch)
        tax = f"{1e3 * off:.1f} ({100 * (base / off - 1):+.1f} %)" if off else "-"
        gain = length[k] * base / times.expected(batch, drafts, times.context[0])[k] if known else 1.0
        lines.append(f"{batch:>6}{1e3 * base:>9.1f}{tax:>18}{k:>8}{gain:>9.2f}x   {_parts(profile.cells, batch, k)}")
    corner = knee(list(by_context(profile.cells)[0].values()))
    lines.append("")
    if corner is not None and corner.tokens < 2 * min(cell.batch for cell in profile.cells):
        lines.append(
            f"no knee: a step takes about {1e3 * corner.flat:.1f} ms, and {1e6 * corner.per_token:.0f} us more for "
            "each token from the first on"
        )
    elif corner is not None:
        lines.append(
            f"knee: up to {corner.tokens:.0f} tokens a step takes about {1e3 * corner.flat:.1f} ms, "
            f"beyond it {1e6 * corner.per_token:.0f} us a token"
        )
    if known:
        lines.append(f"best K over the batch: {shape.describe(best)}")
        values = ", ".join(f"{p:.2f}" for p in profile.acceptance.accepted)
        lines.append(f"P(first j drafts accepted): {values} ({profile.acceptance.source})")
        lines.append(f"vLLM num_speculative_tokens_per_batch_size: {[list(row) for row in profile.table()]}")
        lines.append(f"TensorRT-LLM draft_len_schedule: {profile.draft_len_schedule()}")
    else:
        lines.append(f"acceptance: {profile.acceptance.source}; so no best K")
    lines.append(f"a prompt token takes {1e6 * profile.prefill_token_seconds:.0f} us")
    return "\n".join(lines)


def _parts(cells: list[Cell], batch: int, k: int) -> str:
    near = sorted((c for c in cells if c.batch == batch), key=lambda c: (abs(c.k - k), c.context))
    if not near:
        return ""
    cell = near[0]
    parts = [f"host {1e3 * cell.host_seconds:.1f}"]
    if cell.draft_seconds is not None:
        parts.append(f"draft {1e3 * cell.draft_seconds:.1f}")
    if cell.verify_seconds is not None:
        parts.append(f"verify {1e3 * cell.verify_seconds:.1f}")
    return ", ".join(parts) + ("" if cell.k == k else f" (of K={cell.k})")


def plot(profile: Profile, path: Path) -> Path | None:
    """Step time over tokens with the knee; step time over batch by K; best K and speed-up. None without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    times = profile.step_times()
    length, drafts = profile.acceptance.length(), profile.acceptance.drafts()
    near = sorted(by_context(profile.cells)[0].values(), key=lambda cell: (cell.batch, cell.k))
    ks = sorted({cell.k for cell in near})
    colours = {k: plt.get_cmap("viridis")(0.9 * i / max(len(ks) - 1, 1)) for i, k in enumerate(ks)}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for k in ks:
        some = [cell for cell in near if cell.k == k]
        tokens = [cell.batch * (k + 1) for cell in some]
        left.plot(tokens, [1e3 * c.seconds for c in some], "o", color=colours[k], label=f"K={k}")
        middle.plot([c.batch for c in some], [1e3 * c.seconds for c in some], "o-", color=colours[k], label=f"K={k}")
    if profile.off:
        middle.plot(list(profile.off), [1e3 * s for s in profile.off.values()], "k--", lw=1, label="no drafter")
    corner = knee(near)
    if corner is not None:
        left.axvline(corner.tokens, color="#D55E00", lw=1)
        left.annotate(f" knee: {corner.tokens:.0f}", (corner.tokens, left.get_ylim()[1]), color="#D55E00", va="top")
    left.set_xlabel("tokens verified in the step")
    left.set_title("Step time over tokens", loc="left", weight="bold")
    middle.set_title("Step time over batch", loc="left", weight="bold")
    for axes in (left, middle):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylabel("ms")
        axes.legend(frameon=False, fontsize=8)
    middle.set_xlabel("sequences that decode")
    if len(length) > 1:
        batches = range(1, profile.max_num_seqs + 1)
        best = [best_k(times, length, drafts, b, times.context[0]) for b in batches]
        gains = []
        for batch, k in zip(batches, best, strict=True):
            seconds = times.expected(batch, drafts, times.context[0])
            gains.append(length[k] * seconds[0] / seconds[k])
        right.plot(batches, gains, color="#0072B2")
        right.set_ylabel("expected speed-up over K=0", color="#0072B2")
        twin = right.twinx()
        twin.step(batches, best, where="mid", color="#D55E00")
        twin.set_ylabel("best K", color="#D55E00")
        twin.set_ylim(bottom=0)
        right.set_xscale("log", base=2)
    right.set_xlabel("sequences that decode")
    right.set_title("What it comes to", loc="left", weight="bold")
    for axes in (left, middle, right):
        axes.spines[["top"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
