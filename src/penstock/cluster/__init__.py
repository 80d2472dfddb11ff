"""Membership and metadata."""
