"""Fixtures of all tests of this folder."""

from tests.integration.processes import processes

__all__ = ["processes"]
