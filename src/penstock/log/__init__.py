"""The durable partition log."""
