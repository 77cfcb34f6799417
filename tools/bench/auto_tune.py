#!/usr/bin/env python3
"""Compare the search of ``auto_tune`` with a measurement of all layouts, on a CPU or on GPUs.

For each experiment, a search runs first: its own command, in its own directory. All layouts of its
space are then measured in rounds, each in another random order, so that other programs disturb all
layouts alike. Later rounds leave out layouts that cannot be the best. A layout counts with the
fastest of its trials. At the end, the winner of the search and the best measured layout run by
turns, in new processes, which decides how much slower the winner is. The same is told of the winner
that the search had after trials for a quarter of the layouts, as if that had been its
``max_trials``. The grid of FlagScale, which tries each layout once, is judged by the first round
(:mod:`pruned_grid`).

    python tools/bench/auto_tune.py --minutes 40 --output docs/results/auto-tune-cpu.json
    python tools/bench/auto_tune.py --devices cuda --minutes 9.5 --only gpu-4k --output FILE

The output is written after each trial. With ``--directory``, the same command goes on with what was
measured before. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from pruned_grid import GridModel, list_grid, run_grid  # noqa: E402

from flagscale.bench import machine  # noqa: E402
from flagscale.cli_errors import run_command  # noqa: E402
from flagscale.config.arguments.layout_choices import (  # noqa: E402
    ARGUMENTS_OF_GROUPS,
    SEQUENCE_PARALLEL,
    TP,
)
from flagscale.config.arguments.spec.values import to_word  # noqa: E402
from flagscale.config.load import load  # noqa: E402
from flagscale.errors import ConfigError  # noqa: E402
from flagscale.files import read_json, write_atomic, write_json  # noqa: E402
from flagscale.launcher.layout import TUNER_ANSWER_FILE, TUNER_DIRECTORY  # noqa: E402
from flagscale.tune.problem import make_problem  # noqa: E402
from flagscale.tune.records import (  # noqa: E402
    CUT_SHORT,
    FAILED,
    MEASURED,
    TRIALS_FILE,
    Trial,
    read_trial,
)
from flagscale.tune.search import Search  # noqa: E402
from flagscale.tune.space import Layout, describe_setting, enumerate_space  # noqa: E402
from flagscale.tune.trial import WARMUP_STEPS, load_trial  # noqa: E402
from flagscale.tune.trial_processes import TrialProcesses  # noqa: E402

CONFIG = Path("examples/llama3/conf")
_LONGEST_TRIAL = 150
"""Seconds after which a trial is ended."""
BUDGET = 0.25
"""Trials per layout after which the search is judged as well."""
_LOG_CHARACTERS = 4000
_POLL_SECONDS = 0.2
_SHARE_OF_TURNS = 0.2
"""Most of a case's time that is kept for the turns at the end."""
_RULED_OUT = 1.25
"""A layout is not measured again if it takes this many times as long as the fastest."""
_DATA = {
    "mock_data": "true",
    "data_path": "null",
    "split": "null",
    "tokenizer_type": "NullTokenizer",
    "tokenizer_path": "null",
}


@dataclass(frozen=True)
class Case:
    """An experiment whose layouts are compared: overrides of an example, and the search space.

    ``search_share`` is the part of the case's time after which its search starts no trial, and
    ``weight`` the time of the case, relative to others.
    """

    name: str
    overrides: Mapping[str, Any]
    space: Mapping[str, Sequence[Any]]
    steps: int
    rounds: int
    turns: int
    search_share: float
    weight: float = 1.0

    def words(self, directory: Path) -> list[str]:
        """Return the overrides of the case with a directory for its runs."""
        space = ", ".join(
            f"{name}: [{', '.join(_word(value) for value in values)}]"
            for name, values in self.space.items()
        )
        return [
            *(f"{name}={value}" for name, value in {**_DATA, **self.overrides}.items()),
            f"exp_dir={directory}",
            f"++experiment.auto_tuner.space={{{space}}}",
            f"++experiment.auto_tuner.control.train_iters={self.steps}",
        ]


def _word(value: Any) -> str:
    return "null" if value is None else to_word(value)


_PLAIN: Mapping[str, Sequence[Any]] = {
    "use_distributed_optimizer": (True,),
    "optimizer_cpu_offload": (False,),
    "use_precision_aware_optimizer": (False,),
    "cpu_offloading_num_layers": (0,),
    "data_parallel_sharding_strategy": ("no_shard",),
    "num_layers_per_virtual_pipeline_stage": (None,),
}
"""Choices that the comparison leaves out: they save memory that these models do not need."""


def _cpu_case(
    name: str, ranks: int, space: Mapping[str, Sequence[Any]], weight: float, **sizes: Any
) -> Case:
    model = {
        "num_layers": 4,
        "hidden_size": 128,
        "ffn_hidden_size": 344,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "seq_length": 128,
        "max_position_embeddings": 1024,
        "vocab_size": 2048,
        "device": "cpu",
    }
    numbers = {"nproc_per_node": ranks, "global_batch_size": 16}
    space = {**_PLAIN, **space}
    return Case(name, {**model, **numbers, **sizes}, space, 8, 2, 3, 0.3, weight)


def _gpu_case(name: str, sequence: int, batch: int) -> Case:
    overrides = {
        "train": "8b",
        "train.model.num_layers": 8,
        "seq_length": sequence,
        "max_position_embeddings": sequence,
        "global_batch_size": batch,
        "nproc_per_node": 2,
        "distributed_backend": "nccl",
        "recompute_granularity": "null",
        "recompute_method": "null",
        "recompute_num_layers": "null",
        "train_samples": 1000 * batch,
    }
    return Case(name, overrides, _PLAIN, 6, 1, 1, 0.6)


_BOTH = {"sequence_parallel": (True, False)}
_FOUR_RANKS = {"micro_batch_size": (1, 2, 4, 8)}
_MIXTURE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 128}
CASES: Mapping[str, Sequence[Case]] = {
    "cpu": (
        _cpu_case("dense-2", 2, _BOTH, 1.0, seq_length=256),
        _cpu_case("dense-4", 4, _FOUR_RANKS, 2.0),
        _cpu_case("long-2", 2, _BOTH, 1.5, seq_length=384),
        _cpu_case("wide-4", 4, _FOUR_RANKS, 3.0, hidden_size=192),
        _cpu_case("mixture-2", 2, {}, 2.0, **_MIXTURE),
    ),
    "cuda": (_gpu_case("gpu-4k", 4096, 16), _gpu_case("gpu-8k", 8192, 8)),
}
"""The cases by kind of device. Those of ``cuda`` have eight layers of Llama-3-8B on two GPUs."""


@dataclass
class Measurements:
    """Seconds per step of all trials of a case, by layout: the median step of each trial.

    ``failures`` are first failures. ``turns`` are trials of the comparison at the end. The file
    lets a comparison go on.
    """

    path: Path
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    turns: dict[str, list[float]] = field(default_factory=dict)
    longest_trial: float = 0.0

    def __post_init__(self) -> None:
        if (record := read_json(self.path)) is not None:
            self.seconds, self.failures = record["seconds"], record["failures"]
            self.turns, self.longest_trial = record["turns"], record["longest_trial"]

    def add(self, trial: Trial, duration: float, *, is_turn: bool = False) -> None:
        """Add the result of a trial."""
        self.longest_trial = max(self.longest_trial, duration)
        if trial.state == FAILED:
            self.failures[trial.key] = trial.failure
        else:
            median = statistics.median(trial.step_seconds)
            self.seconds.setdefault(trial.key, []).append(median)
            if is_turn:
                self.turns.setdefault(trial.key, []).append(median)
        record = {name: value for name, value in vars(self).items() if name != "path"}
        write_json(self.path, record, durable=False)


class Comparison:
    """A search, and measurements of the other layouts of its space."""

    def __init__(self, case: Case, directory: Path, *, shares_processes: bool) -> None:
        self._case, self._directory = case, directory
        directory.mkdir(parents=True, exist_ok=True)
        self._shares_processes = shares_processes
        words = self._list_words("whole")
        self._experiment = load(PROJECT / CONFIG, "train", words, "plan").experiment
        self._problem = make_problem(self._experiment, probing=True)
        self.space = enumerate_space(self._problem)
        if not self.space.candidates:
            raise ConfigError(f"no layout of {case.name} fits {self._problem.machine.describe()}")
        self._measurements = Measurements(directory / "measurements.json")
        # Trials in the processes of another one have no directory.
        trials = (directory / "whole" / TUNER_DIRECTORY).glob("trial_*")
        self._number = max((int(path.name.removeprefix("trial_")) for path in trials), default=0)
        self._has_shown_log = False

    @property
    def _answer(self) -> dict[str, Any] | None:
        path = self._directory / "search" / TUNER_DIRECTORY / TUNER_ANSWER_FILE
        answer: dict[str, Any] | None = read_json(path)
        return answer

    def _list_words(self, directory: str) -> list[str]:
        return [
            *self._case.words(self._directory / directory),
            f"++experiment.auto_tuner.control.share_processes={_word(self._shares_processes)}",
            "action=auto_tune",
        ]

    def run(self, deadline: float) -> Iterator[None]:
        """Run the comparison until it is complete or at its deadline; yield after each trial."""
        most_for_turns = _SHARE_OF_TURNS * (deadline - time.monotonic())
        yield from self._search(deadline)
        for number in range(self._case.rounds):
            with TrialProcesses(_POLL_SECONDS) as processes:
                for layout in self._order_round(number):
                    if self._is_due(layout, number):
                        turns = 2 * self._case.turns * self._measurements.longest_trial
                        if self._exceeds(deadline - min(turns, most_for_turns)):
                            break
                        yield from self._measure(layout, deadline, processes)
        yield from self._take_turns(deadline)

    def _order_round(self, number: int) -> list[Layout]:
        """Return all layouts in the random order of a round. Those that the same processes can run
        follow each other.
        """
        generator = random.Random(number)
        groups: dict[tuple[Any, ...], list[Layout]] = {}
        for layout in generator.sample(self.space.candidates, len(self.space.candidates)):
            names = tuple(layout.setting[name] for name in ARGUMENTS_OF_GROUPS)
            groups.setdefault(names, []).append(layout)
        return [layout for group in groups.values() for layout in group]

    def _is_due(self, layout: Layout, number: int) -> bool:
        """Return whether a round has to measure a layout."""
        times = self._times()
        if layout.key in self._failures:
            return False
        if number == 0 and self._case.rounds == 1:
            return layout.key not in times
        measured = times.get(layout.key, ())
        if number and measured and min(measured) > _RULED_OUT * _fastest(times):
            return False
        return len(self._measurements.seconds.get(layout.key, ())) <= number

    def _take_turns(self, deadline: float) -> Iterator[None]:
        """Measure the winner and the best layout by turns."""
        pair = self._contestants()
        if pair is None or pair[0] == pair[1]:
            return
        layouts = {layout.key: layout for layout in self.space.candidates}
        for turn in range(self._case.turns):
            for name in pair if turn % 2 == 0 else pair[::-1]:
                if len(self._measurements.turns.get(name, ())) <= turn:
                    if self._exceeds(deadline):
                        return
                    with TrialProcesses(_POLL_SECONDS) as processes:
                        yield from self._measure(layouts[name], deadline, processes, is_turn=True)

    def _exceeds(self, deadline: float) -> bool:
        return time.monotonic() + self._measurements.longest_trial > deadline

    def _search(self, deadline: float) -> Iterator[None]:
        """Run the search, and yield every second while it runs."""
        if self._answer is not None:
            return
        limit = self._case.search_share * (deadline - time.monotonic())
        command = [
            *(sys.executable, str(PROJECT / "run.py")),
            *("--config-path", str(CONFIG), "--config-name", "train"),
            *(*self._list_words("search"), "json=true"),
            f"++experiment.auto_tuner.control.max_time={limit:.0f}",
            f"++experiment.auto_tuner.control.max_time_per_task={_LONGEST_TRIAL}",
            "++experiment.auto_tuner.control.interval=0.2",
        ]
        process = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                time.sleep(1)
                yield
        finally:
            if process.poll() is None:  # the search ends its trial
                process.terminate()
            process.wait()
        for trial in self._search_trials:
            self._show_log(trial)
            if trial.state == MEASURED:
                longest = max(self._measurements.longest_trial, trial.seconds)
                self._measurements.longest_trial = longest

    @property
    def _search_trials(self) -> list[Trial]:
        path = self._directory / "search" / TUNER_DIRECTORY / TRIALS_FILE
        record = read_json(path) or {"trials": ()}
        return [read_trial(entry) for entry in record["trials"]]

    @property
    def _searched(self) -> dict[str, list[float]]:
        """Median steps of the whole trials of the search, by layout."""
        medians: dict[str, list[float]] = {}
        for trial in self._search_trials:
            if trial.state == MEASURED:
                medians.setdefault(trial.key, []).append(statistics.median(trial.step_seconds))
        return medians

    @property
    def _failures(self) -> dict[str, str]:
        """First failures of layouts."""
        failed = [trial for trial in self._search_trials if trial.state == FAILED]
        return {trial.key: trial.failure for trial in failed} | self._measurements.failures

    def _measure(
        self,
        layout: Layout,
        deadline: float,
        processes: TrialProcesses,
        *,
        is_turn: bool = False,
    ) -> Iterator[None]:
        """Run one trial to its end, in the processes of the last one if they can run it."""
        self._number += 1
        run = processes.find_reusable(layout.setting) or 0
        trial = Trial(self._number, layout.setting, run=run)
        start = time.monotonic()
        experiment = load_trial(
            self._experiment,
            trial,
            self._problem.values["global_batch_size"],
            self._case.steps + WARMUP_STEPS,
            checking=False,
        )
        limit = min(max(deadline - start, 1.0), _LONGEST_TRIAL)
        trial = processes.run_trial(experiment, trial, seconds_limit=limit)
        if trial.state == FAILED and trial.run:
            print(f"  {layout.key} failed: {trial.failure}; again in new processes", flush=True)
            yield from self._measure(layout, deadline, processes)
            return
        duration = time.monotonic() - start
        self._measurements.add(trial, duration, is_turn=is_turn)
        self._show_log(trial)
        result = trial.failure or f"{statistics.median(trial.step_seconds):.4g} s/step"
        place = f", in the processes of trial {trial.run}" if trial.run else ""
        name = f"{self._case.name} [{trial.number}] {layout.key}"
        print(f"  {name}: {result} ({duration:.0f} s{place})", flush=True)
        yield

    def _show_log(self, trial: Trial) -> None:
        """Print the end of the log of the first trial that failed."""
        if trial.state == FAILED and trial.log and not self._has_shown_log:
            self._has_shown_log = True
            text = Path(trial.log).read_text(encoding="utf-8", errors="replace")
            print(f"log of {trial.key}: …{text[-_LOG_CHARACTERS:]}", flush=True)

    def _times(self) -> dict[str, list[float]]:
        """Return the median steps of all whole trials, by layout."""
        times = {name: list(values) for name, values in self._measurements.seconds.items()}
        for name, values in self._searched.items():
            times.setdefault(name, []).extend(values)
        return times

    def _contestants(self) -> tuple[str, str] | None:
        """Return the winner of the search and the best measured layout."""
        answer, times = self._answer, self._times()
        if answer is None or not times:
            return None
        return answer["best"], min(times, key=lambda name: min(times[name]))

    def _judge_budget(self, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Return the trials of the search within the budget, and the winner after them."""
        trials = self._search_trials[: int(BUDGET * len(self.space.candidates))]
        search = Search(self._problem, self.space, self._experiment.tuner, trials)
        record: dict[str, Any] = {"trials": len(trials)}
        if (winner := search.winner) is not None and winner.layout.key in times:
            record |= self._compare_with_fastest(winner.layout.key, times)
        return record

    @staticmethod
    def _compare_with_fastest(winner: str, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        return {"winner": winner, "slower": round(min(times[winner]) / _fastest(times) - 1, 4)}

    def _judge_grid(self, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Return the trials of FlagScale's grid and, if all of its layouts are measured, the winner
        by its single trials.
        """
        values, space = self._problem.values, dict(self._case.space)
        model = GridModel(
            self._problem.machine.ranks,
            values["num_layers"],
            values["global_batch_size"],
            values["num_moe_experts"] or 0,
        )
        legal = {layout.key for layout in self.space.candidates}
        grid = list_grid(model, space)
        if SEQUENCE_PARALLEL not in space:  # as the search has it
            grid = [s for s in grid if s[SEQUENCE_PARALLEL] == (s[TP] > 1)]
        first = {name: seconds[0] for name, seconds in self._measurements.seconds.items()}
        failures = self._failures
        memory_failures = [name for name, text in failures.items() if "memory" in text]
        count, winner = run_grid(grid, first, memory_failures)
        record: dict[str, Any] = {"trials": count}
        names = legal.intersection(map(describe_setting, grid))
        if winner is not None and names <= first.keys() | failures.keys():
            record |= self._compare_with_fastest(winner, times)
        return record

    def record(self) -> dict[str, Any]:
        """Return the result so far."""
        times, answer = self._times(), self._answer
        trials = [trial for trial in self._search_trials if trial.state != "running"]
        predicted = {o.key: o.prediction.seconds for o in self.space.candidates}
        cut_short = {
            trial.key: statistics.median(trial.step_seconds)
            for trial in trials
            if trial.state == CUT_SHORT and trial.key not in times
        }
        all_times = {**{name: min(values) for name, values in times.items()}, **cut_short}
        names = [name for name in predicted if name in all_times]
        result = {
            "shares_processes": self._shares_processes,
            "machine": self._problem.machine.describe(),
            "layouts": len(predicted),
            "measured_layouts": len(names),
            "search_trials": len(trials),
            "share_of_layouts": round(len(trials) / len(predicted), 3),
            "search_seconds": round(sum(trial.seconds for trial in trials)),
            "rank_correlation": rank_correlation(
                [predicted[name] for name in names], [all_times[name] for name in names]
            ),
            "spread": summarize_spread(times),
        }
        if answer is not None:
            result |= {"winner": answer["best"], "reason": answer["reason"]}
        if (pair := self._contestants()) is not None:
            turns = self._measurements.turns
            by_turns = all(turns.get(name) for name in pair)
            winner, best = (
                statistics.median(turns[name]) if by_turns else min(times[name]) for name in pair
            )
            result |= {
                "best_measured": pair[1],
                "slower": round(winner / best - 1, 4),
                "judged": "by turns" if by_turns else "by the fastest trials",
            }
        result["budget"] = self._judge_budget(times)
        result["grid"] = self._judge_grid(times)
        return {
            **result,
            "rows": [
                {
                    "layout": name,
                    "predicted_seconds": predicted[name],
                    "seconds": times.get(name, []),
                    "turns": self._measurements.turns.get(name, []),
                    "cut_short": cut_short.get(name),
                    "failure": self._failures.get(name),
                }
                for name in predicted
            ],
        }


def _fastest(times: Mapping[str, Sequence[float]]) -> float:
    return min(map(min, times.values()))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None for less than three pairs, or equal values."""
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return round(statistics.correlation(_ranks(first), _ranks(second)), 3)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal ones share the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def summarize_spread(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median and the largest difference of trials of one layout, relative to its fastest
    one.
    """
    spreads = [max(values) / min(values) - 1 for values in times.values() if len(values) > 1]
    if not spreads:
        return {}
    return {"median": round(statistics.median(spreads), 4), "largest": round(max(spreads), 4)}


def describe_result(name: str, record: Mapping[str, Any]) -> str:
    """Describe the result of a comparison in one line."""
    text = f"{name}: {record['measured_layouts']} of {record['layouts']} layouts measured"
    if "slower" in record:
        text += (
            f"; {record['winner']} is {record['slower']:.1%} slower than "
            f"{record['best_measured']} ({record['judged']})"
        )
    return (
        f"{text}; {record['search_trials']} trials of the search, {record['share_of_layouts']:.0%} "
        f"of all layouts, {record['search_seconds']} s; after a quarter: {record['budget']}; "
        f"FlagScale's grid: {record['grid']}; rank correlation {record['rank_correlation']}, "
        f"spread {record['spread']}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    names = [case.name for cases in CASES.values() for case in cases]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", choices=CASES, default="cpu", help="default: %(default)s")
    parser.add_argument("--only", action="append", choices=names, help="these experiments")
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="time for all (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="result file, JSON")
    parser.add_argument(
        "--new-processes", action="store_true", help="start new processes for each trial"
    )
    parser.add_argument("--directory", type=Path, help="directory of the runs, to go on later")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    directory = (options.directory or Path(tempfile.mkdtemp(prefix="auto-tune-"))).absolute()
    facts = machine.describe_machine("torch", "megatron-core")
    cases = [case for case in CASES[options.devices] if case.name in (options.only or names)]
    records: dict[str, Any] = {}
    for index, case in enumerate(cases):
        comparison = Comparison(
            case, directory / case.name, shares_processes=not options.new_processes
        )
        now = time.monotonic()
        share = case.weight / sum(other.weight for other in cases[index:])
        for _ in itertools.chain(comparison.run(now + share * (deadline - now)), (None,)):
            records[case.name] = comparison.record()
            if options.output is not None:
                text = json.dumps({**facts, "experiments": records}, indent=1)
                write_atomic(options.output, f"{text}\n")
        print(describe_result(case.name, records[case.name]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
