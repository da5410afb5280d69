"""The job: `python -m rollout_spec_ray.job --config FILE --prompts FILE --out DIR`, by itself or as the entry point of
`ray job submit`. Started again it generates what is missing.

Exit code: 0, all that was asked for is there; 1, the job failed (what is written stays); 2, bad input; 3, it came to
its end, but rows were rejected, prompts set aside, or vLLM refused some; 130 or 143, interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, get_args

from rollout_spec import provenance
from rollout_spec.config import Config, ConfigError, load_config
from rollout_spec.control.makespan import PROMPTS, Lengths
from rollout_spec.provenance import fingerprint
from rollout_spec.rollout.resident import Mode
from rollout_spec_ray.failures import OutputFailed, PoolFailed, WeightsRefused
from rollout_spec_ray.places import Place, command_without_secrets, place, without_secrets
from rollout_spec_ray.prompts import Rejected, read_prompts
from rollout_spec_ray.report import render, report, write
from rollout_spec_ray.rows import KEYS, SCHEMA
from rollout_spec_ray.store import QUARANTINED, REJECTED, Store

COMPLETE, FAILED, BAD_INPUT, INCOMPLETE, INTERRUPTED = 0, 1, 2, 3, 130
# Options of vLLM's that write files, open ports or load code where the job's owner may not expect it.
REFUSED_EXTRA = (
    "additional_config",
    "download_dir",
    "ec_transfer_config",
    "io_processor_plugin",
    "kv_events_config",
    "kv_transfer_config",
    "log_config_file",
    "logits_processors",
    "mm_encoder_fp8_scale_save_path",
    "otlp_traces_endpoint",
    "profiler_config",
    "reasoning_parser_plugin",
    "scheduler_cls",
    "worker_cls",
    "worker_extension_cls",
)
# Options that a continuation must share with what is there: they decide what is sampled.
SAMPLES = ("model", "sampling")


@dataclass(slots=True)
class Asked:
    """What the file of prompts asks for, and what earlier attempts have done of it."""

    catalogue: Any
    rejected: list[Rejected] = field(default_factory=list)
    missing: dict[int, tuple[int, ...]] = field(default_factory=dict)
    total: int = 0
    done: int = 0


def run(
    config: Config,
    prompts: str,
    out: str,
    *,
    weights: Any = None,
    watch: str | None = None,
    mode: Mode = "drained",
    make_worker: Any = None,
    say: Callable[[str], object] = print,
) -> int:
    """The whole job on a Ray that runs; returns the exit code.

    weights: an `engine.Weights` to begin with. watch: a folder in which `latest.json` names newer ones.
    Raises ConfigError for bad input, PoolFailed or OutputFailed if it can't go on; what is written stays.
    """
    from rollout_spec_ray.engine import make_rollout_worker
    from rollout_spec_ray.watch import Watch

    check(config)
    if watch and _refreshes(config):
        from rollout_spec_ray.refresh import check as check_refresh

        check_refresh(config)
    source = place(prompts, "--prompts")
    store = Store(place(out, "--out"), flush_rows=config.ray.flush_rows, flush_seconds=config.ray.flush_seconds)
    watcher = Watch(watch, mode, say) if watch else None
    store.open_for_writing()
    try:
        asked = _read(config, source, store, say)
        job = _record(config, source, store, asked)
        if asked.missing:
            job["attempts"][-1]["outcome"] = "failed"
            try:
                _generate(config, store, asked, weights, watcher, mode, make_worker or make_rollout_worker, job, say)
            except BaseException:
                with suppress(OutputFailed):  # what happened before is what is to be heard of
                    store.write_job(job)
                raise
        job["attempts"][-1]["outcome"] = "ended"
        store.write_job(job)
        result = report(store)
        write(store, result)
        say("\n" + render(result))
        return COMPLETE if result["complete"] else INCOMPLETE
    finally:
        store.close()


def _refreshes(config: Config) -> bool:
    """A policy that changes is to be followed by its head."""
    return config.drafter.method == "eagle3" and config.policy.name != "off" and config.refresh.policy != "never"


def check(config: Config) -> None:
    """ConfigError for an engine option that would write, listen or load code beside what the job does."""
    for name in REFUSED_EXTRA:
        if name in config.engine.extra:
            raise ConfigError(f"engine.extra.{name}: is not taken in a job: it writes, listens or loads code")


def _read(config: Config, source: Place, store: Store, say: Callable[[str], object]) -> Asked:
    from rollout_spec_ray.catalogue import Catalogue

    asked = Asked(Catalogue())
    catalogue = asked.catalogue
    for row in read_prompts(source, config.ray.samples):
        if isinstance(row, Rejected):
            asked.rejected.append(row)
        else:
            catalogue.add(row)
    catalogue.close()
    store.write_lines(REJECTED, ({"row": one.row, "problem": one.problem} for one in asked.rejected))
    for one in asked.rejected[:5]:
        say(f"row {one.row} is rejected: {one.problem}")
    if asked.rejected:
        say(f"rejected rows: {len(asked.rejected)}, all listed in {store.place.uri}/{REJECTED}")
    if not len(catalogue):
        raise ConfigError(f"--prompts {source.uri}: has no row that can be used")
    _compare(asked, store)
    return asked


def _compare(asked: Asked, store: Store) -> None:
    """What is missing; ConfigError if what is there answers other prompts."""
    catalogue = asked.catalogue
    index = {prompt_id: number for number, prompt_id in enumerate(catalogue.ids)}
    there: dict[int, set[int]] = {}
    for table in store.read(KEYS):
        for prompt_id, sample, digest in zip(*(table[name].to_pylist() for name in KEYS[:3]), strict=True):
            number = index.get(prompt_id)
            if number is None or catalogue.digests[number] != digest:
                what = "no prompt" if number is None else "another prompt"
                raise ConfigError(
                    f"--out {store.place.uri}: holds responses to prompt id {prompt_id!r}, which is {what} of this "
                    "file; give another directory"
                )
            there.setdefault(number, set()).add(sample)
    aside = {row["prompt_id"] for row in store.read_lines(QUARANTINED)}
    every = {n: tuple(range(n)) for n in set(catalogue.samples)}  # shared: most prompts have the same n
    for number, n in enumerate(catalogue.samples):
        done = there.get(number)
        asked.total += n
        asked.done += 0 if done is None else len(done & set(every[n]))
        if catalogue.ids[number] in aside:
            continue
        samples = every[n] if done is None else tuple(one for one in every[n] if one not in done)
        if samples:
            asked.missing[number] = samples


def _record(config: Config, source: Place, store: Store, asked: Asked) -> dict[str, Any]:
    """`job.json` with this attempt added, written; ConfigError if it is a job of other samples."""
    tree = config.model_dump(mode="json")
    same = fingerprint({name: tree[name] for name in SAMPLES}, ignore=())
    job = store.read_job() or {"samples_fingerprint": same, "attempts": []}
    if job["samples_fingerprint"] != same:
        raise ConfigError(
            f"--out {store.place.uri}: was begun with another {' or '.join(SAMPLES)}; give another directory"
        )
    came_from = provenance.collect()
    came_from["command"] = command_without_secrets(came_from["command"])
    attempt = {
        "attempt": store.attempt,
        "provenance": came_from,
        "config": without_secrets(tree),
        "began_at": time.time(),
        "sequences_done_before": asked.done,
    }
    job |= {"prompts": source.uri, "prompts_accepted": len(asked.catalogue), "sequences": asked.total}
    job["attempts"] = [*job["attempts"], attempt]
    store.write_job(job)
    return job


def _generate(
    config: Config,
    store: Store,
    asked: Asked,
    weights: Any,
    watcher: Any,
    mode: Mode,
    make_worker: Any,
    job: dict[str, Any],
    say: Callable[[str], object],
) -> None:
    from rollout_spec_ray.pool import Pool
    from rollout_spec_ray.progress import Progress
    from rollout_spec_ray.work import Work

    attempt = job["attempts"][-1]
    catalogue = asked.catalogue
    aside = store.read_lines(QUARANTINED)
    history = _history(config)
    earlier = (table for there in (*history, store) for table in there.read(SCHEMA.names))
    with Pool(config, attempt=store.attempt, make_worker=make_worker, earlier=earlier, say=say) as pool:
        lengths = _lengths(config, catalogue, [*history, store])
        work = Work(
            lengths,
            capacity=pool.capacity,
            tries=config.ray.tries,
            longest_first=config.ray.order == "longest_first",
        )
        for prompt in list(asked.missing):
            work.add(prompt, asked.missing.pop(prompt))
        refresh = None
        if watcher is not None and _refreshes(config):
            from rollout_spec_ray.refresh import Refresh

            refresh = Refresh(pool, say)
        progress = Progress(asked.total, asked.done, config.ray.progress_seconds, say)
        if weights is not None:
            pool.want(refresh.policy(weights) if refresh else weights, mode)

        def set_aside(prompt: int, why: str) -> None:
            tries = config.ray.tries
            row = {"prompt_id": catalogue.ids[prompt], "samples": sorted(work.quarantined[prompt]), "problem": why}
            aside.append(row)
            store.write_lines(QUARANTINED, aside)
            say(
                f"prompt {row['prompt_id']!r} is set aside: its engine died {tries} times, at last with it alone. {why}"
            )

        def tick() -> None:
            store.flush_if_due()
            progress.look(work, pool)
            if watcher is not None and (newer := watcher.look()) is not None:
                pool.want(refresh.policy(newer) if refresh else newer, mode)
            if refresh is not None:
                refresh.tick()

        def finished(table: Any) -> None:
            store.append(table)
            if refresh is not None:
                refresh.add(table)

        try:
            while not work.done:
                try:
                    pool.run(work, catalogue, finished, set_aside, tick)
                except WeightsRefused as error:
                    say(f"weights are refused, the rollout goes on with those before: {error}")
        except OutputFailed:
            raise
        except BaseException:
            store.flush()  # what has finished is kept
            raise
        else:
            store.flush()
        finally:
            if refresh is not None:
                refresh.close()
                attempt["refresh"] = refresh.metrics
            attempt |= {
                "ended_at": time.time(),
                "sequences_written": store.rows_written,
                "sequences_lost_and_repeated": work.lost,
                "sequences_moved": pool.moved,
                "engine_restarts": pool.restarts,
                "queue": {"operations": work.cost.operations, "seconds": round(work.cost.seconds, 4)},
            }


def _history(config: Config) -> list[Store]:
    """Outputs of earlier epochs; ConfigError where there is none."""
    earlier = [Store(place(text, "ray.history")) for text in config.ray.history]
    for there in earlier:
        if there.read_job() is None:
            raise ConfigError(f"ray.history: {there.place.uri} is no output of a rollout job (no job.json)")
    return earlier


def _lengths(config: Config, catalogue: Any, outputs: Sequence[Store]) -> Lengths:
    """What earlier epochs and this job's finished siblings say of each prompt (by index)."""
    lengths = Lengths(config.sampling.max_tokens, prompts=max(PROMPTS, len(catalogue)))
    if config.ray.order == "submitted":
        return lengths
    index = {prompt_id: number for number, prompt_id in enumerate(catalogue.ids)}
    for there in outputs:
        for table in there.read(KEYS):
            for prompt_id, tokens, reason in zip(
                *(table[name].to_pylist() for name in (KEYS[0], *KEYS[3:])), strict=True
            ):
                if reason != "error":
                    lengths.finished(index.get(prompt_id), tokens)
    return lengths


# -- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML configuration, see configs/ray/")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override any option")
    parser.add_argument("--prompts", metavar="FILE", required=True, help="JSONL or Parquet, a path or a URI")
    parser.add_argument("--out", metavar="DIR", required=True, help="a path or a URI that the head node can write")
    parser.add_argument("--weights", metavar="DIR", help="safetensors to begin with, in place of the model's own")
    parser.add_argument("--policy-version", type=int, default=1, metavar="N", help="of --weights (default 1)")
    parser.add_argument("--watch", metavar="DIR", help="take new weights whenever DIR/latest.json names some")
    parser.add_argument(
        "--update-mode", choices=get_args(Mode), default="drained", help="what running sequences do then (--watch)"
    )


def main(argv: Sequence[str] | None = None, make_worker: Any = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rollout_spec_ray.job", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--address", metavar="ADDRESS", help="of a Ray cluster; none: $RAY_ADDRESS, else a local Ray")
    args = parser.parse_args(argv)
    return guarded(lambda: execute(load_config(args.config, args.set), args, args.address, make_worker))


def execute(config: Config, args: argparse.Namespace, address: str | None, make_worker: Any = None) -> int:
    """The job of these arguments, with a Ray around it."""
    with ray_for(config, address):
        from rollout_spec_ray.engine import Weights

        weights = Weights(policy=args.weights, policy_version=args.policy_version) if args.weights else None
        options = {"weights": weights, "watch": args.watch, "mode": args.update_mode, "make_worker": make_worker}
        return run(config, args.prompts, args.out, **options, say=_print)


def guarded(job: Callable[[], int]) -> int:
    """The job's exit code, or that of how it ended, which is said in a sentence."""
    try:
        return job()
    except ConfigError as error:
        print(f"rollout-spec: error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except (PoolFailed, OutputFailed) as error:
        print(f"rollout-spec: failed: {error}", file=sys.stderr, flush=True)
        return FAILED
    except KeyboardInterrupt:
        print("rollout-spec: interrupted; the same command goes on from here", file=sys.stderr, flush=True)
        return INTERRUPTED


@contextmanager
def ray_for(config: Config, address: str | None) -> Iterator[None]:
    """Connected to the cluster at `address` (none: $RAY_ADDRESS); where neither is, or for "local", to a Ray of its
    own, which is stopped afterwards."""
    local = address == "local" or (address is None and not os.environ.get("RAY_ADDRESS"))
    if local:
        # Ray listens on the machine's own address otherwise, for other nodes to join: here none may.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    options: dict[str, Any] = {"log_to_driver": True, "logging_level": "warning"}
    if local:
        cpus = config.ray.engines * config.ray.cpus_per_engine + (config.refresh.threads if _refreshes(config) else 0)
        options |= {"address": "local", "num_cpus": max(os.cpu_count() or 1, cpus), "include_dashboard": False}
    else:
        options["address"] = address or "auto"
    try:
        ray.init(**options)
    except ConnectionError as error:
        raise ConfigError(
            f"--address {address or os.environ.get('RAY_ADDRESS')}: no Ray answers there: {error}"
        ) from error
    before = signal.signal(signal.SIGTERM, _terminated)  # Ray has set one of its own
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        ray.shutdown()


def _terminated(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _print(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
