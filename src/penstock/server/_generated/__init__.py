"""Generated from proto/penstock.proto by scripts/generate_proto.py: do not edit."""
