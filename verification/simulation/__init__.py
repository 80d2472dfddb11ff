"""A whole cluster in one thread and one seed: real cores and heaps, everything else simulated."""
