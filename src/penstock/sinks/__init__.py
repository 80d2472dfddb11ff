"""Where vectors and their changes go: a lake, an index, a cache, another node, a queue."""
