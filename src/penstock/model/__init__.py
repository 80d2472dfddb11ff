"""The words of the system as values: batches, columns, topics, ids, partitions."""
