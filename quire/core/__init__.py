"""The heart of quire: who may use which memory, and when.

Standard library only. No tensors, threads, clocks, randomness or logs: time comes in as an argument and news go out as
values, so the same calls always give the same plans.
"""
