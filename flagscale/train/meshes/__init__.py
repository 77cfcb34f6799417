"""Heterogeneous meshes: process groups, what stages exchange, gradients over unlike layouts."""
