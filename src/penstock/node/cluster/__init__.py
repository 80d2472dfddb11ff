"""The other nodes: who they are, what they hold, and how they are reached.

Membership and records come from the metadata store; `control` turns them into replicas that are
opened and closed here, and `transport` carries what replicas and requests send.
"""
