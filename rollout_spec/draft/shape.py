"""The shape of an EAGLE-3 head, as the `config.json` that stock vLLM reads (its class `LlamaForCausalLMEagle3`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from rollout_spec.config import ConfigError

ARCHITECTURE = "LlamaForCausalLMEagle3"
FIELDS_OF_TARGET = (
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """One decoder layer over [token embedding, features], and a vocabulary of its own."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    """The target's."""
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    """Features are the inputs of these layers of the target; layer count: the last layer's output is not offered."""
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def feature_size(self) -> int:
        return self.hidden_size * len(self.aux_layers)

    @classmethod
    def for_target(
        cls,
        target: Mapping[str, Any],
        draft_vocab_size: int,
        aux_layers: Sequence[int] | None,
        intermediate: int | None,
    ) -> Self:
        """From the target's `config.json`. Raises ConfigError where an option does not fit the target."""
        layers = int(target["num_hidden_layers"])
        # vLLM's own default, as far as the target has so many layers.
        aux = tuple(aux_layers) if aux_layers else tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)}))
        if any(not 0 < layer < layers for layer in aux):
            raise ConfigError(
                f"draft.aux_layers {list(aux)}: the target has {layers} layers; name inputs of layers 1 to {layers - 1}"
            )
        if draft_vocab_size > target["vocab_size"]:
            raise ConfigError(
                f"draft.vocabulary {draft_vocab_size}: the target has {target['vocab_size']} tokens; ask for fewer"
            )
        hidden, heads = int(target["hidden_size"]), int(target["num_attention_heads"])
        return cls(
            hidden_size=hidden,
            intermediate_size=intermediate or int(target["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(target.get("num_key_value_heads") or heads),
            head_dim=int(target.get("head_dim") or hidden // heads),
            rms_norm_eps=float(target["rms_norm_eps"]),
            rope_theta=_rope_theta(target),
            max_position_embeddings=int(target["max_position_embeddings"]),
            vocab_size=int(target["vocab_size"]),
            draft_vocab_size=draft_vocab_size,
            aux_layers=aux,
            bos_token_id=target.get("bos_token_id"),
            eos_token_id=target.get("eos_token_id"),
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """From a head's `config.json`; raises ConfigError with what it lacks."""
        if config.get("architectures") != [ARCHITECTURE]:
            raise ConfigError(f"is not an EAGLE-3 head: architectures is {config.get('architectures')}")
        try:
            fields = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
            layers = tuple(config["eagle_aux_hidden_state_layer_ids"])
            return cls(**fields, rope_theta=_rope_theta(config), aux_layers=layers)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"config.json lacks what a head needs: {error}") from error

    def to_config(self) -> dict[str, Any]:
        fields = asdict(self)
        layers, theta = fields.pop("aux_layers"), fields.pop("rope_theta")
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **fields,
            "target_hidden_size": self.hidden_size,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "norm_before_residual": False,
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "num_aux_hidden_states": len(layers),  # vLLM takes 3 for granted
            "dtype": "bfloat16",
        }


def _rope_theta(config: Mapping[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind != "default" or config.get("rope_scaling"):
        raise ConfigError(
            f"model: its rotary embedding is of type {kind!r}; the head's trainer has only the default one"
        )
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
