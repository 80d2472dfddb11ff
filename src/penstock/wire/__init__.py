"""Frames and payloads as bytes, without I/O."""
