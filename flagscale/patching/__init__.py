"""Fetch and adapt the source of a training backend, and collect edits as patches."""
