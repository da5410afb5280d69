"""Responses as the engine ends them, in a file, for who trains a draft head on them and does not generate them itself.

One JSON line each. The reader takes the file away, and the next response begins a new one; what is being written at
that moment may be lost.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.rollout_spec")


@dataclass(frozen=True, slots=True)
class Response:
    """Token ids of a prompt and of what was sampled at `temperature`. `ended`: by itself, not at its cap."""

    prompt: list[int]
    response: list[int]
    temperature: float
    ended: bool


class ResponseLog:
    def __init__(self, path: Path) -> None:
        self._path: Path | None = path
        path.unlink(missing_ok=True)  # of an engine that had this name before

    def write(self, requests: Iterable[Request]) -> None:
        """Append them; those without token ids (given as embeddings, or pooled) are left out."""
        lines = [json.dumps(asdict(_response(one))) + "\n" for one in requests if one.prompt_token_ids]
        if self._path is None or not lines:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError as error:
            logger.warning("rollout_spec: responses are kept no more, %s cannot be written: %s", self._path, error)
            self._path = None


def take(path: Path) -> Iterator[Response]:
    """What was written since the last time, read and removed; lines that are not whole are left out."""
    taken = path.with_suffix(".taken")
    try:
        path.replace(taken)
    except FileNotFoundError:
        return
    for line in taken.read_text("utf-8").splitlines():
        try:
            yield Response(**json.loads(line))
        except (ValueError, TypeError):
            continue
    taken.unlink()


def _response(request: Request) -> Response:
    from vllm.v1.request import RequestStatus

    params = request.sampling_params
    return Response(
        prompt=list(request.prompt_token_ids or ()),
        response=list(request.output_token_ids),
        temperature=0.0 if params is None else params.temperature,
        ended=request.status == RequestStatus.FINISHED_STOPPED,
    )
