"""An EAGLE-3 head (arXiv 2503.01840) in torch, with the names and the arithmetic of stock vLLM's.

Position i takes the target's features of token i and the embedding of token i+1, and predicts token i+2. Draft step
j > 0 takes the state that step j-1 left at position i in place of features, and the embedding of token i+1+j.

Not `speculators` (0.9.0 was looked at): it trains from hidden states on disk or a second vLLM server on a GPU, not from
memory; it needs torchvision and torchaudio, whose builds break a CPU torch; its attention is flex_attention, which is
slow on a CPU without torch.compile.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from rollout_spec.draft.shape import HeadShape

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values [batch, heads, tokens, head_dim] of each draft step so far."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, width = 2 * shape.hidden_size, shape.head_dim
        self.heads, self.kv_heads, self.width = shape.num_attention_heads, shape.num_key_value_heads, width
        self.q_proj = nn.Linear(size, self.heads * width, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(self.heads * width, shape.hidden_size, bias=False)
        # Not a buffer: in bfloat16, as the weights may be, it would turn far positions by wrong angles.
        self.inverse = shape.rope_theta ** (-torch.arange(0, width, 2).float() / width)

    def forward(self, x: Tensor, step: int, cache: Cache) -> Tensor:
        """x [batch, tokens, 2 * hidden] -> [batch, tokens, hidden]; appends this step's keys and values to `cache`.

        A query of step j at position i sees the keys of step 0 up to i, and its own line: (i, 1), .., (i, j).
        """
        batch, tokens, _ = x.shape
        positions = torch.arange(tokens, device=x.device) + step
        q = self._rotate(self._split(self.q_proj(x), self.heads), positions)
        k = self._rotate(self._split(self.k_proj(x), self.kv_heads), positions)
        v = self._split(self.v_proj(x), self.kv_heads)
        groups = self.heads // self.kv_heads
        cache.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        (first_k, first_v), *line = cache
        if not line:
            out = F.scaled_dot_product_attention(q, first_k, first_v, is_causal=True)
        else:
            scale = 1 / math.sqrt(self.width)
            ahead = torch.full((tokens, tokens), float("-inf"), device=x.device).triu(1)
            scores = [(q @ first_k.transpose(-1, -2)).float() * scale + ahead]
            scores += [(q * k).sum(-1, keepdim=True).float() * scale for k, _ in line]
            weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
            out = weights[..., :tokens] @ first_v
            for j, (_, v) in enumerate(line):
                out = out + weights[..., tokens + j : tokens + j + 1] * v
        merged: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))
        return merged

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.width).transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding, halves side by side as Llama has them."""
        angles = positions.float()[:, None] * self.inverse.to(x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class MLP(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, embedding: Tensor, state: Tensor, step: int, cache: Cache) -> Tensor:
        both = torch.cat([self.input_layernorm(embedding), self.hidden_norm(state)], -1)
        state = state + self.self_attn(both, step, cache)
        out: Tensor = state + self.mlp(self.post_attention_layernorm(state))
        return out


class Eagle3Head(nn.Module):
    """The trained part; token embeddings are the target's."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.feature_size, shape.hidden_size, bias=False)
        self.midlayer = Layer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)

    def step(self, embedding: Tensor, state: Tensor, step: int, cache: Cache) -> Tensor:
        """One draft step at every position: [batch, tokens, hidden] twice -> the state before the last norm."""
        out: Tensor = self.midlayer(embedding, state, step, cache)
        return out

    def logits(self, state: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft vocabulary], float32."""
        logits: Tensor = self.lm_head(self.norm(state)).float()
        return logits

    @torch.no_grad()
    def initialise(self, target_norm: Tensor, target_rows: Tensor) -> None:
        """From scratch, for features of unit scale; the output starts as the target's, scaled down.

        target_norm [hidden]: the target's last norm. target_rows [draft vocabulary, hidden]: of its output layer.
        """
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
        for out in (self.midlayer.self_attn.o_proj, self.midlayer.mlp.down_proj):
            out.weight.mul_(0.3)
        self.norm.weight.copy_(target_norm.float() * 0.3)
        self.lm_head.weight.copy_(target_rows.float())

    @torch.no_grad()
    def scale_features(self, scale: Tensor) -> None:
        """Fold a factor for each feature channel [features] into `fc`: channels of a target differ by thousands."""
        self.fc.weight.mul_(scale)
