"""Drives a scheduler: today against a model of time (`simulate`), next against a device."""
