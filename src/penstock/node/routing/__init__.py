"""Requests for partitions that another node serves."""
