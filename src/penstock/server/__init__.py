"""The network edges of a node."""
