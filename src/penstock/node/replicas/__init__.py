"""The driver of replication: hosts of partitions, and what connects them to other nodes."""
