"""Batch inference: JSONL in, JSONL out. Knows no HTTP and no model: the caller provides a function that sends."""
