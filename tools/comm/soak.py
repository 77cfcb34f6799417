#!/usr/bin/env python3
"""Soak test of fsccl: groups created and destroyed, random operations, killed ranks.

    tools/comm/soak.py --seconds 3600 --json soak.json
    tools/comm/soak.py --seed 7 --first 12 --rounds 1      # repeat one round

In each round four forked ranks of this host are divided at random into clusters, which share
memory; traffic between clusters uses TCP over the loopback interface. All ranks draw the same
operations, types, sizes, roots and groups from one seed, have several operations in progress at a
time, and check every result. In some rounds one rank receives SIGKILL at a random time, and the
errors of the others must name it.

After its groups are destroyed, a rank must not have more threads, descriptors or memory than at
the beginning, except for a fixed amount.

Exits with 1 if anything was wrong; the printed line has the seed and the round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import children
import psutil
import torch
import torch.distributed as dist
from soak_steps import DTYPES, START_FUNCTIONS, Check, Step

import flagscale.comm.fsccl
from flagscale.bench.machine import describe_machine

RANKS = 4
CLUSTERS = ("4", "2,2", "1,1,1,1", "3,1")
MAX_GROUPS = 6
"""Maximum number of groups at a time, in addition to the world."""
MAX_ELEMENTS_LOG2 = 18
"""Binary logarithm of the maximum number of elements of an operation."""
ACCEPTED_GROWTH = {"threads": MAX_GROUPS + 2, "descriptors": 16, "MiB": 256.0}
"""Accepted growth of a rank's resources after its groups are destroyed: idle worker threads, late
connections of the world, and memory that malloc keeps.
"""


# -- a rank ----------------------------------------------------------------------------------------


@dataclass
class RankActivity:
    """Operations of a rank in groups that are created and destroyed."""

    rank: int
    generator: random.Random
    """Generator with the same seed on all ranks."""
    uses_all_ranks: bool
    """Every group has all ranks, so that a killed rank is a member of all groups."""
    makes_groups: bool = True
    """Groups are created and destroyed."""
    groups: list[tuple[Any, list[int]]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    pending_checks: list[Check] = field(default_factory=list)

    def step(self) -> None:
        """Run the next action: an operation, or the creation or end of a group. All ranks draw the
        same one.
        """
        choice = self.generator.random()
        if choice < 0.1 and len(self.groups) < MAX_GROUPS and self.makes_groups:
            return self.make_group()
        if choice < 0.17 and self.groups and self.makes_groups:
            return self.destroy(self.generator.randrange(len(self.groups)))
        world = [(dist.group.WORLD, list(range(dist.get_world_size())))]
        group, members = self.generator.choice([*world, *self.groups])
        start_operation, dtype = (
            self.generator.choice(START_FUNCTIONS),
            self.generator.choice(DTYPES),
        )
        count = int(2 ** self.generator.uniform(0, MAX_ELEMENTS_LOG2))
        runs_concurrently, step_generator = (
            self.generator.random() < 0.4,
            random.Random(self.generator.random()),
        )
        self.counts["operations"] += 1
        if self.rank not in members:
            return None
        index, number = members.index(self.rank), self.counts["operations"]
        self.pending_checks.append(
            start_operation(Step(group, members, index, number, step_generator), count, dtype)
        )
        if not runs_concurrently or len(self.pending_checks) > 8:
            self.finish_operations()
        return None

    def finish_operations(self) -> None:
        for check in self.pending_checks:
            check()
        self.pending_checks.clear()

    def make_group(self) -> None:
        world = dist.get_world_size()
        size = world if self.uses_all_ranks else self.generator.randint(2, world)
        members = sorted(self.generator.sample(range(world), size))
        self.finish_operations()
        group = dist.new_group(members, backend="fsccl", timeout=children.TIMEOUT)
        self.groups.append((group, members))
        self.counts["groups"] += 1

    def destroy(self, index: int) -> None:
        group, members = self.groups.pop(index)
        self.finish_operations()
        if self.rank in members:
            dist.destroy_process_group(group)

    def destroy_all(self) -> None:
        while self.groups:
            self.destroy(0)
        self.finish_operations()


def measure_resources() -> dict[str, float]:
    """Return threads, descriptors and MiB of memory of this process."""
    process = psutil.Process()
    memory = process.memory_info().rss / 2**20
    return {"threads": process.num_threads(), "descriptors": process.num_fds(), "MiB": memory}


def run_rank(seed: str, seconds: float, uses_all_ranks: bool, rank: int, output: int) -> None:
    """Run a rank's round, and write its result to the descriptor ``output`` as a line of JSON."""
    activity = RankActivity(rank, random.Random(seed), uses_all_ranks)
    error_text, wrong_result, resources_before = "", "", {}
    try:
        for _ in range(40):  # allocate resources that are created only once
            activity.step()
        activity.finish_operations()
        if uses_all_ranks:
            # torch creates groups through a store, where it would wait for a killed rank.
            activity.makes_groups = False
        else:
            activity.destroy_all()
        resources_before = measure_resources()
        os.write(output, b"begun\n")
        end_time = time.monotonic() + seconds
        is_over = torch.zeros(1)
        while not is_over.item():
            for _ in range(25):
                activity.step()
            activity.finish_operations()
            is_over.fill_(float(time.monotonic() > end_time))
            dist.all_reduce(is_over, op=dist.ReduceOp.MAX)
        activity.destroy_all()
        dist.barrier()
    except AssertionError as error:
        wrong_result = f"operation {activity.counts['operations']}: {error}"
    except RuntimeError as error:
        error_text = str(error)
    report = {
        "time": time.time(),
        "error": error_text,
        "wrong": wrong_result,
        "counts": activity.counts,
        "before": resources_before,
        "after": measure_resources(),
    }
    os.write(output, (json.dumps(report) + "\n").encode())
    # An exit would be reported to ranks that have not detected the killed rank yet.
    signal.pause()


# -- rounds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SoakRound:
    """Parameters and outcome of a round. Written to the JSON file."""

    number: int
    clusters: str
    killed: int | None
    operations: int
    groups: int
    named_after: float | None
    """Seconds from the kill until the last rank had raised an error."""
    grown_mib: float
    """Growth of a rank's memory in the round, of the rank with the largest."""
    wrong: list[str]


def run_round(number: int, options: argparse.Namespace) -> SoakRound:
    """Run one round, determined by the seed and its number."""
    seed = f"{options.seed}-{number}"
    generator = random.Random(seed)
    clusters = generator.choice(CLUSTERS)
    killed_rank = generator.randrange(RANKS) if generator.random() < options.kills else None
    kill_delay_seconds = generator.uniform(0.0, options.round)
    store_process, port = children.start_store()
    processes = [store_process]
    try:
        run_rank_of_round = partial(run_rank, seed, options.round, killed_rank is not None)
        ranks = children.start_ranks(RANKS, port, clusters, run_rank_of_round)
        processes += ranks
        has_begun = [rank.output.readline() == "begun\n" for rank in ranks]
        kill_time = 0.0
        if killed_rank is not None and all(has_begun):
            time.sleep(kill_delay_seconds)
            kill_time = time.time()
            os.kill(ranks[killed_rank].pid, signal.SIGKILL)
        lines = {r: rank.output.readline() for r, rank in enumerate(ranks) if r != killed_rank}
    finally:
        children.kill_children(processes)
    reports = {rank: json.loads(line) for rank, line in lines.items() if line}
    problems = [f"rank {rank} ended without a report" for rank in lines if rank not in reports]
    problems += list(list_problems(reports, killed_rank))
    detection_seconds = max(
        (report["time"] - kill_time for report in reports.values() if report["error"]), default=None
    )
    counts: dict[str, int] = next(iter(reports.values()))["counts"] if reports else {}
    growth = [
        report["after"]["MiB"] - report["before"]["MiB"]
        for report in reports.values()
        if report["before"]
    ]
    return SoakRound(
        number,
        clusters,
        killed_rank,
        counts.get("operations", 0),
        counts.get("groups", 0),
        None if killed_rank is None or detection_seconds is None else round(detection_seconds, 3),
        round(max(growth, default=0.0), 1),
        problems,
    )


def list_problems(reports: dict[int, dict[str, Any]], killed_rank: int | None) -> Iterator[str]:
    """Yield a description of each problem in the ranks' reports."""
    for rank, report in reports.items():
        if report["wrong"]:
            yield f"rank {rank}, {report['wrong']}"
        if killed_rank is not None:
            # A rank may have no error, if its round was over before it detected the kill.
            if report["error"] and f": rank {killed_rank} [" not in report["error"]:
                yield f"rank {rank} does not name rank {killed_rank}: {report['error']}"
            continue
        if report["error"]:
            yield f"rank {rank}: {report['error']}"
        if not report["before"] or report["error"] or report["wrong"]:
            continue
        for name, accepted_growth in ACCEPTED_GROWTH.items():
            before, after = report["before"][name], report["after"][name]
            if after > before + accepted_growth:
                yield f"rank {rank} has {after:.0f} {name}, had {before:.0f}"


def run_rounds(options: argparse.Namespace) -> Iterator[SoakRound]:
    """Yield rounds until the time is over, or their number is reached."""
    end_time = time.monotonic() + options.seconds
    number = options.first
    end_number = options.first + options.rounds if options.rounds else sys.maxsize
    while time.monotonic() < end_time and number < end_number:
        yield run_round(number, options)
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600, help="in all; %(default)s")
    parser.add_argument("--round", type=float, default=4, help="seconds of a round; %(default)s")
    parser.add_argument("--rounds", type=int, default=0, help="at most (as many as there is time)")
    parser.add_argument("--first", type=int, default=0, help="number of the first; %(default)s")
    parser.add_argument("--kills", type=float, default=0.4, help="share of rounds; %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file for all rounds")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)  # names of torch.distributed
    flagscale.comm.fsccl.load_extension()  # compiled before ranks are started
    machine = describe_machine("flagscale", "torch")
    rounds: list[SoakRound] = []
    for soak_round in run_rounds(options):
        rounds.append(soak_round)
        kill_text = f", rank {soak_round.killed} killed" if soak_round.killed is not None else ""
        detection_text = (
            f", named after {soak_round.named_after:.2f} s"
            if soak_round.named_after is not None
            else ""
        )
        print(
            f"round {soak_round.number}: clusters {soak_round.clusters}{kill_text}: "
            f"{soak_round.operations} operations, {soak_round.groups} groups{detection_text}, "
            f"{soak_round.grown_mib:+.1f} MiB",
            flush=True,
        )
        for problem in soak_round.wrong:
            command = f"--seed {options.seed} --first {soak_round.number} --rounds 1"
            print(f"    WRONG ({command}): {problem}")
        if options.json:
            record = {
                **machine,
                "seconds": options.seconds,
                "rounds": [asdict(completed) for completed in rounds],
            }
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    wrong_rounds = sum(bool(soak_round.wrong) for soak_round in rounds)
    detection_seconds = [
        soak_round.named_after for soak_round in rounds if soak_round.named_after is not None
    ]
    print(
        f"{len(rounds)} rounds, {sum(soak_round.operations for soak_round in rounds)} operations, "
        f"{sum(soak_round.groups for soak_round in rounds)} groups, {len(detection_seconds)} "
        f"kills, all named after {max(detection_seconds, default=0.0):.2f} s at most; "
        f"{wrong_rounds} rounds wrong"
    )
    return 1 if wrong_rounds else 0


if __name__ == "__main__":
    sys.exit(main())
