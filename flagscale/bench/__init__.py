"""Measuring tools: collectives, the creation of process groups."""
