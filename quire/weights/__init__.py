"""Checkpoints and model parameters. Handles files and numbers, independent of tensor libraries and text."""
