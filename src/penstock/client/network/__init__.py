"""Connections to nodes: where they are, how they are reached, and what happens when one fails.

An `exchange` carries frames, over sockets and within a process; a `connection` says what may be
asked of a node, by a client or by another node, and has the streams that it receives. `endpoints`
reach nodes at urls. A `link` is what topics use: it opens connections, repeats requests within
bounds, and in a cluster sends each to the node that coordinates its partition. Bodies come in
encoded; nothing here knows what a message or a lease means.
"""
