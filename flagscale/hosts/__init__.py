"""Hosts: hostfiles, connections to hosts, and the facts that are read from them. Independent of
runs and plans.
"""
