"""What all groups of options share: the error, the frozen node, and checks that several of them make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict

# vLLM's rejection sampler sizes its buffers for at most this many drafts a request (MAX_SPEC_LEN).
K_MAX_LIMIT = 128


class ConfigError(ValueError):
    """Bad input, in a sentence that names the option, the value and the remedy."""


class Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def off_by_name(name: Any) -> Any:
    return "off" if name is False else name  # YAML reads a bare `off` as false


def check_survival(values: list[float]) -> list[float]:
    """P(first j accepted), j = 1 ..; raises ValueError where they are none."""
    if any(not 0 <= value <= 1 for value in values) or sorted(values, reverse=True) != values:
        raise ValueError("must be probabilities that fall with the position, for example [0.7, 0.5, 0.35]")
    return values


def check_table(rows: Iterable[Iterable[int]]) -> list[tuple[int, int, int]]:
    """Rows of vLLM's batch-size table, sorted; raises ValueError on a gap, an overlap or a reversed range."""
    table: list[tuple[int, int, int]] = []
    for row in rows:
        values = tuple(row)
        if len(values) != 3:
            raise ValueError(f"table row {list(values)} must be [lo, hi, K]")
        table.append((values[0], values[1], values[2]))
    table.sort()
    if not table:
        raise ValueError("the table is empty; give [[lo, hi, K], ...], for example [[1, 4, 5], [5, 32, 0]]")
    expected = 1
    for lo, hi, k in table:
        if hi < lo or lo < 1:
            raise ValueError(f"table row [{lo}, {hi}, {k}] must have 1 <= lo <= hi")
        if not 0 <= k <= K_MAX_LIMIT:
            raise ValueError(f"table row [{lo}, {hi}, {k}]: K must be 0 to {K_MAX_LIMIT}")
        if lo < expected:
            raise ValueError(f"table row [{lo}, {hi}, {k}] overlaps the row before it; it must start at {expected}")
        if lo > expected:
            raise ValueError(f"the table has a gap: no row for batch sizes {expected} to {lo - 1}")
        expected = hi + 1
    return table
