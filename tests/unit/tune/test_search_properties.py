"""Properties of a search for any layouts, errors of predictions and noise."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.tuning import fake_layout, make_problem

from flagscale.config.tuner_schema import Tuner
from flagscale.tune.prediction import Prediction
from flagscale.tune.records import FAILED, MEASURED, Trial
from flagscale.tune.search import Search
from flagscale.tune.space import Layout, Space

SIZES = [
    {"tensor_model_parallel_size": tp, "micro_batch_size": batch}
    for tp in (1, 2)
    for batch in (1, 2, 4)
]
SECONDS = st.fixed_dictionaries(
    {"compute": st.floats(0.3, 1.0)},
    optional={"tensor": st.floats(0.01, 0.5), "pipeline": st.floats(0.01, 0.5)},
)
PREDICTIONS = st.lists(SECONDS, min_size=1, max_size=len(SIZES))
FACTORS = st.fixed_dictionaries(
    {cause: st.floats(0.3, 3.0) for cause in ("compute", "tensor", "pipeline")}
)


def list_layouts(predictions: Sequence[Mapping[str, float]]) -> list[Layout]:
    """Return layouts of different sizes, fastest first by prediction."""
    layouts = [
        replace(layout, prediction=Prediction(layout.prediction.memory, seconds))
        for seconds, sizes in zip(predictions, SIZES, strict=False)
        for layout in [fake_layout(**sizes)]
    ]
    return sorted(layouts, key=lambda layout: layout.prediction.seconds)


@dataclass
class Devices:
    """Devices on which layouts take some seconds, with noise; some fail."""

    seconds: Mapping[str, float]
    noise: float = 0.0
    failing: frozenset[str] = frozenset()
    seed: int = 0

    def search(self, layouts: Sequence[Layout], *, are_known: bool) -> tuple[Search, list[bool]]:
        """Return the search at its end, and which of its trials were repeats."""
        generator = random.Random(self.seed)
        problem = make_problem()
        problem = replace(problem, machine=replace(problem.machine, is_known=are_known))
        trials: list[Trial] = []
        repeats: list[bool] = []
        while True:
            search = Search(problem, Space(tuple(layouts), (), len(layouts), 0), Tuner(), trials)
            decision = search.decide(0.0)
            if decision.layout is None:
                return search, repeats
            assert len(trials) < 2 * len(layouts), "the search does not end"
            repeats.append(decision.is_repeat)
            trials.append(self._run(decision.layout, len(trials) + 1, generator))

    def _run(self, layout: Layout, number: int, generator: random.Random) -> Trial:
        if layout.key in self.failing:
            return Trial(number, layout.setting, FAILED, failure=f"h: rank 0 broke in {layout.key}")
        seconds = self.seconds[layout.key] * math.exp(generator.gauss(0.0, self.noise))
        return Trial(number, layout.setting, MEASURED, (seconds,) * 6)


@settings(max_examples=30, deadline=None)
@given(
    PREDICTIONS,
    FACTORS,
    st.floats(0.0, 0.1),
    st.sets(st.integers(0, len(SIZES) - 1)),
    st.booleans(),
    st.integers(0, 9),
)
def test_search_ends_and_repeats_nothing_needlessly(
    predictions: list[dict[str, float]],
    factors: dict[str, float],
    noise: float,
    failing: set[int],
    are_known: bool,
    seed: int,
) -> None:
    layouts = list_layouts(predictions)
    seconds = {o.key: o.prediction.correct(factors).seconds for o in layouts}
    failures = frozenset(o.key for i, o in enumerate(layouts) if i in failing)
    devices = Devices(seconds, noise, failures, seed)
    search, repeats = devices.search(layouts, are_known=are_known)
    first = [
        trial.key for trial, is_repeat in zip(search.trials, repeats, strict=True) if not is_repeat
    ]
    assert len(first) == len(set(first))
    counts = Counter(trial.key for trial in search.trials)
    assert all(count <= 2 for count in counts.values())
    assert all(counts[key] == 1 for key in failures & counts.keys())
    if search.winner is None:
        assert all(trial.state == FAILED for trial in search.trials)
        return
    measured: dict[str, list[float]] = {}
    for trial in search.trials:
        if trial.state == MEASURED:
            measured.setdefault(trial.key, []).append(trial.step_seconds[0])
    means = {key: sum(values) / len(values) for key, values in measured.items()}
    assert means[search.winner.layout.key] == min(means.values())
    assert counts[search.winner.layout.key] == 2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1.3, 5.0), max_size=len(SIZES) - 1), st.floats(0.5, 2.0))
def test_exact_predictions_need_one_layout(slower: list[float], speed: float) -> None:
    layouts = list_layouts([{"compute": factor} for factor in (1.0, *slower)])
    seconds = {layout.key: speed * layout.prediction.seconds for layout in layouts}
    search, repeats = Devices(seconds).search(layouts, are_known=True)
    assert search.winner is not None
    assert search.winner.layout is layouts[0]
    assert repeats == [False, True]
