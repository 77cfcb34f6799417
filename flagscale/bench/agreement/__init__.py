"""Comparison of the benchmark's measurements with nccl-tests' definitions."""
