"""The first act: priorities, retries, and a crash under load, on one node."""
