"""A head from nothing for a tiny target, and what vLLM makes of it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from chain import LENGTH, VOCABULARY, Moved, story
from fresh import run_fresh
from tiny import END

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
from rollout_spec.rollout.recording import Job, measure, record

K = 3
DRAFT_VOCABULARY = 48


@pytest.mark.engine
def test_a_trained_head_is_accepted_as_predicted_and_changes_no_token(moved: Moved, tmp_path: Path) -> None:
    config = parse_config(
        {
            "model": str(moved.before),
            "engine": {
                # Greedy tokens are compared: bfloat16 has near-ties that depend on the batch.
                "dtype": "float32",
                "max_model_len": 64,
                "kv_cache_gib": 0.25,
                "extra": {"skip_tokenizer_init": True},
            },
            "draft": {"max_tokens": LENGTH},
        }
    )
    held_out = [Job(f"held-{i}", story(1, Random(1000 + i), 8), t) for i in range(100) for t in (0.0, 1.0)]
    training = [Job(f"train-{i}", story(1, Random(5000 + i), 8), float(i % 2)) for i in range(220)]
    run_fresh(record, config, held_out + training, tmp_path / "responses.jsonl", 60.0, "responses")
    samples = read_samples(tmp_path / "responses.jsonl")
    assert len(samples) == len(held_out) + len(training)
    own = [sample for sample in samples if sample.prompt_id.startswith("train")]

    shape = HeadShape.for_target(read_target(str(moved.before)).config, DRAFT_VOCABULARY, None, None)
    target = Target(moved.before, shape.aux_layers)
    ids = choose_vocabulary(own, VOCABULARY, DRAFT_VOCABULARY, [END])
    shared = Shared.of(target.embedding, target.output, ids)
    features = extract(target, own, 4096)
    scale = channel_scale(features)
    for each in features:
        each.aux.div_(scale)
    torch.manual_seed(0)
    head = Eagle3Head(shape)
    head.initialise(target.norm, shared.rows)
    options = DraftConfig(max_passes=20, batch_tokens=1024, unroll=K)
    Trainer(head, shared, features, options, seconds=1e6).run(lambda *_: None, lambda *_: None)
    head.scale_features(1 / scale)
    save_head(tmp_path / "head", head, ids, {})

    measured, outputs = run_fresh(measure, config, tmp_path / "head", K, held_out)
    saved = load_head(tmp_path / "head")
    rows = judge_samples(saved.rounded(), shared, target, outputs, 4096, K)
    predicted = {row["temperature"]: row["acceptance_length"] for row in rows if row["k"] == K}
    assert [count.temperature for count in measured] == [0.0, 1.0]
    for count in measured:
        assert count.drafts > 1000
        assert count.acceptance_length == pytest.approx(predicted[count.temperature], rel=0.05)
        # A quarter of the words are not in its vocabulary.
        assert count.acceptance_length > {0.0: 1.8, 1.0: 1.5}[count.temperature]

    alone = {sample.prompt_id: sample.response for sample in samples if sample.temperature == 0}
    for output in outputs:
        if output.temperature == 0:
            assert output.response == alone[output.prompt_id]
