"""A rollout in simulated time, driven by the very policies that drive the engine."""
