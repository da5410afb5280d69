from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scheduler_harness import make_config

trees = pytest.importorskip("arctic_inference.suffix_decoding._C", reason="the suffix drafter is not built here")

from rollout_spec.engine.suffix import History, SuffixProposer  # noqa: E402

MAX_LEN = 128
K_MAX = 8
PROMPT = [40, 41, 42]


class Batch:
    """Stands in for vLLM's InputBatch, of which the drafter reads five fields; the real one wants a device, block
    tables and sampling state. Rows move as requests leave, as in vLLM."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[list[int], list[int]]] = {}

    def put(self, name: str, response: list[int], prompt: list[int] | None = None) -> None:
        self.rows[name] = (PROMPT if prompt is None else prompt, response)

    @property
    def req_ids(self) -> list[str]:
        return list(self.rows)

    @property
    def req_id_to_index(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.rows)}

    @property
    def num_prompt_tokens(self) -> np.ndarray:
        return np.array([len(prompt) for prompt, _ in self.rows.values()], dtype=np.int32)

    @property
    def num_tokens_no_spec(self) -> np.ndarray:
        return np.array([len(prompt) + len(response) for prompt, response in self.rows.values()], dtype=np.int32)

    @property
    def token_ids_cpu(self) -> np.ndarray:
        tokens = np.full((len(self.rows), MAX_LEN), -5, dtype=np.int32)  # garbage that no draft may contain
        for row, (prompt, response) in enumerate(self.rows.values()):
            tokens[row, : len(prompt) + len(response)] = prompt + response
        return tokens


def drafts(proposer: SuffixProposer, batch: Batch, k: int) -> dict[str, list[int]]:
    """A step after which every request of the batch has a sampled token."""
    sampled = [response[-1:] for _, response in batch.rows.values()]
    return dict(zip(batch.req_ids, proposer.propose(k, batch, sampled), strict=True))  # type: ignore[arg-type]


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def proposer(**suffix: Any) -> SuffixProposer:
        config = make_config(
            tmp_path, method="suffix", k_max=K_MAX, max_model_len=MAX_LEN, settings={"suffix": suffix, "policy": {}}
        )
        return SuffixProposer(config)

    return proposer


LOOP = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_a_repetition_is_drafted_for_every_k_in_any_order(make: Any) -> None:
    proposer, batch = make(), Batch()
    response = LOOP * 2 + [1, 2]
    for k in [8, 3, 0, 1, 8, 0, 0, 5, 2, 7, 4, 6]:
        batch.put("a", list(response))
        draft = drafts(proposer, batch, k)["a"]
        expected = (LOOP * 2)[len(response) % 10 :][:k]
        assert draft == expected
        response.append(LOOP[len(response) % 10])


def test_no_draft_beyond_the_context(make: Any) -> None:
    proposer, batch = make(), Batch()
    for room in (3, 2, 1, 0, -1):
        length = MAX_LEN - 1 - room - len(PROMPT)
        batch.put("a", (LOOP * 20)[:length])
        assert len(drafts(proposer, batch, 8)["a"]) == max(room, 0)


def test_k_zero_touches_no_tree(make: Any) -> None:
    proposer, batch = make(), Batch()
    batch.put("a", LOOP * 2)
    assert drafts(proposer, batch, 0) == {"a": []}
    assert (proposer._live["a"].tree, proposer.history.tokens) == (None, 0)
    drafts(proposer, batch, 4)
    live = proposer._live["a"]
    before = (live.upto, live.tree.estimate_memory(), proposer.history.tokens)
    batch.put("a", LOOP * 4)
    batch.put("b", LOOP)
    assert drafts(proposer, batch, 0) == {"a": [], "b": []}
    assert (live.upto, live.tree.estimate_memory(), proposer.history.tokens) == before
    assert proposer._live["b"].tree is None


def test_what_finished_at_k_zero_is_drafted_from(make: Any) -> None:
    """In a rollout most siblings finish while the batch is full and K is 0: the tail must have them as history."""
    proposer, batch = make(), Batch()
    short, long = [11, 12, 20, 21, 22, 23, 24], [13, 20, 21]
    for count in range(1, len(short) + 1):
        batch.put("short", short[:count])
        batch.put("long", long[: min(count, 3)])
        drafts(proposer, batch, 0)
    del batch.rows["short"]
    assert drafts(proposer, batch, 2)["long"] == [22, 23]
    assert proposer.history.tokens == len(short) + len(long)


def test_what_was_drafted_for_and_finished_at_k_zero_is_whole(make: Any) -> None:
    proposer, batch = make(), Batch()
    batch.put("a", [11, 12])
    drafts(proposer, batch, 2)
    for token in (20, 21, 22):
        batch.put("a", [*batch.rows["a"][1], token])
        drafts(proposer, batch, 0)
    del batch.rows["a"]
    batch.put("b", [12, 20])
    assert drafts(proposer, batch, 2)["b"] == [21, 22]
    assert proposer.history.tokens == 5 + 2


def test_tokens_generated_at_k_zero_are_caught_up(make: Any) -> None:
    """The phrase 20 21 22 23 was generated while K was 0; it is drafted when its beginning comes again."""
    proposer, batch = make(), Batch()
    batch.put("a", [11, 12])
    drafts(proposer, batch, 4)
    response = [11, 12, 20, 21, 22, 23, 24, 13]
    batch.put("a", response)
    drafts(proposer, batch, 0)
    response += [20, 21, 22]
    batch.put("a", response)
    assert drafts(proposer, batch, 2)["a"] == [23, 24]
    assert proposer.history.tokens == len(response)
    assert proposer._live["a"].tree.check_integrity() == ""


def test_the_prompt_is_drafted_from_and_is_no_response(make: Any) -> None:
    proposer, batch = make(), Batch()
    batch.put("a", [3, 4, 5], prompt=[1, 2, 3, 4, 5, 6, 7])
    assert drafts(proposer, batch, 2)["a"] == [6, 7]
    assert proposer.history.tokens == 3


def test_a_request_without_a_sampled_token_is_left_alone(make: Any) -> None:
    """A prompt computed in chunks has no sampled token yet."""
    proposer, batch = make(), Batch()
    batch.put("a", LOOP * 2)
    batch.put("chunked", [], prompt=LOOP * 3)
    assert proposer.propose(4, batch, [[10], []]) == [[1, 2, 3, 4], []]
    assert set(proposer._live) == {"a"}


def test_siblings_and_later_calls_draft_from_earlier_responses(make: Any) -> None:
    proposer, batch = make(), Batch()
    batch.put("first", [*LOOP, 20, 21, 22])
    drafts(proposer, batch, 4)
    # A sibling in the same batch.
    batch.put("second", LOOP[:5])
    assert drafts(proposer, batch, 3)["second"] == [6, 7, 8]
    # A later call, when both have finished.
    batch = Batch()
    batch.put("other", [1], prompt=[50])
    drafts(proposer, batch, 3)
    assert set(proposer._live) == {"other"}
    batch.put("third", LOOP[:8])
    found = drafts(proposer, batch, 5)
    assert found["third"] == [9, 10, 20, 21, 22]
    # Another prompt learns nothing from it.
    batch.put("fourth", LOOP[:8], prompt=[60, 61])
    assert drafts(proposer, batch, 5)["fourth"] == []


def test_responses_that_were_made_elsewhere_are_drafted_from(make: Any) -> None:
    proposer, batch = make(), Batch()
    proposer.remember(PROMPT, [[11, 12, 20, 21, 22], [30, 31, 32]])
    batch.put("a", [12, 20])
    batch.put("b", [30, 31])
    batch.put("other", [12, 20], prompt=[1, 2])
    assert drafts(proposer, batch, 2) == {"a": [21, 22], "b": [32], "other": []}
    without = make(max_history_tokens=0)
    without.remember(PROMPT, [[11, 12, 20, 21, 22]])
    assert drafts(without, batch, 2)["a"] == []


def test_without_history_only_the_request_itself_is_drafted_from(make: Any) -> None:
    proposer, batch = make(max_history_tokens=0), Batch()
    for number in range(20):
        batch = Batch()
        batch.put(f"r{number}", LOOP, prompt=[40 + number])
        assert drafts(proposer, batch, 4) == {f"r{number}": []}
    assert (len(proposer.history), proposer.history.tokens) == (0, 0)
    batch.put("twice", LOOP * 2)
    assert drafts(proposer, batch, 3)["twice"] == [1, 2, 3]


def tokens(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)


def test_memory_is_bounded_and_the_least_recently_used_prompt_goes_first() -> None:
    history = History(8, 100)
    for name in (b"a", b"b", b"c"):
        history.extend(name, history.open(name), tokens(30))
    assert history.tree(b"a") is not None  # now b is the oldest
    history.extend(b"d", history.open(b"d"), tokens(30))
    assert history.tree(b"b") is None
    assert (len(history), history.tokens) == (3, 90)
    # Growing counts as use, too.
    history.extend(b"c", history.open(b"c"), tokens(5, 100))
    history.extend(b"e", history.open(b"e"), tokens(30))
    assert history.tree(b"a") is None
    assert history.tree(b"c") is not None
    assert (len(history), history.tokens) == (3, 95)


def test_a_response_larger_than_the_memory_is_not_kept() -> None:
    history = History(8, 100)
    sequence = history.open(b"a")
    history.extend(b"a", sequence, tokens(60))
    history.extend(b"a", sequence, tokens(60, 60))
    assert (len(history), history.tokens) == (0, 0)
    history.extend(b"a", sequence, tokens(60, 120))
    assert (len(history), history.tokens) == (0, 0)
    history.extend(b"b", history.open(b"b"), tokens(10))
    assert (len(history), history.tokens) == (1, 10)


def test_the_token_count_is_that_of_the_trees_after_many_evictions() -> None:
    rng = np.random.default_rng(0)
    history = History(4, 500)
    kept: dict[bytes, int] = {}
    for _ in range(400):
        name = bytes([rng.integers(12)])
        sequence = history.open(name)
        for _ in range(rng.integers(1, 4)):
            count = int(rng.integers(1, 80))
            alive = history.tree(name) is not None
            history.extend(name, sequence, tokens(count))
            kept[name] = kept.get(name, 0) + count if alive else 0
            kept = {known: size for known, size in kept.items() if history.tree(known) is not None}
            assert history.tokens == sum(kept.values()) <= 500


def test_the_drafter_goes_on_while_its_prompts_are_evicted(make: Any) -> None:
    proposer = make(max_history_tokens=30)
    batch = Batch()
    responses: dict[str, list[int]] = {f"r{n}": [] for n in range(6)}
    for step in range(40):
        for n, (name, response) in enumerate(responses.items()):
            response.append(LOOP[step % 10])
            batch.put(name, list(response), prompt=[n])
        found = drafts(proposer, batch, 3)
        assert proposer.history.tokens <= 30
    assert found == dict.fromkeys(responses, LOOP[:3])


def test_forget_drops_the_history_while_requests_run(make: Any) -> None:
    proposer, batch = make(), Batch()
    batch.put("first", [*LOOP, 20, 21])
    batch.put("second", LOOP[:3])
    assert drafts(proposer, batch, 2)["second"] == [4, 5]
    proposer.forget()
    assert proposer.history.tokens == 0
    batch.put("second", LOOP[:4])
    assert drafts(proposer, batch, 2)["second"] == []
    # What is generated from here on is remembered again; the running request still drafts from itself.
    batch.put("first", [*LOOP, 20, 21, 1, 2])
    found = drafts(proposer, batch, 2)
    assert found["first"] == [3, 4]
    assert proposer.history.tokens == 2 + 1


def test_without_our_settings_it_is_vllms_drafter(tmp_path: Path) -> None:
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    config = make_config(tmp_path, method="suffix", k_max=4, max_model_len=MAX_LEN)
    ours, stock = SuffixProposer(config), SuffixDecodingProposer(config)
    assert not ours.ours
    response = list(LOOP * 2)
    for token in LOOP:
        batch = Batch()
        batch.put("a", list(response))
        assert drafts(ours, batch, 4) == drafts(stock, batch, 4)  # type: ignore[arg-type]
        response.append(token)
    with pytest.raises(AssertionError):  # vLLM's own cannot change K
        drafts(ours, batch, 3)
    ours.forget()
