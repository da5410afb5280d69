"""EAGLE heads at less cost: no draft forward while nothing is drafted, and drafts sampled in the head's own vocabulary.

vLLM runs the draft model at K=0 too, so that its KV cache stays whole. Here a step with K=0 keeps the draft model's
inputs (the target's hidden states, which are at hand, and the next tokens) in a bounded store. The first step with
drafts, or a full store, runs the draft model over what the sequences that are still alive have missed: the same
forward over the same inputs, in few large batches. What finished before is never computed.

Only acceptance depends on a draft cache, never the tokens: the target judges every draft.

vLLM spreads the logits of a reduced draft vocabulary over the target's and samples there, which with 4,096 of 49,152
tokens draws twelve times the exponential noise; on a CPU that was most of a draft step at temperature 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from rollout_spec.engine.control_loop import SETTINGS_KEY
from rollout_spec.engine.missed_tokens import Missed, MissedTokens, batches

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# In our settings: MiB of hidden states kept; 0 is vLLM's own behaviour.
BUFFER_KEY = "draft_buffer_mib"
DEFAULT_BUFFER_MIB = 256


def buffer_bytes(config: VllmConfig) -> int:
    """Bytes of hidden states that an engine keeps for its head; 0 where it must run the head at every step."""
    settings = (config.additional_config or {}).get(SETTINGS_KEY)
    speculative = config.speculative_config
    if settings is None or speculative is None or speculative.method not in ("eagle", "eagle3"):
        return 0
    # Ranks that skip a forward leave those that don't waiting; a connector saves the draft's cache step by step.
    if config.parallel_config.data_parallel_size > 1 or config.kv_transfer_config is not None:
        return 0
    return int(settings.get(BUFFER_KEY, DEFAULT_BUFFER_MIB)) * 2**20


class DeferringEagleProposer(EagleProposer):
    """vLLM's EAGLE drafter that defers its forward at K=0."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self._runner = runner
        self._bytes = buffer_bytes(vllm_config)
        self._prefix_caching = bool(vllm_config.cache_config.enable_prefix_caching)
        self._missed: MissedTokens | None = None  # None: vLLM's own behaviour
        self._whole: list[str] | None = None  # requests known to have missed nothing

    def initialize_attn_backend(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().initialize_attn_backend(kv_cache_config, *args, **kwargs)
        # Positions in three dimensions, embeddings of images and slots between tokens are left to vLLM.
        if self.uses_mrope or self.supports_mm_inputs or self.needs_extra_input_slots:
            return
        spec = kv_cache_config.kv_cache_groups[self.kv_cache_gid].kv_cache_spec
        width = self._runner.model_config.get_hidden_size()
        if self.eagle3_use_aux_hidden_state:
            width *= getattr(self.draft_model_config.hf_config, "num_aux_hidden_states", None) or 3
        capacity = self._bytes // (width * self.dtype.itemsize)
        if capacity:
            self._missed = MissedTokens(capacity, kv_cache_config.num_blocks * spec.block_size, self.block_size)

    def propose(  # arguments by vLLM's names and order
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        missed = self._missed
        if missed is not None:
            tokens = len(target_token_ids)
            slots = common_attn_metadata.slot_mapping[:tokens]
            defer = not num_speculative_tokens and tokens <= missed.capacity
            full = missed.used + tokens > missed.capacity
            if full or not defer:
                self._catch_up(missed, common_attn_metadata, target_positions, sampling_metadata)
            if defer:
                if full:
                    missed.clear()  # what is left belongs to nobody in the batch
                last = token_indices_to_sample
                if last is None:
                    last = common_attn_metadata.query_start_loc[1:] - 1
                # Token i + 1 goes with the hidden state i; a sequence's last one was sampled just now.
                input_ids = target_token_ids.roll(-1)
                input_ids[last] = next_token_ids
                missed.put(slots, input_ids, target_hidden_states)
                self._whole = None
                self.num_speculative_tokens = 0
                self._last_draft_probs = None
                return next_token_ids.new_empty((len(next_token_ids), 0), dtype=torch.int64)
            if missed.used:
                missed.seen(slots)
        return super().propose(
            num_speculative_tokens,
            target_token_ids,
            target_positions,
            target_hidden_states,
            next_token_ids,
            token_indices_to_sample,
            common_attn_metadata,
            sampling_metadata,
            mm_embed_inputs,
            num_rejected_tokens_gpu,
            slot_mappings,
        )

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens [n] and, where they were sampled, the probabilities [n, target vocabulary] that they came from."""
        offsets = getattr(self.model, "draft_id_to_target_id", None)
        if offsets is None or self.use_local_argmax_reduction or self.use_heterogeneous_vocab:
            tokens, probs = super()._sample_draft_tokens(hidden_states, sampling_metadata)
            return tokens, probs
        logits = self.model.logits_processor(self.model.lm_head, hidden_states)
        tokens, probs = self._sample_from_logits(logits, sampling_metadata)
        ids = torch.arange(len(offsets), device=offsets.device) + offsets
        if probs is not None:
            spread = probs.new_zeros(len(probs), self.model.config.vocab_size)
            spread[:, ids] = probs
            probs = spread
        return ids[tokens], probs

    def _catch_up(
        self, missed: MissedTokens, step: CommonAttentionMetadata, positions: torch.Tensor, sampling: Any
    ) -> None:
        """Make the draft cache of the step's sequences whole up to the step's own tokens."""
        batch = self._runner.input_batch.req_ids
        if not missed.used or batch == self._whole:
            return
        until = positions[step.query_start_loc[:-1].long()]
        tokens = missed.of(step.block_table_tensor, until, step.max_seq_len)
        if len(tokens):
            for runs in batches(tokens.runs(), self.max_num_tokens, self.max_batch_size):
                self._run(missed, tokens, runs, step.block_table_tensor, sampling)
            missed.seen(torch.from_numpy(tokens.slot).to(self.device))
        self._whole = list(batch)
        if not self._prefix_caching and len(self._runner.requests) == len(batch):
            missed.clear()  # no request is left that could come back to the rest

    def _run(
        self, missed: MissedTokens, tokens: Missed, runs: np.ndarray, block_table: torch.Tensor, sampling: Any
    ) -> None:
        """The draft model over one batch of runs, each as if it were the next chunk of a sequence's prompt."""
        start, end = int(runs[0, 0]), int(runs[-1, 1])
        lengths = runs[:, 1] - runs[:, 0]
        last = tokens.position[runs[:, 1] - 1]

        def tensor(values: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.from_numpy(values).to(self.device, dtype)

        bounds = np.append(runs[:, 0], end) - start
        input_ids, hidden = missed.inputs(tensor(tokens.row[start:end], torch.int64))
        ends = tensor(bounds[1:] - 1, torch.int64)
        super().propose(
            0,
            input_ids.roll(1),  # vLLM shifts them back, and puts the next token after the last
            tensor(tokens.position[start:end], torch.int64),
            hidden,
            input_ids[ends],
            None,
            CommonAttentionMetadata(
                query_start_loc=tensor(bounds),
                query_start_loc_cpu=torch.from_numpy(bounds.astype(np.int32)),
                seq_lens=tensor(last + 1),
                seq_lens_cpu_upper_bound=torch.from_numpy((last + 1).astype(np.int32)),
                num_reqs=len(runs),
                num_actual_tokens=end - start,
                max_query_len=int(lengths.max()),
                max_seq_len=int(last.max()) + 1,
                block_table_tensor=block_table[tensor(tokens.sequence[runs[:, 0]], torch.int64)],
                slot_mapping=tensor(tokens.slot[start:end], torch.int64),
                causal=True,
            ),
            sampling,
        )
