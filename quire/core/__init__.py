"""Scheduling and KV cache management.

Uses the standard library only. It has no tensors, threads, clocks, randomness or logs: time is an argument and events
are returned as values, so the same calls always produce the same plans.
"""
