"""Heterogeneous meshes: process groups, communication between stages, gradients, layout search."""
