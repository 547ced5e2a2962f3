"""Measures a real model: many clients against one at a time, a shared prefix, fairness between tiers.

The first two drive an engine by hand, so that arrival times are their own, and read their results off the plans and
blocks of the scheduler. Times are measured; sharing and copies are checked. Fairness is measured over HTTP on a server
of its own (`quire/cli/bench_fairness.py`); the arithmetic of its report is here.
"""
