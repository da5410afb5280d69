"""What waits for a refresh actor that is silent. No Ray; a refresh in a job is in test_ray_faults.py."""

from __future__ import annotations

import pyarrow as pa
from rollout_spec_ray.refresh import Waiting


def rows(*names: int) -> pa.Table:
    """A row each, of 10 tokens, the prompt's included, the name among them."""
    return pa.table({"prompt_token_ids": [[0] * 4 for _ in names], "token_ids": [[name] * 6 for name in names]})


def names(table: pa.Table | None) -> list[int]:
    assert table is not None
    return [tokens[0] for tokens in table["token_ids"].to_pylist()]


def test_the_newest_wait_in_order_and_no_more_of_them_than_the_buffer_holds() -> None:
    waiting = Waiting(limit=60)
    assert waiting.take() is None
    for name in range(1, 9):
        waiting.add(rows(name))
    assert names(waiting.take()) == [3, 4, 5, 6, 7, 8]
    assert waiting.take() is None
    waiting.add(rows(1, 2, 3))
    waiting.add(rows(4, 5, 6))
    assert names(waiting.take()) == [1, 2, 3, 4, 5, 6]


def test_one_table_waits_whole_whatever_its_size() -> None:
    waiting = Waiting(limit=15)
    waiting.add(rows(1))
    waiting.add(rows(2, 3, 4))
    assert names(waiting.take()) == [2, 3, 4]
    waiting.add(
        pa.table(
            {"prompt_token_ids": pa.array([], pa.list_(pa.int64())), "token_ids": pa.array([], pa.list_(pa.int64()))}
        )
    )
    assert waiting.take().num_rows == 0
