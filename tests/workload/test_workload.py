import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_spec.config import ConfigError, WorkloadConfig
from rollout_spec.workload import build_workload
from rollout_spec.workload.workload import Group, Workload

Write = Callable[[str | bytes], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(content: str | bytes) -> str:
        path = tmp_path / "work.jsonl"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return to_file


def lengths_of(workload: Workload) -> list[int]:
    return [length for group in workload.groups for length in group.output_tokens or ()]


@pytest.mark.parametrize("name", ["heavy_tail", "clipped_math", "drain_curve", "natural"])
@given(seed=st.integers(0, 2**40), repeat=st.integers(0, 50))
def test_every_arm_of_a_repeat_gets_the_same(name: str, seed: int, repeat: int) -> None:
    config = WorkloadConfig(name=name, num_prompts=3, n=2)
    assert build_workload(config, seed, repeat) == build_workload(config, seed, repeat)


def test_each_repeat_and_each_seed_is_fresh() -> None:
    config = WorkloadConfig(num_prompts=16, n=4)
    runs = [build_workload(config, seed, repeat) for seed, repeat in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert len({group.prompt_id for run in runs for group in run.groups}) == 64
    assert len({tuple(lengths_of(run)) for run in runs}) == 4
    medians = [np.median(lengths_of(run)) for run in runs]
    assert medians == pytest.approx([40] * 4, rel=0.1)


def test_generated_groups() -> None:
    workload = build_workload(WorkloadConfig(num_prompts=5, n=3, scale=0.01, min_tokens=7), 2, 1)
    assert workload.name == "heavy_tail"
    assert workload.num_samples == 15
    assert all(group.n == 3 and group.answer is not None for group in workload.groups)
    assert all(group.output_tokens is not None and len(group.output_tokens) == 3 for group in workload.groups)
    assert all(type(length) is int for length in lengths_of(workload))
    assert min(lengths_of(workload)) >= 7
    assert workload.source["scale"] == 0.01
    assert workload.source["repeat"] == 1
    assert "2510.12633" in workload.source["lengths"]
    json.dumps(workload.source)


def test_natural_imposes_no_length_and_keeps_the_prompts() -> None:
    natural = build_workload(WorkloadConfig(name="natural"), 4, 0)
    imposed = build_workload(WorkloadConfig(name="clipped_math"), 4, 0)
    assert {group.output_tokens for group in natural.groups} == {None}
    assert [group.prompt for group in natural.groups] == [group.prompt for group in imposed.groups]


@pytest.mark.parametrize("name", ["heavytail", "", "prompts.json", "suffix"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"--workload '{name}'.*heavy_tail, clipped_math, drain_curve, natural.*jsonl"
    ):
        build_workload(WorkloadConfig(name=name), 0, 0)


def test_a_file_in_its_own_order(write: Write) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2\u2028= ?"}]
    rows: list[dict[str, Any]] = [
        {"prompt": "b"},
        {"prompt": chat, "n": 2, "output_tokens": 9, "answer": 4, "id": "four"},
        {"prompt": "a", "output_tokens": [3, 1, 2], "answer": "yes", "id": 7},
    ]
    content = "\n" + "\r\n \n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path = write(content)
    workload = build_workload(WorkloadConfig(name=path, n=3, num_prompts=99), 0, 0)
    assert workload.groups == (
        Group("line-2", "b", 3, None, None),
        Group("four", tuple(chat), 2, (9, 9), "4"),
        Group("7", "a", 3, (3, 1, 2), "yes"),
    )
    assert workload.num_samples == 8
    assert workload.source == {"file": path, "sha256": hashlib.sha256(content.encode()).hexdigest()}
    assert build_workload(WorkloadConfig(name=path, n=3), 0, 1).groups == workload.groups


def test_a_byte_order_mark_is_no_fault(write: Write) -> None:
    path = write(b'\xef\xbb\xbf{"prompt": "\xc3\xa9"}\n')
    assert build_workload(WorkloadConfig(name=path), 0, 0).groups[0].prompt == "\u00e9"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "x", "output_token": 3}', "unknown key 'output_token'; keys are prompt, n, output_tokens"),
        ('{"n": 2}', "has no 'prompt'"),
        ('{"prompt": ""}', "prompt '': must be a string that is not empty"),
        ('{"prompt": "  "}', "prompt '  '"),
        ('{"prompt": []}', "prompt []: must be a string or a list"),
        ('{"prompt": 5}', "prompt 5: must be a string or a list"),
        ('{"prompt": null}', "prompt None: must be"),
        ('{"prompt": ["x"]}', "prompt[0] 'x': must be an object with role and content"),
        (
            '{"prompt": [{"role": "user", "content": "x"}, {"role": "user"}]}',
            "prompt[1] {'role': 'user'}: must be an object",
        ),
        ('{"prompt": [{"role": "usr", "content": "x"}]}', "prompt[0].role 'usr': must be one of system"),
        ('{"prompt": [{"role": [], "content": "x"}]}', "prompt[0].role []: must be one of"),
        ('{"prompt": [{"role": "user", "content": " "}]}', "prompt[0].content ' ': must be a string that is not"),
        ('{"prompt": [{"role": "user", "content": 1}]}', "prompt[0].content 1: must be a string"),
        ('{"prompt": "\\ud800"}', "prompt has half a surrogate pair"),
        ('{"prompt": "x", "n": 0}', "n 0: must be an integer from 1"),
        ('{"prompt": "x", "n": true}', "n True: must be an integer"),
        ('{"prompt": "x", "n": 2.0}', "n 2.0: must be an integer"),
        ('{"prompt": "x", "n": 1000000000000}', "n 1000000000000: must be an integer from 1 to 100000"),
        ('{"prompt": "x", "output_tokens": 0}', "output_tokens 0: must be an integer"),
        ('{"prompt": "x", "output_tokens": null}', "output_tokens None: must be"),
        ('{"prompt": "x", "output_tokens": "9"}', "output_tokens '9': must be"),
        ('{"prompt": "x", "output_tokens": [1, -2, 3, 4]}', "output_tokens[1] -2: must be an integer from 1"),
        ('{"prompt": "x", "output_tokens": [1, 2]}', "output_tokens has 2 lengths for n=4 samples; must be one"),
        ('{"prompt": "x", "output_tokens": []}', "output_tokens has 0 lengths"),
        ('{"prompt": "x", "answer": []}', "answer []: must be a string or a number"),
        ('{"prompt": "x", "answer": false}', "answer False: must be"),
        ('{"prompt": "x", "id": ""}', "id '': must be a string that is not empty"),
        ('{"prompt": "x", "id": "one"}', "id 'one' is taken by an earlier line"),
        ('{"prompt": "x"', "is not valid JSON (Expecting ',' delimiter, column 15); each line must be one object"),
        ("prompt", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"prompt": "x", "n": ' + "9" * 5000 + "}", "is not valid JSON"),
        ("[1]", "is a JSON list; must be an object"),
        (b'{"prompt": "\xe9"}', "is not UTF-8 (byte 13 of the line); save the file as UTF-8"),
        ('{"prompt": "x"}'.encode("utf-16"), "is not UTF-8 (byte 1 of the line)"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_line_is_named(write: Write, line: str | bytes, problem: str) -> None:
    line = line if isinstance(line, bytes) else line.encode()
    path = write(b'{"prompt": "fine", "id": "one"}\n\n' + line + b"\n")
    with pytest.raises(ConfigError) as error:
        build_workload(WorkloadConfig(name=path), 0, 0)
    message = str(error.value)
    assert message.startswith(f"--workload {path}:3: ")
    assert problem in message
    assert len(message) < len(path) + 300


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_file(write: Write, content: str) -> None:
    path = write(content)
    with pytest.raises(ConfigError) as error:
        build_workload(WorkloadConfig(name=path), 0, 0)
    assert str(error.value).startswith(f"--workload {path}: has no prompts; give lines such as")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    for name, reason in (("gone.jsonl", "No such file"), ("folder.jsonl", "directory")):
        with pytest.raises(ConfigError, match=rf"--workload {tmp_path / name}: cannot be read \(.*{reason}"):
            build_workload(WorkloadConfig(name=str(tmp_path / name)), 0, 0)


@pytest.mark.parametrize("count", [1, 6, 7])
def test_mixed_asks_for_copying_every_other_time(count: int) -> None:
    groups = build_workload(WorkloadConfig(name="mixed", num_prompts=count, n=2), 3, 0).groups
    assert [group.prompt_id.startswith("copy-") for group in groups] == [i % 2 == 1 for i in range(count)]
    assert len({group.prompt_id for group in groups}) == count
    assert all(group.output_tokens is None for group in groups)


def test_some_prompts_copy_and_lengths_stay_imposed() -> None:
    plain = build_workload(WorkloadConfig(num_prompts=8, n=2), 3, 0).groups
    groups = build_workload(WorkloadConfig(num_prompts=8, n=2, copying=0.25), 3, 0).groups
    assert [group.prompt_id.startswith("copy-") for group in groups] == [i % 4 == 3 for i in range(8)]
    assert [group.output_tokens for group in groups] == [group.output_tokens for group in plain]


def test_copying_is_refused_for_prompts_of_a_file(write: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match=r"workload.copying 0.5: prompts of a file"):
        build_workload(WorkloadConfig(name=write('{"prompt": "2 + 2 = ?"}'), copying=0.5), 0, 0)
