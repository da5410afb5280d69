from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic import ARMS, PROVENANCE, WORKLOAD, flat_run, make_results, make_run, timed

from rollout_spec.bench import plots, report, table, verdict
from rollout_spec.bench.results import Ratio, Results

HOSTILE = "<script>alert(1)</script>\" onload='x' &amp; $\\frac{ {{ 7*7 }} | `x`"


class _Loads(HTMLParser):
    """What a browser would fetch or run, and whether tags balance."""

    VOID = ("meta", "br", "use", "path", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str | None]] = []
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            local = name.endswith("href") and str(value).startswith("#")
            if name in ("src", "srcset", "data", "action", "poster") or (name.endswith("href") and not local):
                self.found.append((tag, name, value))
            if name.startswith("on"):
                self.found.append((tag, name, value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def parse(page: str) -> _Loads:
    parser = _Loads()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_report_is_one_self_contained_page(tmp_path: Path) -> None:
    page = report.write_report(make_results(), tmp_path).read_text()
    found = parse(page)
    assert found.found == []
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(found.tags)
    assert not re.search(r"@import|url\((?!#|\"#|'#)|https?://", page)
    assert found.tags.count("svg") == 6
    pngs = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pngs == ["makespan.png", "speedup_by_live_batch.png", "timeline.png"]


def test_svg_names_do_not_clash_between_pictures() -> None:
    seen: set[str] = set()
    for plot in plots.draw_all(make_results(repeats=1)):
        for svg in (plot.wide_svg, plot.narrow_svg):
            clips = set(re.findall(r'clipPath id="([^"]+)"', svg))
            assert clips
            assert not clips & seen
            seen |= clips


def test_hostile_names_are_inert(tmp_path: Path) -> None:
    results = Results(
        {**PROVENANCE, "command": [HOSTILE], "config": {"model": HOSTILE}}, {**WORKLOAD, "model": HOSTILE}
    )
    for name in ("off", HOSTILE):
        results.add_arm(name, "off" if name == "off" else "goodput", HOSTILE)
        for repeat in range(3):
            results.add_run(name, make_run(ARMS["off" if name == "off" else "goodput"][2], repeat))
    page = report.write_report(results, tmp_path).read_text()
    found = parse(page)
    assert "script" not in found.tags
    assert found.found == []
    assert "<script" not in page
    assert "{{ 7*7 }}" in page
    markdown = report.summary_markdown(results)
    assert "<script" not in markdown
    columns = [len(re.findall(r"(?<!\\)\|", line)) for line in markdown.splitlines() if line.startswith("|")]
    assert set(columns) == {len(table.HEADERS) + 1}


@pytest.mark.parametrize(
    ("goodput", "kind", "said"),
    [
        (
            [5.0, 6.0, 5.5],
            "faster",
            "goodput is faster than off (no speculation): 1.82x its speed (1.67 to 2.00 over 3 p",
        ),
        (
            [20.0, 12.5, 12.5],
            "slower",
            "0.80x its speed (0.50 to 0.80 over 3 paired runs), so the rollout takes 25 % longer.",
        ),
        (
            [9.0, 8.0, 10.5],
            "undecided",
            "No difference shown between goodput and off (no speculation): 1.11x its speed",
        ),
        ([9.0, 8.0, 9.97], "undecided", "No difference shown"),
        ([5.0, 5.0], "undecided", "2.00x its speed (2.00 to 2.00 over 2 paired runs), and it takes 3 pairs"),
        ([5.0], "undecided", "2.00x its speed in the only pair of runs"),
    ],
)
def test_verdict(goodput: list[float], kind: str, said: str) -> None:
    results = timed(off=[10.0, 10.0, 10.0], goodput=goodput)
    [found] = verdict.verdicts(results)
    assert found.kind == kind
    assert said in found.sentence
    assert ("faster" in found.sentence) == (kind == "faster")
    assert found.sentence in report.render_html(results, [])


def test_a_range_that_reads_as_one_claims_nothing() -> None:
    assert verdict.judge(Ratio(median=1.01, low=1.004, high=1.02), 3) == "undecided"
    assert verdict.judge(Ratio(median=1.01, low=1.006, high=1.02), 3) == "faster"
    assert verdict.judge(Ratio(median=0.99, low=0.98, high=0.996), 3) == "undecided"


def test_ours_is_held_against_off_the_best_fixed_and_the_table() -> None:
    found = verdict.verdicts(make_results())
    assert [v.base for v in found] == ["off", "fixed:3", "table"]
    assert "the best of 2 fixed K" in found[1].sentence


def test_a_rival_with_another_drafter_is_named_as_such() -> None:
    results = timed(off=[3.0] * 3, goodput=[1.0] * 3)
    results.add_arm("table@suffix", "table", "suffix")
    results.add_run("table@suffix", flat_run(0, 2.0))
    assert "but with drafter suffix" in verdict.verdicts(results)[1].sentence


def test_without_ours_each_arm_is_held_against_off() -> None:
    found = verdict.verdicts(timed(off=[2.0] * 3, table=[1.0] * 3))
    assert [(v.arm, v.base, v.kind) for v in found] == [("table", "off", "faster")]


@pytest.mark.parametrize("name", ["off", "goodput"])
def test_one_arm_only(tmp_path: Path, name: str) -> None:
    results = make_results([name], repeats=1)
    page = report.write_report(results, tmp_path).read_text()
    assert f"Only {name} was run, so there is nothing to compare it with." in page
    assert parse(page).tags.count("svg") == 4
    assert "It was run one way" in report.summary_markdown(results)


def test_nothing_run_yet(tmp_path: Path) -> None:
    results = Results({}, {})
    assert "No run has finished yet" in report.write_report(results, tmp_path).read_text()
    results.add_arm("goodput", "goodput", "ngram")
    assert "No run has finished yet" in report.write_report(results, tmp_path).read_text()
    assert table.render(results).splitlines()[2].split() == ["goodput", "ngram"] + ["-"] * 6


def test_runs_without_drafts_or_timeline(tmp_path: Path) -> None:
    results = timed(off=[2.0, 2.0, 2.0], goodput=[2.0, 2.0, 2.0])
    assert parse(report.write_report(results, tmp_path).read_text()).tags.count("svg") == 2
    assert table.rows(results)[1][-3:] == ("-", "0", "-")


def test_table_fits_110_columns() -> None:
    results = make_results(repeats=1, scale={"off": 500.0})
    results.add_arm("goodput:with-a-very-long-argument@draft_model_of_some_name", "goodput", "draft_model_of_some_name")
    lines = table.render(results).splitlines()
    assert max(map(len, lines)) <= 110
    assert [line.split()[0] for line in lines[2:7]] == list(ARMS)
    assert "1 (reference)" in lines[2]


def test_mean_k_counts_speculating_steps_only() -> None:
    runs = [flat_run(0, 1.0).model_copy(update={"k_histogram": {0: 90, 2: 1, 4: 3}})]
    assert table.mean_k(runs) == 3.5


def test_k_that_flickers_is_drawn_as_means() -> None:
    calls = iter(range(10**6))
    results = Results(PROVENANCE, WORKLOAD)
    results.add_arm("goodput", "goodput", "ngram")
    results.add_run("goodput", make_run(lambda live: next(calls) % 4))
    [timeline, _] = plots.draw_all(results)
    assert "mean over short spans" in timeline.caption
    assert "K, mean over" in timeline.wide_svg
