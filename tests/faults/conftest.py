"""Fixtures of the fault tests."""

from tests.integration.processes import processes

__all__ = ["processes"]
