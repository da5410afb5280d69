"""A head from nothing for a tiny target, and what vLLM makes of it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from grammar import END, VOCABULARY, save_target, story

from rollout_spec.config import DraftConfig, parse_config
from rollout_spec.draft.acceptance import judge_samples
from rollout_spec.draft.checkpoint import load_head, save_head
from rollout_spec.draft.features import Target, channel_scale, extract
from rollout_spec.draft.loss import Shared
from rollout_spec.draft.model import Eagle3Head
from rollout_spec.draft.samples import read_samples
from rollout_spec.draft.shape import HeadShape
from rollout_spec.draft.target import read_target
from rollout_spec.draft.train import Trainer
from rollout_spec.draft.vocabulary import choose_vocabulary
from rollout_spec.rollout.recording import Job, in_process, measure, record

K = 3


@pytest.mark.engine
def test_a_trained_head_is_accepted_as_predicted_and_changes_no_token(tmp_path: Path) -> None:
    model = save_target(tmp_path / "target", steps=300)
    config = parse_config(
        {
            "model": str(model),
            "engine": {
                # Greedy tokens are compared: bfloat16 has near-ties that depend on the batch.
                "dtype": "float32",
                "max_model_len": 256,
                "kv_cache_gib": 0.25,
                "extra": {"skip_tokenizer_init": True},
            },
            "draft": {"max_tokens": 80},
        }
    )
    held_out = [Job(f"held-{i}", story(Random(1000 + i), 12), t) for i in range(24) for t in (0.0, 1.0)]
    training = [Job(f"train-{i}", story(Random(5000 + i), 12), float(i % 2)) for i in range(220)]
    in_process(record, config, held_out + training, tmp_path / "responses.jsonl", 60.0, "responses")
    samples = read_samples(tmp_path / "responses.jsonl")
    assert len(samples) == len(held_out) + len(training)
    own = [sample for sample in samples if sample.prompt_id.startswith("train")]

    shape = HeadShape.for_target(read_target(str(model)).config, 256, None, None)
    target = Target(model, shape.aux_layers)
    ids = choose_vocabulary(own, VOCABULARY, 256, [END])
    shared = Shared.of(target.embedding, target.output, ids)
    features = extract(target, own, 4096)
    scale = channel_scale(features)
    for each in features:
        each.aux.div_(scale)
    torch.manual_seed(0)
    head = Eagle3Head(shape)
    head.initialise(target.norm, shared.rows)
    options = DraftConfig(max_passes=8, unroll=K)
    Trainer(head, shared, features, options, seconds=1e6).run(lambda *_: None, lambda *_: None)
    head.scale_features(1 / scale)
    save_head(tmp_path / "head", head, ids, {})

    measured, outputs = in_process(measure, config, tmp_path / "head", K, held_out)
    saved = load_head(tmp_path / "head")
    rows = judge_samples(saved.head.bfloat16(), shared, target, outputs, 4096, K)
    predicted = {row["temperature"]: row["acceptance_length"] for row in rows if row["k"] == K}
    assert [count.temperature for count in measured] == [0.0, 1.0]
    for count in measured:
        assert count.drafts > 100
        # Few verifications, and states of bfloat16 against the engine's float32: no closer than this.
        assert count.acceptance_length == pytest.approx(predicted[count.temperature], rel=0.12)
    # At temperature 1 this target says nearly anything, and no head could know what: there only the prediction counts.
    assert measured[0].acceptance_length > 1.8

    alone = {sample.prompt_id: sample.response for sample in samples if sample.temperature == 0}
    for output in outputs:
        if output.temperature == 0:
            assert output.response == alone[output.prompt_id]
