"""Deltas on their way from a commit to those who follow a topic.

The hub of a topic has a partition for each that is served here; its feed orders what is committed
and hands it to subscriptions, which are paced by credit, and catch up from the log when they are
behind.
"""
