"""Benchmarks of a loaded model: throughput, a shared prefix, fairness between tiers.

The first two call the engine directly, which gives exact control of arrival times, and read their results from the
scheduler's plans and blocks. Times are measured; sharing and copies are checked. Fairness is measured over HTTP on a
separate server (`quire/cli/bench.py`); this package computes its report.
"""
