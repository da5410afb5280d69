"""Prompts in, output out, the report of it, and where files may be. No Ray."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rollout_spec_ray.drafts import DraftStore, Response
from rollout_spec_ray.failures import OutputFailed
from rollout_spec_ray.places import command_without_secrets, place, without_secrets
from rollout_spec_ray.prompts import Rejected, digest, read_prompts
from rollout_spec_ray.report import render, report
from rollout_spec_ray.rows import Label, as_table
from rollout_spec_ray.store import QUARANTINED, REJECTED, Store

from rollout_spec import cli
from rollout_spec.config import ConfigError
from rollout_spec.engine.requests import SpeculationStats
from rollout_spec.rollout.types import Rollout, Span


def read(path: Path, samples: int = 1) -> tuple[list[str], dict[int, str]]:
    """Ids that were accepted, and problems by row."""
    found = list(read_prompts(place(str(path), "--prompts"), samples))
    rejected = {one.row: one.problem for one in found if isinstance(one, Rejected)}
    return [one.prompt_id for one in found if not isinstance(one, Rejected)], rejected


def test_a_bad_row_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    lines = [
        '{"id": "a", "prompt": "2 + 2 = ?"}',
        '{"id": "b", "prompt": ',
        "",
        '{"id": "c", "prompt": [{"role": "user", "content": "hi"}], "n": 3}',
        '{"id": "a", "prompt": "again"}',
        '{"id": "d", "prompt": 7}',
        '{"id": "e", "prompt": [5, 6, -1]}',
        '{"id": "f", "prompt": [5, 6, 7], "n": 2, "output_tokens": [3, 4]}',
        '{"id": "g", "prompt": "x", "max_tokens": 3}',
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"id": "h", "prompt": "\xff"}\n')
    accepted, rejected = read(path)
    assert accepted == ["a", "c", "f"]
    assert set(rejected) == {2, 5, 6, 7, 9, 10}
    assert "not valid JSON" in rejected[2]
    assert rejected[5] == "id 'a' is taken by row 1; ids must differ"
    assert "prompt[2] -1: must be a token id" in rejected[7]
    assert "unknown key 'max_tokens'" in rejected[9]
    assert "not UTF-8" in rejected[10]


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "x"}\n'))
    assert read(path) == (["line-1"], {})


def test_parquet_takes_data_sets_with_other_columns(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    table = pa.table({"prompt": [chat, None, chat], "id": ["a", "b", "c"], "n": [4, 4, None], "data_source": ["x"] * 3})
    path = tmp_path / "prompts.parquet"
    pq.write_table(table, path)
    found = list(read_prompts(place(str(path), "--prompts"), 2))
    assert [(one.prompt_id, one.n) for one in found if not isinstance(one, Rejected)] == [("a", 4), ("c", 2)]
    assert [one for one in found if isinstance(one, Rejected)] == [
        Rejected(2, "has no 'prompt'; give a string, a list of {role, content} or token ids")
    ]


def test_a_damaged_row_group_costs_its_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    ids = [f"p{i}" for i in range(30)]
    prompts = [f"a long prompt that differs, number {i}, {'x' * i}" for i in range(30)]
    table = pa.table({"id": ids, "prompt": prompts})
    pq.write_table(table, path, row_group_size=10, compression="zstd", use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(1)
    content = bytearray(path.read_bytes())
    for i in range(column.data_page_offset + 40, column.data_page_offset + column.total_compressed_size):
        content[i] ^= 0xFF
    path.write_bytes(content)
    accepted, rejected = read(path)
    assert accepted == ids[:10] + ids[20:]
    assert set(rejected) == set(range(11, 21))
    assert "row group 1" in rejected[11]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.jsonl", None, "cannot be read"),
        ("prompts.parquet", b"PAR1 is not all it takes", "not a readable Parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_bad_input(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read(tmp_path / name)


def test_a_prompts_digest_is_of_what_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n{"id": "a", "prompt": "x", "n": 3}\n{"prompt": "y"}\n')
    first, again, other = [digest(one) for one in read_prompts(place(str(path), ""), 1)]  # type: ignore[arg-type]
    assert first == again != other
    assert -(2**63) <= other < 2**63


# -- places


@pytest.mark.parametrize("uri", ["s3://AKIA:hunter2@bucket/x", "s3://bucket/x?secret_key=hunter2", "gs://me@bucket/x"])
def test_a_uri_with_credentials_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        place(uri, "--out")
    assert "--out" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_what_is_named_like_a_secret_is_hidden() -> None:
    tree = {"engine": {"extra": {"hf_token": "hunter2", "tokenizer": "x"}}, "sampling": {"max_tokens": 3}}
    shown = without_secrets(tree)
    assert "hunter2" not in json.dumps(shown)
    assert shown["engine"]["extra"]["tokenizer"] == "x"
    assert shown["sampling"] == {"max_tokens": 3}
    command = ["job", "--set", "engine.extra.hf_token=hunter2", "--set", "sampling.max_tokens=3"]
    assert command_without_secrets(command)[2:] == ["engine.extra.hf_token=***", "--set", "sampling.max_tokens=3"]


# -- the store


def table(*keys: tuple[str, int], tokens: int = 4, attempt: int = 1, engine: int = 0, **options: Any) -> pa.Table:
    finished = []
    for prompt_id, sample in keys:
        ids = list(range(tokens))
        rollout = Rollout(
            prompt_index=0,
            sample_index=0,
            prompt_token_ids=[1, 2],
            token_ids=ids,
            logprobs=[-0.5] * tokens,
            finish_reason=options.get("reason", "stop"),
            policy_version=3,
            speculation=SpeculationStats(2, 4, 3),
            spans=(Span(0, 2, 0), Span(1, 3, 0)),
        )
        finished.append((Label(0, prompt_id, sample, 77, 100.0), rollout))
    return as_table(finished, engine, attempt, options.get("now", 110.0))


def store(path: Path, **options: Any) -> Store:
    return Store(place(str(path), "--out"), **options).open_for_writing()


def test_what_is_written_is_read_back_whole(tmp_path: Path) -> None:
    made = store(tmp_path / "out")
    made.append(table(("a", 0), ("a", 1)))
    made.flush()
    (row, _) = [row for part in made.read(table().column_names) for row in part.to_pylist()]
    assert (row["prompt_id"], row["sample_id"], row["token_ids"], row["logprobs"]) == ("a", 0, [0, 1, 2, 3], [-0.5] * 4)
    assert row["spans"][1] == {"start": 1, "policy_version": 3, "draft_version": 0}
    assert (row["started_at"], row["finished_at"], row["draft_tokens"], row["accepted_tokens"]) == (100, 110, 4, 3)


def test_a_part_is_written_when_rows_or_time_are_up(tmp_path: Path) -> None:
    made = store(tmp_path / "out", flush_rows=3, flush_seconds=1e9)
    for i in range(7):
        made.append(table(("a", i)))
        made.flush_if_due()
    assert [len(part) for part in made.read(["sample_id"])] == [3, 3]
    impatient = store(tmp_path / "other", flush_rows=100, flush_seconds=0)
    impatient.append(table(("a", 0)))
    impatient.flush_if_due()
    assert impatient.rows_written == 1


def test_a_second_job_in_the_directory_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    first = store(tmp_path / "out")
    with pytest.raises(ConfigError, match="another job writes there"):
        store(tmp_path / "out")
    first.append(table(("a", 0)))
    first.flush()
    first.close()
    assert store(tmp_path / "out").attempt == 2


def test_half_written_files_of_a_killed_driver_are_removed(tmp_path: Path) -> None:
    made = store(tmp_path / "out")
    half = tmp_path / "out" / "parts" / ".writing-0001-000000.parquet"
    half.write_bytes(b"PAR1")
    made.close()
    again = store(tmp_path / "out")
    assert not half.exists()
    assert list(again.read(["sample_id"])) == []


def test_a_folder_of_parts_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "parts").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="outside of it"):
        store(tmp_path / "out")


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    made = store(tmp_path / "out")
    made.append(table(("a", 0)))
    made.flush()
    (part,) = (tmp_path / "out" / "parts").glob("*.parquet")
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=rf"{part.name}: cannot be read .* move it away"):
        list(made.read(["sample_id"]))


FULL = """
import resource, sys
sys.path[:0] = {path!r}
import test_ray_files as tests
from pathlib import Path
made = tests.store(Path(sys.argv[1]))
made.append(tests.table(("a", 0)))
made.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
made.append(tests.table(*[(f"prompt {{i}} {{hash(str(i))}}", i) for i in range(3000)]))
try:
    made.flush()
except tests.OutputFailed as error:
    print(error)
"""


def test_a_full_disk_is_said_and_leaves_what_was_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", FULL.format(path=sys.path), str(out)], capture_output=True, text=True, check=True
    )
    assert "0001-000001.parquet cannot be written: there is no room left" in done.stdout
    assert [path.name for path in sorted((out / "parts").iterdir())] == ["0001-000000.parquet"]
    assert [part["prompt_id"].to_pylist() for part in Store(place(str(out), "")).read(["prompt_id"])] == [["a"]]
    assert issubclass(OutputFailed, RuntimeError)


# -- shared drafts


def test_responses_of_others_are_handed_out_and_the_oldest_policy_goes_first() -> None:
    drafts = DraftStore(max_tokens=10)
    drafts.add("a", [Response(7, [1, 2], [5, 5, 5], 2), Response(7, [1, 2], [6, 6, 6], 1), Response(8, [3], [4, 4], 2)])
    found = drafts.of([7, 8, 9], origin="b")
    assert found[7].prompt_token_ids.tolist() == [1, 2]
    assert [kept.token_ids.tolist() for kept in found[7].responses.values()] == [[5, 5, 5], [6, 6, 6]]
    assert set(found) == {7, 8}
    assert drafts.of([7, 8], origin="a") == {}
    drafts.add("b", [Response(8, [3], [9, 9, 9, 9], 2)])  # too much: the response of policy 1 goes
    assert drafts.tokens == 9
    assert [kept.token_ids.tolist() for kept in drafts.of([7], "c")[7].responses.values()] == [[5, 5, 5]]
    drafts.add("b", [Response(8, [3], [2] * 8, 3)])
    assert set(drafts.of([7, 8], "c")) == {8}
    assert drafts.tokens == 8


def test_rows_of_an_output_serve_as_drafts() -> None:
    drafts = DraftStore(max_tokens=100)
    drafts.add_table("earlier", table(("a", 0), ("a", 1), tokens=3))
    assert [kept.token_ids.tolist() for kept in drafts.of([77], "x")[77].responses.values()] == [[0, 1, 2]] * 2


# -- the report


def job(path: Path, sequences: int) -> Store:
    made = store(path)
    attempts = [{"attempt": 1, "outcome": "ended", "began_at": 99.0}]
    made.write_job({"samples_fingerprint": "x", "sequences": sequences, "attempts": attempts})
    return made


def test_the_report_of_a_complete_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = job(tmp_path / "out", 4)
    made.append(table(("a", 0), ("a", 1), tokens=10, now=105.0))
    made.append(table(("b", 0), tokens=20, engine=1, now=110.0))
    made.append(table(("b", 1), tokens=60, now=120.0))
    made.flush()
    result = report(made)
    assert result["complete"]
    assert result["sequences"] == {"asked": 4, "finished": 4, "missing": 0, "twice": 0, "refused_by_vllm": 0}
    assert result["tokens"]["total"] == 100
    (attempt,) = result["attempts"]
    assert (attempt["makespan_s"], attempt["tokens_per_second"]) == (20.0, 5.0)
    assert attempt["engines"]["1"] == {"sequences": 1, "tokens": 20, "last_finished_s": 10.0}
    assert result["speculation"]["acceptance_length"] == pytest.approx(1 + 12 / 8)
    made.close()
    assert cli.main(["report", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == render(result)
    assert cli.main(["report", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result


def test_what_is_missing_twice_or_set_aside_is_said(tmp_path: Path) -> None:
    made = job(tmp_path / "out", 4)
    made.append(table(("a", 0), ("a", 0)))
    made.append(table(("b", 0), reason="error"))
    made.flush()
    made.write_lines(REJECTED, [{"row": 9, "problem": "is not valid JSON"}])
    made.write_lines(QUARANTINED, [{"prompt_id": "c", "samples": [0], "problem": "exit code 1"}])
    result = report(made)
    made.close()
    assert not result["complete"]
    assert result["sequences"] == {"asked": 4, "finished": 2, "missing": 2, "twice": 1, "refused_by_vllm": 1}
    text = render(result)
    for said in ("2 of 4", "1 twice", "2 are missing", "row 9: is not valid JSON", "prompt 'c'", "1 were refused"):
        assert said in text
    assert cli.main(["report", str(tmp_path / "out")]) == 3


def test_a_directory_without_a_job_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "no output of a rollout job" in capsys.readouterr().err


def test_a_folder_that_is_made_while_it_is_looked_for_is_found(tmp_path: Path) -> None:
    """A mock of the moment: Arrow finds no folder, a job makes it, Arrow looks again whether there was none."""
    out = place(str(tmp_path), "--out")

    class MadeMeanwhile:
        calls = 0

        def get_file_info(self, asked: Any) -> Any:
            self.calls += 1
            if self.calls == 1:
                raise FileNotFoundError("Cannot list directory")
            return out.filesystem.get_file_info(asked)

    there = MadeMeanwhile()
    assert list(Store(replace(out, filesystem=there)).read(["prompt_id"])) == []
    assert there.calls == 2
