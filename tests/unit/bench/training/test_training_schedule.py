"""The turns of arms."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.bench.training.schedule import Block, draw_order, schedule_blocks

COUNTS = st.integers(1, 40)


@given(arms=st.integers(1, 6), steps=COUNTS, block=COUNTS, warmup=st.integers(0, 5), seed=COUNTS)
def test_every_arm_trains_every_step_once_in_order(
    arms: int, steps: int, block: int, warmup: int, seed: int
) -> None:
    turns = schedule_blocks(arms, steps=steps, block=block, warmup=warmup, seed=seed)
    assert [turn.number for turn in turns] == list(range(len(turns)))
    for arm in range(arms):
        own = [turn for turn in turns if turn.arm == arm]
        trained = [turn.first + i for turn in own for i in range(turn.count)]
        assert trained == list(range(warmup + steps))
    # A step lies in the same round under every arm, and each arm has one turn a round.
    for _, some in groupby(turns, key=attrgetter("round")):
        turn = list(some)
        assert sorted(one.arm for one in turn) == list(range(arms))
        assert len({(one.first, one.count) for one in turn}) == 1
    warm = [turn.count for turn in turns if turn.round == 0]
    assert warm == [warmup] * arms * bool(warmup)


def test_orders_are_drawn_by_the_seed() -> None:
    one, same, other = (schedule_blocks(4, steps=40, block=4, warmup=2, seed=s) for s in (1, 1, 2))
    assert one == same != other
    assert len({tuple(t.arm for t in one if t.round == r) for r in range(11)}) > 3


def test_last_round_has_the_remaining_steps() -> None:
    assert schedule_blocks(1, steps=5, block=3, warmup=1, seed=0) == (
        Block(0, 0, 0, 0, 1),
        Block(1, 0, 1, 1, 3),
        Block(2, 0, 2, 4, 2),
    )


@pytest.mark.parametrize("count", [1, 2, 5])
def test_settings_are_all_visited(count: int) -> None:
    assert sorted(draw_order(count, 3)) == list(range(count))
