"""Runners: implementations of :class:`.base.Runner` that start a plan on its hosts."""
