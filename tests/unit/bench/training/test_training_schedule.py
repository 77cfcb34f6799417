"""Tests of the order in which arms train their turns."""

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
        arm_turns = [turn for turn in turns if turn.arm == arm]
        trained_steps = [turn.first + i for turn in arm_turns for i in range(turn.count)]
        assert trained_steps == list(range(warmup + steps))
    # Each arm has one turn per round, in which all arms train the same steps.
    for _, round_turns in groupby(turns, key=attrgetter("round")):
        turn = list(round_turns)
        assert sorted(arm_turn.arm for arm_turn in turn) == list(range(arms))
        assert len({(arm_turn.first, arm_turn.count) for arm_turn in turn}) == 1
    warmup_counts = [turn.count for turn in turns if turn.round == 0]
    assert warmup_counts == [warmup] * arms * bool(warmup)


def test_orders_are_drawn_by_the_seed() -> None:
    schedule, same_seed, other_seed = (
        schedule_blocks(4, steps=40, block=4, warmup=2, seed=s) for s in (1, 1, 2)
    )
    assert schedule == same_seed != other_seed
    assert len({tuple(t.arm for t in schedule if t.round == r) for r in range(11)}) > 3


def test_last_round_has_the_remaining_steps() -> None:
    assert schedule_blocks(1, steps=5, block=3, warmup=1, seed=0) == (
        Block(0, 0, 0, 0, 1),
        Block(1, 0, 1, 1, 3),
        Block(2, 0, 2, 4, 2),
    )


@pytest.mark.parametrize("count", [1, 2, 5])
def test_settings_are_all_visited(count: int) -> None:
    assert sorted(draw_order(count, 3)) == list(range(count))
