"""The standalone rollout benchmark: arms, runs and the report on them."""
