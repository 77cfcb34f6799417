"""Supervision that keeps the hosts of a run together: one first failure, one attempt number.

An *attempt* is one start of the job on all hosts; a restart is a new attempt. Each host has an
*agent* (:mod:`flagscale.launcher.agent`), which supervises torchrun and its ranks there. A run's
agents connect to a *coordinator*, which is part of the agent of one host, at first of host 0::

    agent of host 1 ── link ──┐
    agent of host 2 ── link ──┼── server ── Coordinator ── member of host 0
    …                         ┘

- ``protocol``: authenticated channel for frames of bytes, without I/O
- ``messages``: the messages, one dataclass each, and their encoding; ``records`` validates them
- ``network``: non-blocking sockets of both ends
- ``coordinator``: decisions about the whole job; pure: messages and time in, orders out
- ``succession``: selection of the host that continues as the coordinator, and its state; pure
- ``link``: one agent's link to the coordinator, and what it does when that is lost; pure
- ``hang_detector``: ranks that make no progress or wait too long, and the rank that is to blame;
  ``hang`` explains it from flight records; pure
- ``early_exits``: ranks that have ended while others are running; pure
- ``places``: which host has which node rank, and which ones wait; pure
- ``member``: one host: its attempt, its orders
- ``attempt``: one torchrun, from its start until none of its processes is left
- ``watch``: status and stacks of the ranks of a host
- ``diagnosis``: selection of the rank that failed first, on one host and across hosts

A run of one host has a coordinator too, but no port. The package needs the standard library alone,
and nothing of the launcher but ``layout``, because an agent must start fast in any environment.
"""
