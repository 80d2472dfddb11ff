"""Stages of one node's queue: native, through the gateway, latency, and a backlog's recovery."""
