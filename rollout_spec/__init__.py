"""Rollouts on stock vLLM with dynamic speculative decoding: off at full batch, on in the long tail."""

__version__ = "0.1.0"
