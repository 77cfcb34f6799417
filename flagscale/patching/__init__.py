"""Fetching, adapting and collecting edits to a training backend's source tree."""
