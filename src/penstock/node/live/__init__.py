"""The live path: what a topic's log releases, pushed to subscribers and to sinks of the node."""
