"""A measured or computed table of step times, as the controller's prior: what a profile is turned into."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a whole steady decode step (draft K, verify K, sample, host) over batch, K and context.

    Between grid points times are linear; beyond the last batch they grow in proportion to the last slope, below the
    first and outside the other axes the border holds.
    """

    batch: tuple[int, ...]
    """Sequences, ascending."""
    k: tuple[int, ...]
    """Draft tokens, ascending; must start at 0, measured with the drafter loaded."""
    seconds: tuple[tuple[tuple[float, ...], ...], ...]
    """[batch][k][context]"""
    context: tuple[int, ...] = (0,)
    """Mean context tokens a sequence, ascending."""
    draft_share: float = 0.1
    """Of the time by which K > 0 exceeds K = 0, the share spent drafting: splits steps that change K."""
    off_seconds: tuple[float, ...] = ()
    """[batch], at the first context: K=0 on an engine without a drafter; empty if not measured."""
    spread: float = 0.15
    """Relative deviation to expect of these times on the engine in use: small if measured on it, large if computed."""
    acceptance: tuple[float, ...] = field(default=())
    """P(first j drafts accepted), j = 1 ..; empty if not measured."""
    drafted: tuple[float, ...] = field(default=())
    """P(at least j tokens drafted), j = 1 ..; empty: always as many as asked for."""
    by_position: tuple[float, ...] = (1.0,)
    """How acceptance changes as a response grows (see `simulate.acceptance_curve`)."""
    prefill_token_seconds: float = 0.0
    """Computing one prompt token."""
    hiccups: float = 1.0
    """Mean step of a rollout over the median times above: a simulation must reckon with it, a choice of K must not."""
    off_hiccups: float | None = None
    """The same without a drafter; None: as with one."""

    def __post_init__(self) -> None:
        for name, axis in (("batch", self.batch), ("k", self.k), ("context", self.context)):
            if not axis or list(axis) != sorted(set(axis)):
                raise ValueError(f"step times: {name} {list(axis)} must be ascending, without doubles, not empty")
        if self.k[0] != 0:
            raise ValueError(f"step times: k starts at {self.k[0]}; must start at 0, which the others are held against")
        shape = (len(self.batch), len(self.k), len(self.context))
        for plane in self.seconds:
            for row in plane:
                if len(row) != shape[2] or not all(value > 0 for value in row):
                    raise ValueError(f"step times: each entry needs {shape[2]} times above 0, one a context; got {row}")
        if len(self.seconds) != shape[0] or any(len(plane) != shape[1] for plane in self.seconds):
            raise ValueError(f"step times: seconds must be [{shape[0]} batches][{shape[1]} K][{shape[2]} contexts]")

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> StepTimes:
        """From plain JSON values: this mapping itself, or one that holds it as `step_times` (a profile)."""
        data = data.get("step_times", data)
        missing = [key for key in ("batch", "k", "seconds") if key not in data]
        if missing:
            raise ValueError(f"step times: {', '.join(missing)} missing; need batch, k and seconds")
        context = tuple(int(value) for value in data.get("context", (0,)))
        planes = tuple(
            tuple(tuple(map(float, row)) if isinstance(row, Sequence) else (float(row),) for row in plane)
            for plane in data["seconds"]
        )
        return cls(
            batch=tuple(int(value) for value in data["batch"]),
            k=tuple(int(value) for value in data["k"]),
            seconds=planes,
            context=context,
            draft_share=float(data.get("draft_share", 0.1)),
            off_seconds=tuple(float(value) for value in data.get("off_seconds", ())),
            spread=float(data.get("spread", 0.15)),
            acceptance=tuple(float(value) for value in data.get("acceptance", ())),
            drafted=tuple(float(value) for value in data.get("drafted", ())),
            by_position=tuple(float(value) for value in data.get("by_position", (1.0,))),
            prefill_token_seconds=float(data.get("prefill_token_seconds", 0.0)),
            hiccups=float(data.get("hiccups", 1.0)),
            off_hiccups=None if data.get("off_hiccups") is None else float(data["off_hiccups"]),
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON values, as `from_mapping` takes them."""
        return {name: getattr(self, name) for name in self.__slots__}

    def at(self, decode: float, context: float = 0.0) -> list[float]:
        """Seconds for each K of the grid, at a batch of `decode` sequences with `context` tokens each."""
        low, share = _place(self.batch, decode, beyond=True)
        near, part = _place(self.context, context, beyond=False)
        times = []
        for k in range(len(self.k)):
            first = _between(self.seconds[low][k], near, part)
            if not share:
                times.append(first)
                continue
            second = _between(self.seconds[low + 1][k], near, part)
            times.append(max(first + share * (second - first), 0.1 * first))
        return times

    def by_k(self, decode: float, k_max: int, context: float = 0.0) -> list[float]:
        """Seconds for K = 0 .. k_max; beyond the grid's last K by its last slope."""
        times = self.at(decode, context)
        out = []
        for k in range(k_max + 1):
            low, share = _place(self.k, k, beyond=True)
            out.append(times[low] + share * (times[low + 1] - times[low]) if share else times[low])
        return out

    def expected(self, decode: float, drafts: Sequence[float], context: float = 0.0) -> list[float]:
        """Seconds for K = 0 .., where only `drafts[K]` draft tokens a sequence are found when K are asked for."""
        times = self.by_k(decode, len(drafts) - 1, context)
        return [blend(times, found, k, self.draft_share) for k, found in enumerate(drafts)]

    def without_drafter(self) -> StepTimes:
        """K=0 as it is with no drafter loaded, as far as that was measured."""
        if not self.off_seconds:
            return self
        taxed = zip(self.seconds, self.drafter_tax(), strict=True)
        seconds = tuple((tuple(t / tax for t in plane[0]),) for plane, tax in taxed)
        hiccups = self.hiccups if self.off_hiccups is None else self.off_hiccups
        return replace(self, k=(0,), seconds=seconds, hiccups=hiccups)

    def drafter_tax(self) -> list[float]:
        """K=0 with the drafter loaded over no drafter, a batch each; empty if not measured."""
        return [plane[0][0] / off for plane, off in zip(self.seconds, self.off_seconds, strict=False)]


def blend(times: Sequence[float], found: float, k: int, draft_share: float) -> float:
    """A step that asks for `k` draft tokens a sequence and verifies `found`, from the steady times of K = 0, 1, ..

    Verifying costs by the draft tokens there are, drafting by those asked for.
    """
    if len(times) == 1:
        return times[0]
    low = min(int(found), len(times) - 2)
    verified = times[low] + (found - low) * (times[low + 1] - times[low])
    return verified + draft_share * (times[k] - verified)


def _place(axis: tuple[int, ...], value: float, beyond: bool) -> tuple[int, float]:
    """Index of the grid point at or below, and the share of the way to the next (above 1 beyond the last)."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    if value >= axis[-1] and not beyond:
        return len(axis) - 1, 0.0
    low = min(bisect_right(axis, value) - 1, len(axis) - 2)
    return low, (value - axis[low]) / (axis[low + 1] - axis[low])


def _between(row: tuple[float, ...], low: int, share: float) -> float:
    return row[low] + share * (row[low + 1] - row[low]) if share else row[low]
