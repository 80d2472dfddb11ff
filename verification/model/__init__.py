"""A model of the replication rules, and a search through all of its states."""
