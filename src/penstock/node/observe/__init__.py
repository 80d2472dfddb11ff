"""What a node tells about itself: structured logs, metrics, and the audit trail."""
