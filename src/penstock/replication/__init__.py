"""The replication core: epochs, quorums, commit and credit, without I/O."""
