"""Blocks of keys and values, their pool, and the prefix tree that finds them by content."""
