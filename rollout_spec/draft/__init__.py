"""Draft heads: model, training, checkpoints and what they are worth. Pure torch: no vLLM outside `command`."""
