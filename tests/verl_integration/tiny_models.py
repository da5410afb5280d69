"""A policy that repeats itself, so that there is something to draft, and a head that has yet to learn that."""

from __future__ import annotations

from pathlib import Path


def make_policy(folder: Path) -> Path:
    """A four-layer Llama of random weights; its tokens are bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = LlamaConfig(
        vocab_size=len(names),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    made = LlamaForCausalLM(config)
    with torch.no_grad():
        # Tied embeddings this large make the last token likely again, at about six to one.
        made.model.embed_tokens.weight.mul_(7.0)
    made.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_head(policy: Path, folder: Path) -> Path:
    """What training starts from, fitted to the policy's features."""
    import torch

    from rollout_spec.draft.checkpoint import save_head
    from rollout_spec.draft.features import Target, channel_scale, extract
    from rollout_spec.draft.loss import Shared
    from rollout_spec.draft.model import Eagle3Head
    from rollout_spec.draft.samples import Sample
    from rollout_spec.draft.shape import HeadShape
    from rollout_spec.draft.target import read_target

    config = read_target(str(policy)).config
    shape = HeadShape.for_target(config, config["vocab_size"], None, None)
    target, ids = Target(policy, shape.aux_layers), torch.arange(shape.vocab_size)
    some = [Sample(str(i), [1, 100 + i], [100 + i] * 30, 1.0, False) for i in range(8)]
    torch.manual_seed(0)
    head = Eagle3Head(shape)
    head.initialise(target.norm, Shared.of(target.embedding, target.output, ids).rows)
    head.scale_features(1 / channel_scale(extract(target, some, 4096)))
    save_head(folder, head, ids, {})
    return folder
