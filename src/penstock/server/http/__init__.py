"""The gateway over HTTP: a listener with bounds, the application behind it, and its document.

The listener turns bytes into requests and counts what callers make the node hold. The application
finds the route, reads arguments in JSON, runs the call and answers in JSON, or with events that
have no end. Nothing here is used by the gateway over gRPC.
"""
