"""Runs the state machine of the engine (`tests/engine/machine.py`), which the gauntlet runs for longer."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.engine.machine import EngineMachine

TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
