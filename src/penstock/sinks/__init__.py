"""Where vectors and their changes go: a lake, an index, a cache, another node, a queue.

A sink takes `Work` (`protocol`): states and deltas as Arrow tables (`schema`), and makes their
effect happen once. A pipeline and a node both run sinks, each by a `SinkRunner`, which tries again
what failed, keeps the meters (`health`) and takes rows that a sink refuses to dead letters
(`topics`). Nothing here knows where the work comes from, and nothing here opens a connection to a
node: sinks that write to topics are handed a `TopicWriter`.
"""
