from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy import DRAFT, VOCABULARY, head, shape

from rollout_spec.config import ConfigError
from rollout_spec.draft.checkpoint import load_head, read_shape, save_head
from rollout_spec.draft.samples import Sample
from rollout_spec.draft.shape import HeadShape
from rollout_spec.draft.vocabulary import choose_vocabulary, coverage, d2t, from_d2t, target_to_draft

IDS = torch.tensor([token for token in range(VOCABULARY) if token % 4 != 1])


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    made = head()
    save_head(tmp_path, made, IDS, {"responses": 3})
    saved = load_head(tmp_path)
    assert saved.head.shape == shape()
    assert saved.ids.tolist() == IDS.tolist()
    assert saved.provenance["responses"] == 3
    for name, tensor in made.state_dict().items():
        torch.testing.assert_close(saved.head.state_dict()[name], tensor.bfloat16().float(), msg=name)


def test_the_files_are_what_vllm_reads(tmp_path: Path) -> None:
    save_head(tmp_path, head(), IDS, {})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == DRAFT
    assert config["vocab_size"] == VOCABULARY
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["num_hidden_layers"] == 1
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[0] for name in tensors} == {"fc", "midlayer", "norm", "lm_head", "d2t"}
    assert tensors["d2t"].dtype == torch.int64
    assert (tensors["d2t"] + torch.arange(DRAFT)).tolist() == IDS.tolist()
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (16, 32)


def test_a_full_vocabulary_needs_no_mapping(tmp_path: Path) -> None:
    save_head(tmp_path, head(draft=VOCABULARY), torch.arange(VOCABULARY), {})
    assert "d2t" not in load_file(tmp_path / "model.safetensors")
    assert load_head(tmp_path).ids.tolist() == list(range(VOCABULARY))


def test_a_damaged_head_says_which_tensor(tmp_path: Path) -> None:
    save_head(tmp_path, head(), IDS, {})
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    for name, tensor, said in (
        ("fc.weight", None, "'fc.weight' has shape none"),
        ("fc.weight", torch.zeros(3, 4), r"'fc.weight' has shape \[3, 4\], \[16, 48\] is expected"),
        ("more.weight", torch.zeros(1), "'more.weight'"),
        ("d2t", None, "'d2t' is missing"),
    ):
        tensors = dict(whole) | ({} if tensor is None else {name: tensor})
        if tensor is None:
            del tensors[name]
        save_file(tensors, file)
        with pytest.raises(ConfigError, match=said):
            load_head(tmp_path)
    file.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_head(tmp_path)


def test_no_head_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match="not an EAGLE-3 head"):
        read_shape(tmp_path)


TARGET = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "vocab_size": 49152,
    "rope_theta": 100000.0,
}  # fmt: skip


def test_the_shape_follows_the_target() -> None:
    made = HeadShape.for_target(TARGET, 4096, None, None)
    assert made.aux_layers == (2, 15, 27)
    assert (made.head_dim, made.rope_theta, made.feature_size) == (64, 100000.0, 3 * 576)
    assert HeadShape.from_config(made.to_config()) == made


@pytest.mark.parametrize(
    ("draft", "layers", "change", "said"),
    [
        (4096, [2, 30], {}, r"draft.aux_layers \[2, 30\].*30 layers"),
        (50000, None, {}, "draft.vocabulary 50000: the target has 49152"),
        (4096, None, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "type 'yarn'"),
    ],
)
def test_options_that_do_not_fit_the_target_are_named(draft: int, layers: list[int], change: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HeadShape.for_target(TARGET | change, draft, layers, None)


def test_the_vocabulary_is_what_responses_use_most() -> None:
    samples = [Sample("a", [9, 9, 9, 9], [4, 4, 4, 2, 2, 7], 1.0, True), Sample("b", [9], [4, 2, 5], 0.0, True)]
    ids = choose_vocabulary(samples, 12, 4, always=[1])
    assert ids.tolist()[:3] == [1, 2, 4]
    assert ids.tolist()[3] in (5, 7)
    assert coverage(samples, torch.tensor([2, 4])) == pytest.approx(7 / 9)
    assert coverage([], ids) == 0.0


def test_offsets_and_inverse_agree_with_the_ids() -> None:
    assert from_d2t(d2t(IDS)).tolist() == IDS.tolist()
    inverse = target_to_draft(IDS, VOCABULARY)
    assert inverse[IDS].tolist() == list(range(DRAFT))
    assert (inverse >= 0).sum() == DRAFT
