"""Benchmark of process-group creation: time by method, and device memory."""
