"""Structural rewrites of a backend's source: one concern per module, one pass per file."""
