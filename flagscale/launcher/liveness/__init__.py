"""What keeps the hosts of a run together: one fate, one first failure, one attempt number.

A run's agents talk to a *coordinator*, which lives in the agent of host 0 and ends with it::

    agent of host 1 ── link ──┐
    agent of host 2 ── link ──┼── server ── Coordinator ── member of host 0
    …                         ┘

- ``protocol``: an authenticated channel for frames of bytes, without input and output.
- ``messages``: what is said, a dataclass each, to and from bytes; ``records`` judges what is read.
- ``network``: the sockets of both ends, never blocking.
- ``coordinator``: what the job as a whole does. Pure: messages and time in, orders out.
- ``member``: what one host does: its attempt, its orders, the loss of its link.
- ``attempt``: one torchrun from its start until none of its processes is left.
- ``watch``: what the ranks of a host report, how far each is, their stacks.
- ``diagnosis``: which rank failed first, on a host and across hosts.

A run of one host has a coordinator too, but no port. Standard library alone, and nothing of the
rest of the launcher but the files that this directory names: an agent must start fast, anywhere.
"""
