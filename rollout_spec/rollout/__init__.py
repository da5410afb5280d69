"""The rollout worker: generate, update weights, measure."""
