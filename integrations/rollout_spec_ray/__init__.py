"""Rollouts as a job on a Ray cluster: a pool of engines, one queue, one output directory that a restart goes on from.

    rollout-spec submit --address http://head:8265 --config configs/ray/cluster.yaml --prompts FILE --out DIR
    python -m rollout_spec_ray.job --config configs/ray/local.yaml --prompts FILE --out DIR

`prompts` reads what is asked for, `work` orders it, `engine` is the actor around a `RolloutWorker`, `pool` all of them
with their restarts and weights, `store` the output, `report` what is said of it, `job` puts it together, `submit` sends
it, `places` is where files may be. Only `engine`, `pool`, `job` and `submit` import ray.
"""
