"""Machines: what a host is, how one is reached, and what it answers. Knows no run and no plan."""
