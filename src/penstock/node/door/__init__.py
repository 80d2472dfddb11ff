"""What callers may cost the node, before anything is done for them.

Connections, handshakes, unfinished frames, requests and unread answers are counted and bounded
here; certificates and the names under which the node may be called are checked.
"""
