"""Metrics, logs, health endpoints and the live view."""
