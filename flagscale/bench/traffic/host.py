"""What a host runs: one process of the traffic, by an order from stdin. Standard library alone."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from flagscale.bench.traffic import flows, ring
from flagscale.bench.traffic.messages import Order
from flagscale.bench.traffic.worker_control import Post
from flagscale.records import decode


def main() -> int:
    """Carry out an :class:`.Order` from stdin; this process does not return from it."""
    post = Post(decode(Order, sys.stdin.buffer.read()))
    _hurry(post.order)
    try:
        (flows if post.order.role == "flows" else ring).serve(post)
    except (OSError, ValueError) as error:
        post.fail(str(error))
    return 0


def _hurry(order: Order) -> None:
    """Where this user may, come before what else the host computes: the network is to be felt. The
    probe works a little, and only while it is asked to."""
    with suppress(OSError):
        if order.role == "probe":
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        else:
            os.nice(-10)
