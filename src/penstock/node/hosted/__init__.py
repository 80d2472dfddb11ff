"""Sinks that run within a node: they are subscriptions whose reader is a thread here.

The configuration names them, and each keeps a durable cursor of what its sink has taken.
"""
