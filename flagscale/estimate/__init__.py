"""Estimates of a training step before it runs: arithmetic, time and memory. Works without torch."""
