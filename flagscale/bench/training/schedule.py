"""Order in which the arms of ``flagscale bench training`` train, drawn by a seed.

An arm is one of the compared ways to reduce gradients (:mod:`.arms`).
In each round every arm has one turn, a block of consecutive steps. Every arm trains the same steps
in the same rounds. Each step of one arm therefore corresponds to a step of every other, and
temporary load on the machine affects all arms alike.

A comparison may be repeated under several settings of the network, such as background traffic of
different strength. The order of the settings is drawn, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Consecutive steps of one arm: its turn in a round."""

    number: int
    """Index of the turn over all arms, from 0."""
    arm: int
    round: int
    """0: warm-up, which does not count."""
    first: int
    """Index of its first step."""
    count: int


def schedule_blocks(
    arms: int, *, steps: int, block: int, warmup: int, seed: int
) -> tuple[Block, ...]:
    """Return the turns until each arm has trained ``warmup`` + ``steps`` steps.

    Args:
        arms: number of arms.
        steps: steps of each arm that count.
        block: steps of a turn; the last round has the remainder.
        warmup: steps of each arm before the first that counts, trained in one turn.
        seed: seed of the order within each round.
    """
    generator = random.Random(seed)
    rounds = [(warmup, 0)] if warmup else []
    rounds += [
        (min(block, steps - trained_steps), warmup + trained_steps)
        for trained_steps in range(0, steps, block)
    ]
    scheduled: list[Block] = []
    for number, (count, first) in enumerate(rounds, start=0 if warmup else 1):
        order = generator.sample(range(arms), arms)
        scheduled += [
            Block(len(scheduled) + index, arm, number, first, count)
            for index, arm in enumerate(order)
        ]
    return tuple(scheduled)


def draw_order(count: int, seed: int) -> list[int]:
    """Return the indices of ``count`` settings of the network in the order in which they run."""
    return random.Random(f"settings {seed}").sample(range(count), count)
