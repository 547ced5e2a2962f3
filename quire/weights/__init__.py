"""Checkpoints and the facts of a model. Knows files and numbers; knows nothing of tensors libraries or text."""
