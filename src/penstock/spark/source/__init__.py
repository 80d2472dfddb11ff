"""Topics as Spark sees them: reading, writing, and the way to a node."""
