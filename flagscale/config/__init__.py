"""Typed schema of an experiment, and its composition from YAML, checks and documentation."""
