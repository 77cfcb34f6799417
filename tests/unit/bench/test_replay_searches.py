"""Tests of searches that are replayed without runs."""

from __future__ import annotations

from replay_searches import generate_grid, make_generated_problem, replay_search, summarize

from flagscale.config.tuner_schema import Tuner

SEEDS = range(8)


def test_winners_of_generated_grids_are_within_three_percent() -> None:
    problem = make_generated_problem("GPU, 2 ranks")
    replays = [replay_search(generate_grid(problem, seed), Tuner(), seed) for seed in SEEDS]
    summary = summarize(replays)
    assert summary["within_3_percent"] >= 0.95
    assert summary["share_of_layouts"] <= 0.5
    again = replay_search(generate_grid(problem, SEEDS[0]), Tuner(), SEEDS[0])
    assert again == replays[0]
