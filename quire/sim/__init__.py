"""Simulation of the scheduler: traces, simulated time, and the comparison with a replay on a live server."""
