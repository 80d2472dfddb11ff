"""The native protocol: frames and control messages, without any I/O."""
