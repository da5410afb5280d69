"""The benchmark's result for a reader who wasn't there: one self-contained HTML page, or Markdown."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rollout_spec.bench import plots, table, verdict
from rollout_spec.bench.results import Arm, Results, Run


def write_report(results: Results, out_dir: str | Path) -> Path:
    """Write report.html and the plots as PNG files; returns the path of the page."""
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = plots.draw_all(results)
    plots.save_pngs(drawn, folder)
    page = folder / "report.html"
    page.write_text(render_html(results, drawn), encoding="utf-8")
    return page


def render_html(results: Results, drawn: list[plots.Plot]) -> str:
    templates = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(
        loader=templates, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found = verdict.verdicts(results)
    names = {arm.name for arm in verdict.ours(results)}
    return environment.get_template("report.html.j2").render(
        model=str(results.workload.get("model") or "a rollout"),
        what=what_was_run(results),
        verdicts=found,
        no_verdict="" if found else verdict.no_verdict(results),
        plots=[(plot.caption, Markup(plot.wide_svg), Markup(plot.narrow_svg)) for plot in drawn],
        headers=[header.replace("-", "\N{NON-BREAKING HYPHEN}") for header in table.HEADERS],
        left=table.LEFT,
        rows=[(row, arm.name in names) for row, arm in zip(table.rows(results), results.arms, strict=True)],
        policies=[
            (kind, verdict.POLICIES.get(kind, kind)) for kind in dict.fromkeys(map(verdict.kind_of, results.arms))
        ],
        raw=[(arm.name, _raw(arm)) for arm in results.arms if arm.runs],
        least_pairs=verdict.LEAST_PAIRS,
        provenance=list(_flatten({k: v for k, v in results.provenance.items() if k != "config"})),
        config=json.dumps(results.provenance.get("config", {}), indent=2),
    )


def summary_markdown(results: Results) -> str:
    """For a README: what was run, the verdicts, the table."""
    found = [verdict_.sentence for verdict_ in verdict.verdicts(results)] or [verdict.no_verdict(results)]
    lines = [_markdown(what_was_run(results)), "", *(f"- {_markdown(sentence)}" for sentence in found), ""]
    lines.append("| " + " | ".join(table.HEADERS) + " |")
    lines.append("|" + "|".join(" --- " if i < table.LEFT else " ---: " for i in range(len(table.HEADERS))) + "|")
    lines += ["| " + " | ".join(map(_markdown, row)) + " |" for row in table.rows(results)]
    return "\n".join(lines) + "\n"


def what_was_run(results: Results) -> str:
    """One paragraph from the data; what the data doesn't hold is left out."""
    work, device = results.workload, _mapping(results.provenance.get("device"))
    versions = _mapping(results.provenance.get("versions"))
    text = f"{work['model']} generated" if work.get("model") else "The engine generated"
    if (prompts := work.get("num_prompts")) and (n := work.get("n")):
        each = "one response" if n == 1 else f"a group of {n} responses"
        text += f" {each} to each of {prompts} prompts ({prompts * n} sequences)"
    else:
        text += " one rollout"
    if work.get("name"):
        text += f" with the lengths of workload {work['name']}"
    if runs := [run for arm in results.arms for run in arm.runs]:
        tokens = sorted(run.output_tokens for run in runs)
        span = f"{tokens[0]:,}" if tokens[0] == tokens[-1] else f"{tokens[0]:,} to {tokens[-1]:,}"
        text += f", {span} output tokens a run"
    if work.get("max_num_seqs"):
        text += f", at most {work['max_num_seqs']} sequences at a time"
    if work.get("temperature") is not None:
        text += f", at temperature {work['temperature']}"
    if versions.get("vllm"):
        text += f", on vLLM {versions['vllm']}"
    if device:
        where = ", ".join(device.get("gpus") or []) or device.get("cpu") or "an unnamed processor"
        text += f" on {where}"
        text += f" ({device['cores']} CPU cores)" if device.get("cores") else ""
    counts = sorted({len(arm.runs) for arm in results.arms})
    repeats = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]]))) if counts else "0"
    repeats += " time" if repeats == "1" else " times"
    names = ", ".join(arm.name for arm in results.arms)
    ways = "one way" if len(results.arms) == 1 else f"{len(results.arms)} ways"
    return table.one_line(f"{text}. It was run {ways} ({names}), {repeats} each.")


def _raw(arm: Arm) -> list[tuple[str, list[str]]]:
    """Each figure with its values, run by run."""
    columns = [_figures(run) for run in arm.runs]
    return [(name, [column[name] for column in columns]) for name in columns[0]]


def _figures(run: Run) -> dict[str, str]:
    """Everything a run recorded but its timeline, which is in results.json."""
    rates = ["-" if rate is None else f"{rate:.3f}" for rate in run.acceptance_per_position]
    length = "-" if run.acceptance_length is None else f"{run.acceptance_length:.3f}"
    buckets = [
        f"{b.lo if b.lo == b.hi else f'{b.lo}-{b.hi}'}: {b.seconds:.3f} s, {b.output_tokens:,} tokens"
        for b in sorted(run.by_live_batch, key=lambda bucket: bucket.lo)
    ]
    return {
        "repeat": str(run.repeat),
        "started": run.started_at,
        "makespan": f"{run.makespan_s:.4f} s",
        "output tokens": f"{run.output_tokens:,}",
        "engine steps": f"{run.steps:,}",
        "draft tokens": f"{run.draft_tokens:,}",
        "accepted": f"{run.accepted_tokens:,}",
        "acceptance length": length,
        "acceptance by position": ", ".join(rates) or "-",
        "steps by K": ", ".join(f"K={k}: {count:,}" for k, count in sorted(run.k_histogram.items())) or "-",
        "by live sequences": "\n".join(buckets) or "-",
    }


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found += _flatten(value, f"{prefix}{key}.")
        else:
            text = " ".join(map(str, value)) if isinstance(value, list) else "-" if value is None else str(value)
            found.append((f"{prefix}{key}", text))
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _markdown(text: str) -> str:
    """Inert in Markdown: no HTML, no table cell, emphasis, code or link of its own."""
    text = html.escape(table.one_line(text), quote=False)
    for char in "\\`*_[]|#":
        text = text.replace(char, "\\" + char)
    return text
