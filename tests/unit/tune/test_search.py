"""Tests of the order of trials and of the end of a search."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.tuning import fake_layout, make_problem

from flagscale.config.tuner_schema import Tuner, TunerAlgorithm, TunerControl
from flagscale.tune.records import CUT_SHORT, FAILED, MEASURED, Timing, Trial
from flagscale.tune.search import Search, takes_at_least
from flagscale.tune.space import Layout, Space, enumerate_space

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def make_search(layouts: list[Layout], trials: list[Trial], tuner: Tuner | None = None) -> Search:
    problem = make_problem()
    machine = replace(problem.machine, is_known=True)
    space = Space(tuple(layouts), (), len(layouts), 0)
    return Search(replace(problem, machine=machine), space, tuner or Tuner(), trials)


def trial_of(layout: Layout, seconds: float | None, number: int = 1, **changes: Any) -> Trial:
    """Return a trial with a measured time, or a failed one."""
    trial = Trial(number, layout.setting, MEASURED, (seconds,) * 5 if seconds else ())
    trial = trial if seconds else replace(trial, state=FAILED, failure="h: rank 0 broke")
    return replace(trial, **changes)


def test_the_fastest_by_prediction_is_tried_first() -> None:
    layouts = [fake_layout(1.0), fake_layout(1.1, micro_batch_size=2)]
    assert make_search(layouts, []).decide(0).layout is layouts[0]


def test_search_ends_when_nothing_left_can_win() -> None:
    layouts = [fake_layout(1.0), fake_layout(3.0, micro_batch_size=2)]
    trials = [trial_of(layouts[0], 1.0, 1), trial_of(layouts[0], 1.0, 2)]
    decision = make_search(layouts, trials).decide(0)
    assert decision.layout is None
    assert "none of the other 1 layouts is faster" in decision.reason


def test_the_best_is_repeated_before_the_end() -> None:
    layouts = [fake_layout(1.0), fake_layout(3.0, micro_batch_size=2)]
    decision = make_search(layouts, [trial_of(layouts[0], 1.0)]).decide(0)
    assert (decision.layout, decision.is_repeat) == (layouts[0], True)


CHEAP = {"as good": (1.0, 0), "much worse": (2.0, 1)}


@pytest.mark.parametrize(("seconds", "expected"), CHEAP.values(), ids=CHEAP)
def test_layouts_that_need_no_new_processes_are_preferred(seconds: float, expected: int) -> None:
    tried = fake_layout(1.2)
    cheap = fake_layout(seconds, micro_batch_size=2)
    other = fake_layout(1.0, tensor_model_parallel_size=2)
    search = make_search([tried, cheap, other], [trial_of(tried, 1.2)])
    assert search.decide(0, lambda layout: layout is cheap).layout is (cheap, other)[expected]


def test_a_grid_tries_every_layout() -> None:
    layouts = [fake_layout(1.0), fake_layout(9.0, micro_batch_size=2)]
    tuner = Tuner(algo=TunerAlgorithm(name="grid"))
    search = make_search(layouts, [trial_of(layouts[0], 1.0)], tuner)
    assert search.decide(0).layout is layouts[1]
    assert not search.is_hopeless(Timing(99.0, 0.01, 5))


LIMITS = {
    "trials": (TunerControl(max_trials=1), "1 trials"),
    "time": (TunerControl(max_time=60), "60 s"),
}


@pytest.mark.parametrize(("control", "reason"), LIMITS.values(), ids=LIMITS)
def test_limits_end_the_search(control: TunerControl, reason: str) -> None:
    layouts = [fake_layout(1.0), fake_layout(1.0, micro_batch_size=2)]
    search = make_search(layouts, [trial_of(layouts[0], 1.0)], Tuner(control=control))
    decision = search.decide(61)
    assert decision.layout is None
    assert reason in decision.reason


def test_a_failed_trial_is_no_measurement() -> None:
    layouts = [fake_layout(1.0), fake_layout(1.0, micro_batch_size=2)]
    search = make_search(layouts, [trial_of(layouts[0], None)])
    assert (search.results, search.winner) == ([], None)
    assert search.decide(0).layout is layouts[1]


def test_one_lack_of_memory_proves_others() -> None:
    small = fake_layout(1.0, 4e9, micro_batch_size=4)
    same = fake_layout(1.0, 2e9, micro_batch_size=2)
    larger = fake_layout(0.9, 3e9, micro_batch_size=8)  # against the calculation
    saving = fake_layout(1.2, 3e9, micro_batch_size=8, **FULL)
    failed = trial_of(small, None, ran_out_of_memory=True)
    search = make_search([larger, small, same, saving], [failed])
    assert search.remaining == [same, saving]
    assert search.proven_too_large == [larger]
    assert search.expected[0][1] is same
    # The calculation is right about the order of layouts with other sizes.
    heavy = fake_layout(0.5, 5e9, pipeline_model_parallel_size=2)
    assert make_search([heavy, small, same], [failed]).remaining == [same]


PROOFS = {
    "larger": ({"micro_batch_size": 8}, {"micro_batch_size": 4}, True),
    "smaller": ({"micro_batch_size": 2}, {"micro_batch_size": 4}, False),
    "saves-more": ({"micro_batch_size": 8, **FULL}, {"micro_batch_size": 4}, False),
    "saves-less": ({"micro_batch_size": 4}, {"micro_batch_size": 4, **FULL}, True),
    "unsharded": (
        {"data_parallel_sharding_strategy": "no_shard"},
        {"data_parallel_sharding_strategy": "optim_grads_params"},
        True,
    ),
    "other-sizes": ({"pipeline_model_parallel_size": 2}, {}, False),
}


@pytest.mark.parametrize(("own", "failed", "expected"), PROOFS.values(), ids=PROOFS)
def test_proof_of_memory(own: dict[str, Any], failed: dict[str, Any], expected: bool) -> None:
    assert takes_at_least(fake_layout(**own).setting, fake_layout(**failed).setting) is expected


def test_first_trials_that_fail_alike_end_the_search() -> None:
    layouts = [fake_layout(1.0 + n, micro_batch_size=2**n) for n in range(4)]
    trials = [trial_of(layout, None, n) for n, layout in enumerate(layouts[:2], 1)]
    trials[1] = replace(trials[1], failure=trials[0].failure.replace("rank 0", "rank 1"))
    decision = make_search(layouts, trials).decide(0)
    assert decision.layout is None
    assert "failed in the same way" in decision.reason
    trials[1] = replace(trials[1], failure="h: rank 0 broke otherwise")
    assert make_search(layouts, trials).decide(0).layout is layouts[2]


def test_a_trial_is_cut_short_only_if_both_intervals_agree() -> None:
    layouts = [fake_layout(1.0)]
    search = make_search(layouts, [trial_of(layouts[0], 1.0)])
    assert search.is_hopeless(Timing(1.5, 0.01, 5))
    assert not search.is_hopeless(Timing(1.5, 0.2, 5))
    assert not search.is_hopeless(Timing(1.01, 0.01, 5))


def test_layouts_that_were_cut_short_never_win() -> None:
    layouts = [fake_layout(1.0), fake_layout(1.0, micro_batch_size=2)]
    trials = [
        trial_of(layouts[0], 2.0),
        trial_of(layouts[1], 1.0, 2, state=CUT_SHORT),
    ]
    search = make_search(layouts, trials)
    assert search.winner is not None
    assert search.winner.layout is layouts[0]


def test_memory_has_priority_among_fast_layouts() -> None:
    fast = fake_layout(1.0, 8e9)
    lean = fake_layout(1.03, 4e9, micro_batch_size=2)
    slow = fake_layout(2.0, 1e9, micro_batch_size=4)
    trials = [
        trial_of(layout, seconds, number)
        for number, (layout, seconds) in enumerate(((fast, 1.0), (lean, 1.03), (slow, 2.0)), 1)
    ]
    tuner = Tuner(algo=TunerAlgorithm(priority="memory"))
    winner = make_search([fast, lean, slow], trials, tuner).winner
    assert winner is not None
    assert winner.layout is lean


def test_search_of_layouts_of_which_some_offload_layers() -> None:
    sizes = {"hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
    sizes |= {"num_layers": 32, "num_query_groups": 8, "seq_length": 8192, "vocab_size": 128256}
    problem = make_problem(2, "NVIDIA H100 80GB HBM3", bf16=True, **sizes)
    space = enumerate_space(problem)
    counts = {layout.setting["cpu_offloading_num_layers"] for layout in space.candidates}
    assert 0 in counts
    assert len(counts) > 1
    trial = trial_of(space.candidates[0], 10.0)
    assert Search(problem, space, Tuner(), [trial]).decide(0).layout is not None
