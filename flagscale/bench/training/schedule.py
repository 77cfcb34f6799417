"""In which order arms train: blocks of steps, every arm one a round, in an order that a seed draws.

Every arm trains the same steps in the same rounds, so that a step of one arm has its pair in every
other, and what the machine does beside for a while hits all arms alike.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Some consecutive steps of one arm."""

    number: int
    """Its turn, from 0."""
    arm: int
    round: int
    """0: warming up, which does not count."""
    first: int
    """The first of its steps."""
    count: int


def blocks(arms: int, *, steps: int, block: int, warmup: int, seed: int) -> tuple[Block, ...]:
    """The turns of ``arms`` arms until each has trained ``steps`` steps behind ``warmup`` ones.

    Args:
        arms: how many there are.
        steps: that count, of each arm.
        block: steps of a turn; the last round has what is left.
        warmup: steps of each arm before the first that counts, in one turn.
        seed: of the orders within rounds.
    """
    draw = random.Random(seed)
    rounds = [(warmup, 0)] if warmup else []
    rounds += [(min(block, steps - done), warmup + done) for done in range(0, steps, block)]
    found: list[Block] = []
    for number, (count, first) in enumerate(rounds, start=0 if warmup else 1):
        order = draw.sample(range(arms), arms)
        found += [
            Block(len(found) + place, arm, number, first, count) for place, arm in enumerate(order)
        ]
    return tuple(found)


def shuffled(count: int, seed: int) -> list[int]:
    """The order of ``count`` settings, by a seed."""
    return random.Random(f"settings {seed}").sample(range(count), count)
