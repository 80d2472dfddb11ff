"""Stages on three nodes and etcd: throughput with and without a follower, latency, failover."""
