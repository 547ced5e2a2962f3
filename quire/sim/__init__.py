"""Simulation of the scheduler on traces, and comparison with a live server."""
