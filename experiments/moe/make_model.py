"""Make a small mixture of experts and a tiny draft model, both with random weights, to profile step times with.

    python experiments/moe/make_model.py --out DIR

writes DIR/target (Qwen3MoeForCausalLM; its experts are nearly all of what a step reads) and DIR/draft
(LlamaForCausalLM, one layer), in bfloat16 and with the tokenizer of the project's default model. The text means
nothing, so acceptance has to be imposed (vLLM's `rejection_sample_method: synthetic`). Step times are those of a real
model of this shape: random weights spread tokens over the experts about evenly, as a load-balanced router does.

Left alone a random drafter repeats itself, and equal tokens go to equal experts. So embeddings outweigh the layers, and
the head is the embedding shifted by one row: the likeliest token after t is t + 1. Drafts of a chain are then distinct,
and at temperature 0 so are those of sequences that start at distinct tokens.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollout_spec.model import DEFAULT_MODEL, model_path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCABULARY = {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def target_config(args: argparse.Namespace) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=args.experts,
        num_experts_per_tok=args.experts_per_token,
        moe_intermediate_size=args.expert_width,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        **VOCABULARY,
    )


def draft_config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=args.draft_hidden,
        intermediate_size=2 * args.draft_hidden,
        num_hidden_layers=1,
        num_attention_heads=args.draft_hidden // 64,
        num_key_value_heads=args.draft_hidden // 64,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        **VOCABULARY,
    )


def count_upwards(model: PreTrainedModel) -> None:
    """Make t + 1 the likeliest token after t."""
    embedding = model.get_input_embeddings().weight.data.normal_()
    model.get_output_embeddings().weight.data.copy_(0.02 * embedding.roll(1, 0))


def save(model: PreTrainedModel, tokenizer: Path, out: Path) -> None:
    model.save_pretrained(out)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, out / name)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{out}: {parameters / 1e6:.1f}M parameters, {experts / 1e6:.1f}M of them in experts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="gets the folders target and draft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=512, help="multiple of 64 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--experts", type=int, default=64, help="a layer (default: %(default)s)")
    parser.add_argument("--experts-per-token", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--expert-width", type=int, default=512, help="multiple of 32 (default: %(default)s)")
    parser.add_argument("--draft-hidden", type=int, default=128, help="multiple of 64 (default: %(default)s)")
    parser.add_argument(
        "--tokenizer", type=Path, default=model_path(DEFAULT_MODEL), metavar="DIR", help="default: %(default)s"
    )
    args = parser.parse_args()
    missing = [name for name in TOKENIZER_FILES if not (args.tokenizer / name).is_file()]
    if missing:
        parser.error(f"--tokenizer {args.tokenizer}: no {missing[0]} there; run `rollout-spec model fetch` first")

    torch.set_default_dtype(torch.bfloat16)
    for name, kind, config in (
        ("target", Qwen3MoeForCausalLM, target_config(args)),
        ("draft", LlamaForCausalLM, draft_config(args)),
    ):
        torch.manual_seed(args.seed)
        model = kind(config)
        count_upwards(model)
        save(model, args.tokenizer, args.out / name)


if __name__ == "__main__":
    main()
