#!/usr/bin/env python3
"""Soak test of fsccl: random operations and groups, ranks that leave or are killed, restarts.

    tools/comm/soak.py --seconds 3600 --json soak.json
    tools/comm/soak.py --seed 7 --first 12 --rounds 1      # repeat one round

In each round four forked ranks of this host are divided at random into clusters, which share
memory; traffic between clusters uses TCP over the loopback interface. All ranks draw the same
operations, types, sizes, roots and groups from one seed, have several operations in progress at a
time, and check every result. Now and then they destroy the default group, and initialize it again
with the same store.

In some rounds ranks leave groups that the others still call. The errors of the others must name the
rank that left, and all other groups must go on to work.

In some rounds one rank receives SIGKILL at a random time: while the ranks meet, or during
operations, when the errors of the others must name it. Then all ranks are started again with the
same store, as torchrun does, and must work.

After its groups are destroyed, a rank must not have more threads, descriptors or memory than at
the beginning, except for a fixed amount.

Exits with 1 if anything was wrong; the printed line has the seed and the round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import children
from soak_ranks import BEGUN_LINE, MAX_GROUPS, RANKS, Attempt, run_rank

from flagscale.bench.machine import describe_machine

CLUSTERS = ("4", "2,2", "1,1,1,1", "3,1")
ACCEPTED_GROWTH = {"threads": MAX_GROUPS + 2, "descriptors": 16, "MiB": 256.0}
"""Accepted growth of a rank's resources after its groups are destroyed: idle worker threads, late
connections of the world, and memory that malloc keeps.
"""
PATIENCE_SECONDS = 2 * children.TIMEOUT.total_seconds()
"""Time after which a rank that should have reported hangs. Operations time out before."""
MEETING_SECONDS = 0.5
"""Maximum life of a rank that is killed while the ranks meet."""

Report = dict[str, Any]
"""Report of a rank, see :func:`soak_ranks.run_rank`."""


@dataclass
class Kill:
    """A kill of one rank. Written to the JSON file."""

    rank: int
    is_in_meeting: bool
    """The rank is killed while the ranks meet and warm up. Otherwise during operations."""
    delay_seconds: float
    """Seconds since the start of the ranks, or since the end of the warm-up."""
    survival_seconds: float
    """Time from a kill in a meeting until all other ranks are killed, too. They do not have to
    detect it in this time.
    """
    named_after: float | None = None
    """Seconds from a kill during operations until the last rank had raised an error."""


@dataclass
class SoakRound:
    """Parameters and outcome of a round. Written to the JSON file."""

    number: int
    clusters: str
    kills: list[Kill]
    """After each of them, the ranks are started again."""
    operations: int = 0
    groups: int = 0
    leaves: int = 0
    reinitializations: int = 0
    restarts: int = 0
    named_after: float | None = None
    """Maximum of the kills."""
    left_after: float | None = None
    """Maximum number of seconds from a rank's departure from a group until another rank raised an
    error, see :func:`measure_departures`.
    """
    grown_mib: float = 0.0
    """Growth of a rank's memory in the round, of the rank with the largest."""
    wrong: list[str] = field(default_factory=list)


# -- ranks -----------------------------------------------------------------------------------------


def run_ranks(attempt: Attempt, kill: Kill | None) -> tuple[dict[int, Report], float]:
    """Start the ranks, and kill one of them if there is a ``kill``. Return the reports of the
    others, by rank, and the time of day of the kill.
    """
    ranks = [children.fork_child(partial(run_rank, attempt, rank)) for rank in range(RANKS)]
    kill_time = 0.0
    try:
        limit = attempt.seconds + PATIENCE_SECONDS
        if kill is not None:
            if kill.is_in_meeting:
                limit = kill.survival_seconds
            else:
                await_warm_up(ranks)
            time.sleep(kill.delay_seconds)
            kill_time = time.time()
            os.kill(ranks[kill.rank].pid, signal.SIGKILL)
        end_time = time.monotonic() + limit
        reports = {
            rank: read_report(process, end_time)
            for rank, process in enumerate(ranks)
            if kill is None or rank != kill.rank
        }
    finally:
        children.kill_children(ranks)
    return {rank: report for rank, report in reports.items() if report is not None}, kill_time


def await_warm_up(ranks: Sequence[children.ChildProcess]) -> None:
    """Wait until all ranks have finished their warm-up, or failed in it."""
    for process in ranks:
        with contextlib.suppress(TimeoutError):  # there will be no report either
            process.output.readline(PATIENCE_SECONDS)


def read_report(process: children.ChildProcess, end_time: float) -> Report | None:
    """Return the report of a rank. None if it hangs, or ends without a report."""
    line = BEGUN_LINE
    with contextlib.suppress(TimeoutError):
        while line == BEGUN_LINE:
            line = process.output.readline(max(0.0, end_time - time.monotonic()))
        return dict(json.loads(line)) if line else None
    return None


# -- rounds ----------------------------------------------------------------------------------------


def run_round(number: int, options: argparse.Namespace) -> SoakRound:
    """Run one round, determined by the seed and its number."""
    seed = f"{options.seed}-{number}"
    generator = random.Random(seed)
    soak_round = SoakRound(number, generator.choice(CLUSTERS), draw_kills(generator, options))
    has_leaves = generator.random() < options.leaves
    store_process, port = children.start_store()
    try:
        for index, kill in enumerate([*soak_round.kills, None]):
            attempt = Attempt(
                seed if index == 0 else f"{seed}-{index}",
                options.round,
                port,
                soak_round.clusters,
                expects_kill=kill is not None,
                has_leaves=has_leaves,
            )
            reports, kill_time = run_ranks(attempt, kill)
            problems = list_problems(reports, kill)
            problems += add_measurements(soak_round, reports, kill, kill_time, options.limit)
            prefix = f"after restart {index}: " if index else ""
            soak_round.wrong += [prefix + problem for problem in problems]
            soak_round.restarts += index > 0
    finally:
        children.kill_children([store_process])
    return soak_round


def draw_kills(generator: random.Random, options: argparse.Namespace) -> list[Kill]:
    """Draw the kills of a round: none, or one to three."""
    kills: list[Kill] = []
    if generator.random() >= options.kills:
        return kills
    for _ in range(generator.choice((1, 1, 2, 3))):
        is_in_meeting = generator.random() < 0.5
        # early ones are more frequent, because the meeting is at the beginning
        meeting_delay = MEETING_SECONDS * generator.random() ** 2
        delay = meeting_delay if is_in_meeting else generator.uniform(0.0, options.round)
        survival_seconds = generator.uniform(0.0, 0.5)
        kills.append(Kill(generator.randrange(RANKS), is_in_meeting, delay, survival_seconds))
    return kills


def add_measurements(
    soak_round: SoakRound,
    reports: dict[int, Report],
    kill: Kill | None,
    kill_time: float,
    limit: float,
) -> list[str]:
    """Add counts, delays and growth of an attempt to its round. Return a description of each delay
    above the limit.
    """
    problems = []
    # If one was killed, some ranks have come further than others.
    for name in ("operations", "groups", "leaves", "reinitializations"):
        count = max((report["counts"].get(name, 0) for report in reports.values()), default=0)
        setattr(soak_round, name, getattr(soak_round, name) + count)
    for report in reports.values():
        if report["before"]:
            growth = round(report["after"]["MiB"] - report["before"]["MiB"], 1)
            soak_round.grown_mib = max(soak_round.grown_mib, growth)
    if kill is None or not kill.is_in_meeting:
        for delay, description in measure_departures(reports):
            soak_round.left_after = max(soak_round.left_after or 0.0, round(delay, 3))
            if delay > limit:
                problems.append(f"{delay:.2f} s until {description}")
    if kill is not None and not kill.is_in_meeting:
        times = [report["time"] for report in reports.values() if report["error"]]
        if times:
            kill.named_after = round(max(times) - kill_time, 3)
            soak_round.named_after = max(soak_round.named_after or 0.0, kill.named_after)
            if kill.named_after > limit:
                problems.append(f"rank {kill.rank} was named after {kill.named_after:.2f} s")
    return problems


def measure_departures(reports: dict[int, Report]) -> Iterator[tuple[float, str]]:
    """Yield the time until each error for a departure, with a description. It begins when the rank
    has left and all others call the group: before that, ranks may wait for each other.
    """
    begin_times: dict[int, float] = {}
    for report in reports.values():
        for departure in report["departures"]:
            number = departure["number"]
            begin_times[number] = max(begin_times.get(number, 0.0), departure["time"])
    for rank, report in reports.items():
        for departure in report["departures"]:
            if departure["error_time"] is not None:
                delay = departure["error_time"] - begin_times[departure["number"]]
                yield (
                    max(0.0, delay),
                    f"rank {rank} raised an error for departure {departure['number']}: "
                    f"{departure['error']}",
                )


# -- checks ----------------------------------------------------------------------------------------


def list_problems(reports: dict[int, Report], kill: Kill | None) -> list[str]:
    """Return a description of each problem in the ranks' reports."""
    problems: list[str] = []
    for rank in range(RANKS):
        if rank in reports:
            problems += list_report_problems(rank, reports[rank], kill)
        elif kill is None or (rank != kill.rank and not kill.is_in_meeting):
            problems.append(f"rank {rank} hangs, or ended without a report")
    if kill is None or not kill.is_in_meeting:
        problems += list_early_errors(reports)
    return problems


def list_report_problems(rank: int, report: Report, kill: Kill | None) -> Iterator[str]:
    if report["wrong"]:
        yield f"rank {rank}, {report['wrong']}"
    if kill is not None:
        # A rank may have no error, if its round was over before it detected the kill.
        if report["error"] and f": rank {kill.rank} [" not in report["error"]:
            yield f"rank {rank} does not name rank {kill.rank}: {report['error']}"
    elif report["error"]:
        yield f"rank {rank}: {report['error']}"
    elif report["before"] and not report["wrong"]:
        yield from list_growth(rank, report["before"], report["after"])
    if kill is None or not kill.is_in_meeting:
        yield from list_departure_problems(rank, report["departures"])


def list_growth(rank: int, before: dict[str, float], after: dict[str, float]) -> Iterator[str]:
    for name, accepted_growth in ACCEPTED_GROWTH.items():
        if after[name] > before[name] + accepted_growth:
            yield f"rank {rank} has {after[name]:.0f} {name}, had {before[name]:.0f}"


def list_departure_problems(rank: int, departures: list[dict[str, Any]]) -> Iterator[str]:
    for departure in departures:
        leaver, error = departure["leaver"], departure["error"]
        # the place in the group may follow the rank
        pattern = rf": rank {leaver} (\(\d+ in the group\) )?\[[^]]*\] has left the group$"
        if departure["error_time"] is not None and not re.search(pattern, error):
            yield f"rank {rank} does not name rank {leaver}, which has left: {error}"


def list_early_errors(reports: dict[int, Report]) -> Iterator[str]:
    """Describe errors in operations that the leaver has called, too, in groups in which no rank has
    come to a later operation.
    """
    departures = [
        departure
        for report in reports.values()
        for departure in report["departures"]
        if departure["error_time"] is not None
    ]
    failed_later = {departure["number"] for departure in departures if not departure["is_joint"]}
    for departure in departures:
        number = departure["number"]
        if number not in failed_later:
            yield f"departure {number} fails an earlier operation: {departure['error']}"


# -- command ---------------------------------------------------------------------------------------


def run_rounds(options: argparse.Namespace) -> Iterator[SoakRound]:
    """Yield rounds until the time is over, or their number is reached."""
    end_time = time.monotonic() + options.seconds
    number = options.first
    end_number = options.first + options.rounds if options.rounds else sys.maxsize
    while time.monotonic() < end_time and number < end_number:
        yield run_round(number, options)
        number += 1


def describe_round(soak_round: SoakRound) -> str:
    """Return a line about a round."""
    parts = [f"clusters {soak_round.clusters}"]
    for kill in soak_round.kills:
        moment = " in a meeting" if kill.is_in_meeting else ""
        named = f", named after {kill.named_after:.2f} s" if kill.named_after is not None else ""
        parts.append(f"rank {kill.rank} killed{moment}{named}")
    left_text = f" (after {soak_round.left_after:.2f} s)" if soak_round.left_after else ""
    parts.append(
        f"{soak_round.operations} operations, {soak_round.groups} groups, "
        f"{soak_round.leaves} leaves{left_text}, "
        f"{soak_round.reinitializations} re-initializations, {soak_round.grown_mib:+.1f} MiB"
    )
    return f"round {soak_round.number}: {'; '.join(parts)}"


def summarize(rounds: Sequence[SoakRound]) -> dict[str, Any]:
    """Return the sums and maxima of all rounds."""
    kills = [kill for soak_round in rounds for kill in soak_round.kills]
    return {
        "operations": sum(soak_round.operations for soak_round in rounds),
        "groups": sum(soak_round.groups for soak_round in rounds),
        "kills": len(kills),
        "kills_in_meetings": sum(kill.is_in_meeting for kill in kills),
        "named_after": max((soak_round.named_after or 0.0 for soak_round in rounds), default=0.0),
        "leaves": sum(soak_round.leaves for soak_round in rounds),
        "left_after": max((soak_round.left_after or 0.0 for soak_round in rounds), default=0.0),
        "reinitializations": sum(soak_round.reinitializations for soak_round in rounds),
        "restarts": sum(soak_round.restarts for soak_round in rounds),
        "wrong_rounds": sum(bool(soak_round.wrong) for soak_round in rounds),
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600, help="in all; %(default)s")
    parser.add_argument("--round", type=float, default=4, help="seconds of a round; %(default)s")
    parser.add_argument("--rounds", type=int, default=0, help="at most (as many as there is time)")
    parser.add_argument("--first", type=int, default=0, help="number of the first; %(default)s")
    parser.add_argument(
        "--kills", type=float, default=0.4, help="share of rounds with kills; %(default)s"
    )
    parser.add_argument(
        "--leaves", type=float, default=0.6, help="share of rounds with leaves; %(default)s"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=5.0,
        help="longest accepted delay, in seconds, until a kill or leave is detected; 0.5 is right "
        "for an idle machine; %(default)s",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file for all rounds")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    warnings.filterwarnings("ignore", category=FutureWarning)  # names of torch.distributed
    children.load_extension()
    machine = describe_machine("flagscale", "torch")
    rounds: list[SoakRound] = []
    for soak_round in run_rounds(options):
        rounds.append(soak_round)
        print(describe_round(soak_round), flush=True)
        for problem in soak_round.wrong:
            command = f"--seed {options.seed} --first {soak_round.number} --rounds 1"
            print(f"    WRONG ({command}): {problem}", flush=True)
        if options.json:
            record = {
                **machine,
                "seconds": options.seconds,
                **summarize(rounds),
                "rounds": [asdict(completed) for completed in rounds],
            }
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    total = summarize(rounds)
    print(
        "{n} rounds, {operations} operations, {groups} groups; {kills} kills, {kills_in_meetings} "
        "in meetings, the others named after {named_after:.2f} s at most; {restarts} restarts; "
        "{leaves} leaves, detected after {left_after:.2f} s at most; {reinitializations} "
        "re-initializations; {wrong_rounds} rounds wrong".format(n=len(rounds), **total)
    )
    return 1 if total["wrong_rounds"] else 0


if __name__ == "__main__":
    sys.exit(main())
