"""The driver: performs what the cores ask for, in order."""
