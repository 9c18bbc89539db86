"""Measure the project against what it is compared with; every figure in the docs comes from here."""
