"""Tests of predictions for more hosts."""

from __future__ import annotations

import pytest
from support.tuning import make_problem

from flagscale.errors import ConfigError
from flagscale.tune.belief import MEASURED_DEVICES, Belief, Observation
from flagscale.tune.projection import Target, describe_projection, parse_target, project
from flagscale.tune.records import Timing
from flagscale.tune.search import Result
from flagscale.tune.space import enumerate_space

TARGETS = {
    "nodes": ("nodes=64", Target(64, None)),
    "number": ("64", Target(64, None)),
    "batch": ("nodes=2,batch=128", Target(2, 128)),
}


@pytest.mark.parametrize(("text", "target"), TARGETS.values(), ids=TARGETS)
def test_target_is_parsed(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize("text", ["nodes=0", "hosts=3", "nodes=2,3", ""])
def test_other_targets_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected nodes=64"):
        parse_target(text)


def test_projection_keeps_what_was_measured_and_names_what_was_not() -> None:
    problem = make_problem(8, "H100", bf16=True, global_batch_size=64, hidden_size=1024)
    layout = next(
        o
        for o in enumerate_space(problem).candidates
        if "data" not in o.prediction.seconds_by_cause
    )
    slow = 1.5 * layout.prediction.seconds
    belief = Belief(MEASURED_DEVICES, [Observation(layout, slow, 0.01)])
    measured = [Result(layout, Timing(slow, 0.01, 8), None, "measured")]
    projection = project(problem, belief, measured, Target(4, 256))
    assert projection.problem.machine.ranks == 32
    for other, expectation in projection.layouts:
        # Devices that were slower than predicted are slower there, too.
        assert expectation.seconds > other.prediction.seconds
    text = " ".join(describe_projection(projection))
    assert "rests on 1 measured layout(s)" in text
    assert "256 sequences per step" in text


def test_batch_that_ranks_cannot_share_is_answered() -> None:
    problem = make_problem(8, "H100", bf16=True, num_layers=1, num_query_groups=1, seq_length=1)
    belief = Belief(MEASURED_DEVICES)
    with pytest.raises(ConfigError, match="no layout is legal") as error:
        project(problem, belief, [], Target(7, 1))
    assert "batch=N" in str(error.value.hint)
