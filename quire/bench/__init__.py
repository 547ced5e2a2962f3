"""Benchmarks of a loaded model: throughput, a shared prefix, drafts, fairness between tiers.

They call the engine directly, which gives exact control of arrival times, and read their results from the scheduler's
plans and blocks. Times are measured; sharing and copies are checked.
"""
