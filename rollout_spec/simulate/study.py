"""One simulation as configured: the fleet, the policies on it, the crossover, better drafters."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_spec import provenance
from rollout_spec.config import Config, ConfigError, SimulateConfig
from rollout_spec.control.registry import load_step_times
from rollout_spec.control.step_times import StepTimes
from rollout_spec.simulate import roofline
from rollout_spec.simulate.acceptance_curve import AcceptanceCurve
from rollout_spec.simulate.contenders import make
from rollout_spec.simulate.fleet import Fleet, simulate
from rollout_spec.simulate.step_model import Analytic, StepModel, Tabulated, steady, tabulate
from rollout_spec.workload.lengths import Ints, sample_lengths
from rollout_spec.workload.workload import build_workload

SCHEMA = 1
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Trust in step times that are the simulated truth, as after a profile on the same machine.
PROFILE_SPREAD = 0.1


def run(config: Config) -> dict[str, Any]:
    """Plain JSON values: everything that the table and the plot show, with where it came from."""
    options = config.simulate
    model, prior, ridge = step_times(options)
    fleet = build_fleet(config, model, curve(options, prior))
    told = prior if options.prior else None
    policies = []
    plain = fleet
    if options.step_times is not None:  # measured with and without the drafter
        model = Tabulated(prior.without_drafter(), options.k_max, prior.prefill_token_seconds)
        plain = replace(fleet, model=model)
    for name in options.policies:
        policies.append(_run(plain if name == "off" else fleet, name, told, ridge, options.seed))
        _say(policies[-1])
    better = []
    for rate in options.better_rates:
        geometric = AcceptanceCurve.geometric(rate, fleet.k_max, **_drift(options))
        row = {"rate": rate}
        for name in ("off", "goodput"):
            row[name] = _run(replace(fleet, acceptance=geometric), name, told, ridge, options.seed)["seconds"]
        better.append(row)
    return {
        "schema": SCHEMA,
        "provenance": provenance.collect(),
        "config": config.model_dump(mode="json"),
        "policies": policies,
        "by_batch": by_batch(fleet),
        "better_drafters": better,
    }


def step_times(options: SimulateConfig) -> tuple[StepModel, StepTimes, float]:
    """The truth of the simulation, the same as a table for the policies, and the ridge point in tokens."""
    if options.step_times is not None:
        times = load_step_times(options.step_times)
        return Tabulated(times, options.k_max, times.prefill_token_seconds), times, 64.0
    gpu = roofline.device(options.device, options.weight_bytes)
    target = roofline.model(options.model)
    drafter = roofline.Drafter(options.drafter_params_b * 1e9, options.drafter_pass_us * 1e-6)
    efficiency = options.compute_efficiency or roofline.COMPUTE_EFFICIENCY
    model: Analytic = roofline.step_model(
        gpu, target, drafter, options.gpus_per_replica, options.weight_bytes, compute_efficiency=efficiency
    )
    prior = tabulate(model, list(BATCHES), options.k_max, [0, 2000, 8000, 16000], PROFILE_SPREAD)
    return model, prior, (model.weights + model.expert_weights) / model.token


def curve(options: SimulateConfig, times: StepTimes) -> AcceptanceCurve:
    """The profile's own acceptance where there is one, else `simulate.acceptance`."""
    if times.acceptance:
        return AcceptanceCurve.measured(times, options.k_max, **_drift(options))
    return AcceptanceCurve.from_positions(options.acceptance, options.k_max, **_drift(options))


def build_fleet(config: Config, model: StepModel, acceptance: AcceptanceCurve) -> Fleet:
    options = config.simulate
    rng = np.random.default_rng([options.seed, 7])
    lengths = tuple(_lengths(config, number, rng) for number in range(options.rollouts))
    arrivals = None
    if options.arrival_rate:
        arrivals = tuple(rng.exponential(1.0 / options.arrival_rate, len(some)).cumsum() for some in lengths)
    return Fleet(
        model=model,
        acceptance=acceptance,
        lengths=lengths,
        max_num_seqs=options.max_num_seqs,
        replicas=options.replicas,
        queue=options.queue,
        arrivals=arrivals,
        prompt_tokens=options.prompt_tokens,
        noise=options.noise,
        trainer_seconds=options.trainer_seconds,
        refresh_every=options.refresh_every,
        refresh_seconds=options.refresh_seconds,
    )


def _lengths(config: Config, number: int, rng: np.random.Generator) -> Ints:
    """Of one rollout: from a distribution, or those of a recorded trace (a workload file with `output_tokens`)."""
    if not config.workload.name.endswith(".jsonl"):
        return sample_lengths(config.workload.name, config.simulate.sequences, config.workload.scale, rng)
    groups = build_workload(config.workload, config.simulate.seed, number).groups
    if any(group.output_tokens is None for group in groups):
        raise ConfigError(f"workload.name {config.workload.name}: to simulate it, each line needs `output_tokens`")
    return np.array([length for group in groups for length in group.output_tokens or ()])


def by_batch(fleet: Fleet) -> list[dict[str, float]]:
    """Best K and its speed-up over K=0 for steady batches, at the mean context of the responses."""
    context = fleet.prompt_tokens + float(np.mean(np.concatenate(fleet.lengths))) / 2
    length = fleet.acceptance.mean_length(np.ones(1), np.ones(1))
    batches = np.array(BATCHES, dtype=np.float64)
    seconds = steady(fleet.model, batches, batches * context, fleet.k_max)
    gain = length / seconds * seconds[:, :1]
    return [
        {"batch": b, "k": int(row.argmax()), "speedup": float(row.max()), "off_ms": float(1e3 * t[0])}
        for b, row, t in zip(BATCHES, gain, seconds, strict=True)
    ]


def _drift(options: SimulateConfig) -> dict[str, Any]:
    since = [n % options.refresh_every if options.refresh_every else n for n in range(options.rollouts)]
    return {
        "request_sigma": options.request_sigma,
        "by_round": tuple(float(np.exp(options.drift * n)) for n in since),
    }


def _run(fleet: Fleet, name: str, prior: StepTimes | None, ridge: float, seed: int) -> dict[str, Any]:
    started = time.perf_counter()
    outcome = simulate(fleet, make(name, fleet, prior, ridge), seed)
    return {
        "policy": name,
        "seconds": outcome.seconds,
        "rollout_seconds": outcome.rollout_seconds,
        "tokens": outcome.tokens,
        "engine_steps": outcome.replica_steps,
        "steps_by_bucket_and_k": outcome.steps.tolist(),
        "timeline": outcome.timeline,
        "metrics": outcome.metrics,
        "took_seconds": time.perf_counter() - started,
    }


def _say(row: dict[str, Any]) -> None:
    print(f"{row['policy']}: {row['seconds']:.0f} s simulated in {row['took_seconds']:.1f} s", file=sys.stderr)
