"""Structural rewrites of a backend's source: one concern a module, one pass over a file."""
