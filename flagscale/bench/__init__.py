"""Benchmarks: collectives, creation of process groups, pipelined schedules, agreement with nccl-
tests, background traffic, and training under traffic.

Every benchmark has a ``cli`` module, which parses its command line into a plan, and a ``worker``
module, which runs on the ranks. ``command`` is the base class of these commands, ``placement`` and
``options`` have their shared flags, and ``starters`` start the ranks.
"""
