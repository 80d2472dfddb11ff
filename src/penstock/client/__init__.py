"""The Python SDK: a client of a node or a cluster, on one event loop.

`client` is what `penstock.connect` gives, `topic` a topic as a Python object, `options` every
bound that a client may be told. Below them `network` carries requests to nodes, `queue` puts
messages and leases them, and `delta` changes and reads vectors. `bridge` lets threads that wait use
all of it. Values, entries and settlements come in, frames of the native protocol go out; nothing
here touches a log, a disk or a node's state.
"""
