"""Suffix decoding (arXiv 2411.04975) that takes K each step and remembers earlier responses.

The trees are Arctic Inference's C++ ones. vLLM's own proposer asserts a constant K and keeps one global tree of
responses; here K is an argument, K=0 only notes tokens, and the history is kept per prompt: siblings in a group and
later epochs of the same prompt draft from each other, and prompts don't dilute one another's statistics.
Memory is bounded in tokens; whole prompts are dropped, the least recently used first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

from rollout_spec.config import SuffixConfig
from rollout_spec.engine.control_loop import SETTINGS_KEY

if TYPE_CHECKING:
    from arctic_inference.suffix_decoding._C import SuffixTree
    from numpy.typing import NDArray
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu_input_batch import InputBatch


class _Responses:
    """Responses to one prompt: a tree, and what waits to be put into it."""

    __slots__ = ("later", "size", "tree")

    def __init__(self, tree: SuffixTree) -> None:
        self.tree = tree
        self.size = 0  # tokens, waiting ones included
        self.later: list[tuple[int, NDArray[np.int32]]] = []


class History:
    """Responses by prompt, as one suffix tree a prompt. Tokens are int32; sizes count tokens."""

    def __init__(self, depth: int, max_tokens: int) -> None:
        self._depth = depth
        self._max_tokens = max_tokens
        self._prompts: OrderedDict[bytes, _Responses] = OrderedDict()
        self._next_sequence = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def tree(self, prompt: bytes) -> SuffixTree | None:
        """All responses to the prompt, None if there are none. Puts in what waits: only drafting pays for trees."""
        responses = self._prompts.get(prompt)
        if responses is None:
            return None
        for sequence, tokens in responses.later:
            responses.tree.extend_ndarray(sequence, tokens)
        responses.later.clear()
        self._prompts.move_to_end(prompt)
        return responses.tree

    def open(self, prompt: bytes) -> int:
        """A sequence number under which a response to `prompt` is added."""
        from arctic_inference.suffix_decoding._C import SuffixTree

        if self._max_tokens and prompt not in self._prompts:
            self._prompts[prompt] = _Responses(SuffixTree(self._depth))
        self._next_sequence = (self._next_sequence + 1) & 0x7FFFFFFF  # the tree's sequence ids are int32
        return self._next_sequence

    def extend(self, prompt: bytes, sequence: int, tokens: NDArray[np.int32]) -> None:
        """The next tokens of a response. They go into the tree when it is next asked for."""
        responses = self._prompts.get(prompt)
        if responses is None:  # evicted while the response grew
            return
        responses.later.append((sequence, tokens))
        responses.size += len(tokens)
        self._prompts.move_to_end(prompt)
        self.tokens += len(tokens)
        while self.tokens > self._max_tokens:
            _, dropped = self._prompts.popitem(last=False)
            self.tokens -= dropped.size

    def clear(self) -> None:
        self._prompts.clear()
        self.tokens = 0


class _Live:
    """A running request: its own tree of prompt and response, made when it first drafts."""

    __slots__ = ("noted", "prompt", "sequence", "tree", "upto")

    def __init__(self, prompt: bytes, sequence: int) -> None:
        self.prompt = prompt
        self.sequence = sequence
        self.tree: SuffixTree | None = None
        self.upto = 0  # tokens of prompt and response in the tree
        self.noted: list[list[int]] = []  # response tokens after them, seen at K=0


class SuffixProposer(SuffixDecodingProposer):
    """vLLM's suffix drafter where the engine has none of our settings; ours where it has."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        settings = (vllm_config.additional_config or {}).get(SETTINGS_KEY)
        self.ours = settings is not None
        if settings is None:
            super().__init__(vllm_config)
            return
        # vLLM's constructor would build its own cache; the fields are all it has beside that.
        speculative = vllm_config.speculative_config
        assert speculative is not None
        self.num_speculative_tokens = speculative.num_speculative_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        self.config = SuffixConfig.model_validate(settings.get("suffix", {}))
        self.history = History(self.config.max_tree_depth, self.config.max_history_tokens)
        self._live: dict[str, _Live] = {}

    def propose(
        self,
        num_speculative_tokens: int,
        input_batch: InputBatch,
        sampled_token_ids: list[list[int]],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft token ids for each request of the batch, at most `num_speculative_tokens` each."""
        if not self.ours:
            return super().propose(num_speculative_tokens, input_batch, sampled_token_ids, slot_mappings)
        if num_speculative_tokens == 0 and not self.config.max_history_tokens:
            return [[] for _ in sampled_token_ids]
        self._close_finished(input_batch)
        if num_speculative_tokens == 0:
            for row, sampled in enumerate(sampled_token_ids):
                if sampled:
                    self._request(input_batch, row).noted.append(sampled)
            return [[] for _ in sampled_token_ids]
        return [
            self._draft(num_speculative_tokens, input_batch, row) if sampled else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def forget(self) -> None:
        """Drop the history; running requests keep their own trees."""
        if self.ours:
            self.history.clear()
            for live in self._live.values():
                live.sequence = self.history.open(live.prompt)
                live.noted.clear()

    def remember(self, prompt: list[int], responses: list[list[int]]) -> None:
        """Responses to a prompt (token ids) that this engine did not make: drafts come from them as from its own."""
        if self.ours and self.config.max_history_tokens:
            key = _key(np.array(prompt, dtype=np.int32))
            for response in responses:
                self.history.extend(key, self.history.open(key), np.array(response, dtype=np.int32))

    def _draft(self, k: int, batch: InputBatch, row: int) -> list[int]:
        length = int(batch.num_tokens_no_spec[row])
        room = self.max_model_len - length - 1
        if room <= 0:
            return []
        live = self._request(batch, row)
        own = self._catch_up(live, batch, row, length)
        context = batch.token_ids_cpu[row, max(0, length - self.config.max_tree_depth) : length]
        best = None
        for tree in (own, self.history.tree(live.prompt)):
            if tree is None:
                continue
            draft = tree.speculate_ndarray(
                context, min(k, room), self.config.max_spec_factor, 0.0, self.config.min_token_prob, False
            )
            if best is None or draft.score > best.score:
                best = draft
        return [] if best is None else list(best.token_ids)

    def _catch_up(self, live: _Live, batch: InputBatch, row: int, length: int) -> SuffixTree:
        """Add to the trees what was generated since the request last drafted (all of it, at its first draft)."""
        from arctic_inference.suffix_decoding._C import SuffixTree

        if live.tree is None:
            live.tree = SuffixTree(self.config.max_tree_depth)
        if live.upto < length:
            tokens = batch.token_ids_cpu[row, live.upto : length]
            live.tree.extend_ndarray(0, tokens)
            response = tokens[max(0, int(batch.num_prompt_tokens[row]) - live.upto) :]
            if len(response):
                self.history.extend(live.prompt, live.sequence, response.copy())
            live.upto = length
            live.noted.clear()
        return live.tree

    def _request(self, batch: InputBatch, row: int) -> _Live:
        request = batch.req_ids[row]
        live = self._live.get(request)
        if live is None:
            prompt = batch.token_ids_cpu[row, : int(batch.num_prompt_tokens[row])]
            key = _key(prompt)
            live = self._live[request] = _Live(key, self.history.open(key))
        return live

    def _close_finished(self, batch: InputBatch) -> None:
        """What finished while K was 0 has not been put into the history yet."""
        for request in self._live.keys() - batch.req_id_to_index.keys():
            live = self._live.pop(request)
            if live.noted:
                response = np.array([token for tokens in live.noted for token in tokens], dtype=np.int32)
                self.history.extend(live.prompt, live.sequence, response)


def _key(prompt: NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
