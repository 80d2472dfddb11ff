"""The pytest plugin: fixtures that run the real embedded engine."""
