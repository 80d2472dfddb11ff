"""Stages of the live path: to sinks in the node, to subscribers, and what its parts cost alone."""
