"""The heap core: priority order, leases, retries and deduplication, without I/O."""
