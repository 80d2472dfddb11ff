"""Penstock: a replicated priority log."""

__version__ = "0.1.0"
