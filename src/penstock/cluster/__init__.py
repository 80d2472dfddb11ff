"""What all nodes of a cluster agree on: topics, partition records, members and API keys.

All of it rests on one small map with revisions and compare-and-swap, the metadata store, which is a
file in the data folder of a node alone (`embedded`) or a part of etcd (`etcd`). `catalog`, `keys`
and `membership` are typed views of it, and so is `placement`, which also decides which nodes should
hold which replicas. Nothing here talks to another node, and no message ever passes through it.
"""
