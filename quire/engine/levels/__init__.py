"""Levels of the prefix cache below the device: cached content in host memory and on disk."""
