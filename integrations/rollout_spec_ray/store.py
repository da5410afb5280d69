"""The output directory: part files of finished sequences, written by one driver, each whole or not at all.

    DIR/parts/0001-000000.parquet     attempt 1, its first part (columns: `rows.SCHEMA`)
    DIR/job.json                      what was asked for, every attempt, where it came from
    DIR/rejected.jsonl                rows that could not be used
    DIR/quarantined.jsonl             prompts that killed their engine again and again

File names are made of numbers only, never of what a prompt or a configuration says. A part is written beside its name,
put to disk and renamed. A second driver on the same directory is refused where the filesystem has locks (local ones).
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType

from rollout_spec.config import ConfigError
from rollout_spec_ray.failures import OutputFailed
from rollout_spec_ray.places import Place
from rollout_spec_ray.rows import SCHEMA

PARTS = "parts"
JOB, REJECTED, QUARANTINED = "job.json", "rejected.jsonl", "quarantined.jsonl"
JOB_SCHEMA = "rollout-spec/ray-job/1"
PART = re.compile(r"(?P<attempt>\d{4,})-(?P<number>\d{6,})\.parquet")
UNFINISHED = ".writing-"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Store:
    """Not thread-safe. Opened for reading it takes no lock and writes nothing."""

    def __init__(self, place: Place, *, flush_rows: int = 512, flush_seconds: float = 5.0) -> None:
        self.place = place
        self.rows_written = 0  # by this driver
        self.attempt = 0
        self._fs = place.filesystem
        self._flush_rows, self._flush_seconds = flush_rows, flush_seconds
        self._buffer: list[pa.Table] = []
        self._buffered, self._since = 0, 0.0
        self._number = 0
        self._lock: Any = None

    def open_for_writing(self) -> Self:
        """Make the directory, take its lock, remove what a killed driver left half-written.

        ConfigError if it can't be made, leads outside itself or is another driver's at the moment.
        """
        where = f"--out {self.place.uri}"
        try:
            self._fs.create_dir(self._path(PARTS), recursive=True)
        except OSError as error:
            raise ConfigError(f"{where}: cannot be made ({error.strerror or error})") from error
        if self.place.local is not None:
            self._take_lock(self.place.local, where)
        for info in self._infos():
            if info.base_name.startswith(UNFINISHED):
                self._fs.delete_file(info.path)
        attempts = [int(found["attempt"]) for info in self._infos() if (found := PART.fullmatch(info.base_name))]
        job = self.read_job() or {}
        attempts += [int(one["attempt"]) for one in job.get("attempts", ())]
        self.attempt = max(attempts, default=0) + 1
        return self

    def close(self) -> None:
        """Let go of the lock. What is buffered is not written: `flush` does that."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- sequences

    def append(self, table: pa.Table) -> None:
        """Finished sequences (`rows.SCHEMA`); written by the next `flush_if_due`."""
        if not self._buffered:
            self._since = time.monotonic()
        self._buffer.append(table)
        self._buffered += len(table)

    def flush_if_due(self) -> None:
        due = self._buffered >= self._flush_rows or time.monotonic() - self._since >= self._flush_seconds
        if self._buffered and due:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as one part. OutputFailed leaves it buffered, and no half part behind."""
        if not self._buffered:
            return
        table = pa.concat_tables(self._buffer)
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd")
        self._write(f"{PARTS}/{self.attempt:04d}-{self._number:06d}.parquet", sink.getbuffer())
        self._number += 1
        self.rows_written += len(table)
        self._buffer, self._buffered = [], 0

    def read(self, columns: list[str]) -> Iterator[pa.Table]:
        """Part by part, in order. ConfigError for a part that isn't ours or is damaged."""
        for info in self._infos():
            if PART.fullmatch(info.base_name) is None:
                continue
            try:
                with self._fs.open_input_file(info.path) as file:
                    part = pq.ParquetFile(file)
                    if not part.schema_arrow.equals(SCHEMA):
                        raise ConfigError(f"{self._said(info)}: has other columns than this version writes")
                    yield part.read(columns)
            except (OSError, pa.ArrowException) as error:
                raise ConfigError(
                    f"{self._said(info)}: cannot be read ({error}); move it away and start the job again: its "
                    "sequences are generated anew"
                ) from error

    # -- what is said about them

    def read_job(self) -> dict[str, Any] | None:
        """`job.json`; None if there is none. ConfigError if it is damaged or of another version."""
        text = self._read(JOB)
        if text is None:
            return None
        try:
            tree: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{self.place.uri}/{JOB}: is not valid JSON ({error}); move it away") from error
        found = tree.get("schema") if isinstance(tree, dict) else None
        if found != JOB_SCHEMA:
            raise ConfigError(f"{self.place.uri}/{JOB}: has schema {found!r}, this version reads {JOB_SCHEMA!r}")
        return tree

    def write_job(self, tree: Mapping[str, Any]) -> None:
        self._write(JOB, (json.dumps({"schema": JOB_SCHEMA, **tree}, indent=1) + "\n").encode())

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """Of `rejected.jsonl` or `quarantined.jsonl`; none if there is no such file."""
        return [json.loads(line) for line in (self._read(name) or "").splitlines() if line]

    def write_lines(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """In place of those that are there; without any the file is not made."""
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if text or self._read(name):
            self._write(name, text.encode())

    def write_text(self, name: str, text: str) -> None:
        self._write(name, text.encode())

    # -- files

    def _path(self, name: str) -> str:
        return f"{self.place.path.rstrip('/')}/{name}"

    def _said(self, info: Any) -> str:
        return f"{self.place.uri}/{PARTS}/{info.base_name}"

    def _infos(self) -> list[Any]:
        """Files in the folder of parts, by name."""
        selector = FileSelector(self._path(PARTS), allow_not_found=True)
        try:
            infos = self._fs.get_file_info(selector)
        except FileNotFoundError:  # a job made the folder after it wasn't there and before Arrow looked again
            infos = self._fs.get_file_info(selector)
        return sorted((info for info in infos if info.type == FileType.File), key=lambda info: info.base_name)

    def _read(self, name: str) -> str | None:
        path = self._path(name)
        if self._fs.get_file_info(path).type != FileType.File:
            return None
        with self._fs.open_input_stream(path) as file:
            return str(file.read().decode())

    def _write(self, name: str, content: bytes | memoryview) -> None:
        folder, _, base = self._path(name).rpartition("/")
        partial = f"{folder}/{UNFINISHED}{base}"
        try:
            if self.place.local is not None:
                with Path(partial).open("wb") as local:
                    local.write(content)
                    local.flush()
                    os.fsync(local.fileno())
                Path(partial).replace(f"{folder}/{base}")
            else:
                with self._fs.open_output_stream(partial) as remote:
                    remote.write(content)
                self._fs.move(partial, f"{folder}/{base}")
        except OSError as error:
            self._drop(partial)
            what = "there is no room left" if error.errno in FULL else (error.strerror or str(error))
            raise OutputFailed(
                f"--out {self.place.uri}: {name} cannot be written: {what}. What was written before stays; the same "
                "command goes on from there once that is mended"
            ) from error

    def _drop(self, path: str) -> None:
        if self._fs.get_file_info(path).type == FileType.File:
            self._fs.delete_file(path)

    def _take_lock(self, root: Path, where: str) -> None:
        inside = (root / PARTS).resolve()
        if inside != root.resolve() / PARTS:
            raise ConfigError(f"{where}: its folder {PARTS!r} is a link to {inside}, outside of it")
        self._lock = (root / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise ConfigError(f"{where}: another job writes there; wait for it or give another directory") from error
