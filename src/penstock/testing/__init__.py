"""Tools for testing code that uses Penstock."""
