"""The durable log of one partition, and the data folder that holds the logs of one node.

Sealed batches of `penstock.model` come in and are staged, written, synced and read again;
`PartitionLog` is the one entrance. This package alone touches the files below a data folder's
`topics`. It knows nothing of what a batch means, nor of other nodes, and starts no threads or
tasks: its methods block where they say so, and the caller chooses the thread. Damage is found by
CRCs and a hash chain and raised as `Corruption`; `verify_folder` looks for it offline.
"""
