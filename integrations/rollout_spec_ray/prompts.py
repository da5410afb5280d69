"""Prompts from JSONL or Parquet. A row that can't be used is reported with its number and what is wrong; others go on.

A row has `prompt` (text, a list of {role, content}, or token ids) and may have `id`, `n`, `output_tokens` (imposed
lengths) and `answer`. In a JSONL file any other key is a slip and refused; of a Parquet file, where data sets carry
columns of their own, only these are read.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_spec.config import ConfigError
from rollout_spec.workload.workload import FIELDS, Group, Row
from rollout_spec_ray.places import Place

# Rows decoded at once.
BATCH = 256


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that is not rolled out."""

    row: int
    """From 1: the line of a JSONL file, the row of a Parquet file."""
    problem: str


def read_prompts(source: Place, samples: int) -> Iterator[Group | Rejected]:
    """Row by row; `samples` of those without `n`. Ids differ: a row whose id is taken is rejected.

    ConfigError for a file that can't be read at all.
    """
    rows: Callable[[Place], Iterator[tuple[int, bytes | Mapping[str, Any] | Rejected]]]
    rows = _parquet if source.path.endswith((".parquet", ".pq")) else _lines
    taken: dict[str, int] = {}
    for number, row in rows(source):
        if isinstance(row, Rejected):
            yield row
            continue
        where = Row(f"row {number}", number)
        try:
            group = where.group(where.parsed(row) if isinstance(row, bytes) else row, samples)
            first = taken.setdefault(group.prompt_id, number)
            if first != number:
                where.fail(f"id {group.prompt_id!r} is taken by row {first}; ids must differ")
        except ConfigError as error:
            yield Rejected(number, str(error).partition(": ")[2])
            continue
        yield group


def digest(group: Group) -> int:
    """64 bits (signed) of what is asked: the same for the same prompt and imposed lengths, whatever `id` and `n`."""
    content = json.dumps([group.prompt, group.output_tokens], sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big", signed=True)


def _lines(source: Place) -> Iterator[tuple[int, bytes]]:
    try:
        with io.BufferedReader(source.filesystem.open_input_stream(source.path)) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"--prompts {source.uri}: cannot be read ({error.strerror or error})") from error


def _parquet(source: Place) -> Iterator[tuple[int, Mapping[str, Any] | Rejected]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(source.filesystem.open_input_file(source.path))
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"--prompts {source.uri}: is not a readable Parquet file ({error})") from error
    columns = [name for name in FIELDS if name in file.schema_arrow.names]
    if "prompt" not in columns:
        raise ConfigError(
            f"--prompts {source.uri}: has no column 'prompt'; its columns are {', '.join(file.schema_arrow.names)}"
        )
    number = 0
    for part in range(file.num_row_groups):
        end = number + file.metadata.row_group(part).num_rows
        try:
            for batch in file.iter_batches(BATCH, row_groups=[part], columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {key: value for key, value in row.items() if value is not None}
        except (OSError, ValueError, pa.ArrowException) as error:  # damaged from here on; the next part may not be
            for lost in range(number + 1, end + 1):
                yield lost, Rejected(lost, f"row group {part} of the Parquet file cannot be read: {error}")
        number = end
