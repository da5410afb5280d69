"""The trace of an engine's steps: whole steps only, and only those not yet read."""

from rollout_spec.control.policy import StepResult
from rollout_spec.engine.step_trace import StepTrace, read_steps

STEP = StepResult(0.02, 3, 0, 2, 1, [3, 2], [2, 0], 3, 300, model_seconds=0.018)


def test_steps_come_back_as_they_were_and_only_once(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = StepTrace(path)
    trace.write(STEP)
    steps, offset = read_steps(path)
    assert steps == [STEP]
    assert read_steps(path, offset) == ([], offset)
    trace.write(STEP)
    trace.write(STEP)
    assert len(read_steps(path, offset)[0]) == 2


def test_a_step_that_is_being_written_waits(tmp_path):
    path = tmp_path / "trace.jsonl"
    StepTrace(path).write(STEP)
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    steps, offset = read_steps(path)
    assert (len(steps), offset) == (1, len(whole))
