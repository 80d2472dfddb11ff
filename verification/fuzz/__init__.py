"""Hostile bytes against a node's native port: nothing of it may end, stall or fill the node."""
