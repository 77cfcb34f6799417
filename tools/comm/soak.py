#!/usr/bin/env python3
"""Soak test of fsccl: groups created and destroyed, random operations, killed ranks.

    tools/comm/soak.py --seconds 3600 --json soak.json tools/comm/soak.py --seed 7 --first 12
    --rounds 1      # repeat one round

In each round four forked ranks of this host join in clusters of a random shape; traffic between
clusters uses TCP over the loopback. All ranks draw the same operations, types, sizes, roots and
groups from one seed, with several in progress at a time, and check every result. In some rounds
one rank receives SIGKILL at a random moment, and every other must name it.

A rank's threads, descriptors and memory after its groups are destroyed must not grow with their
number.

Exits with 1 if anything was wrong; the line has the seed and the round.
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
from soak_steps import DTYPES, KINDS, Check, Step

import flagscale.comm.fsccl
from flagscale.bench.machine import describe_machine

RANKS = 4
SHAPES = ("4", "2,2", "1,1,1,1", "3,1")
LIVE = 6
"""Largest number of groups that a rank keeps in addition to the world."""
MOST = 18
"""Largest number of elements of an operation, as a power of two."""
SPARE = {"threads": LIVE + 2, "descriptors": 16, "MiB": 256.0}
"""Accepted growth of a rank after its groups are destroyed: idle workers, connections of the
world that were not needed before, and memory that malloc keeps.
"""


# -- what ranks do ---------------------------------------------------------------------------------


@dataclass
class RankActivity:
    """Operations of a rank in groups that are created and destroyed."""

    rank: int
    chance: random.Random
    everyone: bool
    """Every group has all ranks, so that who dies is missed in all of them."""
    makes_groups: bool = True
    groups: list[tuple[Any, list[int]]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    under_way: list[Check] = field(default_factory=list)

    def step(self) -> None:
        """Run the next action, which all ranks of the world draw alike."""
        what = self.chance.random()
        if what < 0.1 and len(self.groups) < LIVE and self.makes_groups:
            return self.make_group()
        if what < 0.17 and self.groups and self.makes_groups:
            return self.destroy(self.chance.randrange(len(self.groups)))
        world = [(dist.group.WORLD, list(range(dist.get_world_size())))]
        group, members = self.chance.choice([*world, *self.groups])
        kind, dtype = self.chance.choice(KINDS), self.chance.choice(DTYPES)
        count = int(2 ** self.chance.uniform(0, MOST))
        together, own = self.chance.random() < 0.4, random.Random(self.chance.random())
        self.counts["operations"] += 1
        if self.rank not in members:
            return None
        me, number = members.index(self.rank), self.counts["operations"]
        self.under_way.append(kind(Step(group, members, me, number, own), count, dtype))
        if not together or len(self.under_way) > 8:
            self.finish_operations()
        return None

    def finish_operations(self) -> None:
        for check in self.under_way:
            check()
        self.under_way.clear()

    def make_group(self) -> None:
        world = dist.get_world_size()
        size = world if self.everyone else self.chance.randint(2, world)
        members = sorted(self.chance.sample(range(world), size))
        self.finish_operations()
        made = dist.new_group(members, backend="fsccl", timeout=children.TIMEOUT)
        self.groups.append((made, members))
        self.counts["groups"] += 1

    def destroy(self, which: int) -> None:
        group, members = self.groups.pop(which)
        self.finish_operations()
        if self.rank in members:
            dist.destroy_process_group(group)

    def leave(self) -> None:
        while self.groups:
            self.destroy(0)
        self.finish_operations()


def measure_resources() -> dict[str, float]:
    """Return threads, descriptors and MiB of memory of this process."""
    me = psutil.Process()
    memory = me.memory_info().rss / 2**20
    return {"threads": me.num_threads(), "descriptors": me.num_fds(), "MiB": memory}


def run_rank(seed: str, seconds: float, everyone: bool, rank: int, out: int) -> None:
    """Run a rank's round, and write its result as a line of JSON."""
    life = RankActivity(rank, random.Random(seed), everyone)
    said, wrong, before = "", "", {}
    try:
        for _ in range(40):  # whatever is made once
            life.step()
        life.finish_operations()
        if everyone:
            life.makes_groups = False  # torch waits for all in a store, and cannot know who is dead
        else:
            life.leave()
        before = measure_resources()
        os.write(out, b"begun\n")
        end = time.monotonic() + seconds
        over = torch.zeros(1)
        while not over.item():
            for _ in range(25):
                life.step()
            life.finish_operations()
            over.fill_(float(time.monotonic() > end))
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
        life.leave()
        dist.barrier()
    except AssertionError as error:
        wrong = f"operation {life.counts['operations']}: {error}"
    except RuntimeError as error:
        said = str(error)
    told = {"at": time.time(), "said": said, "wrong": wrong, "counts": life.counts}
    told |= {"before": before, "after": measure_resources()}
    os.write(out, (json.dumps(told) + "\n").encode())
    signal.pause()  # leaving would be told to those who have yet to learn of a death


# -- rounds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SoakRound:
    """Parameters and outcome of a round."""

    number: int
    clusters: str
    killed: int | None
    operations: int
    groups: int
    named_after: float | None
    """Seconds from the kill until the last rank had raised."""
    grown_mib: float
    wrong: list[str]


def run_round(number: int, options: argparse.Namespace) -> SoakRound:
    """Run one round, determined by the seed and its number."""
    seed = f"{options.seed}-{number}"
    chance = random.Random(seed)
    clusters = chance.choice(SHAPES)
    killed = chance.randrange(RANKS) if chance.random() < options.kills else None
    after = chance.uniform(0.0, options.round)
    keeper, port = children.start_store()
    started = [keeper]
    try:
        life = partial(run_rank, seed, options.round, killed is not None)
        ranks = children.start_ranks(RANKS, port, clusters, life)
        started += ranks
        begun = [rank.output.readline() == "begun\n" for rank in ranks]
        at = 0.0
        if killed is not None and all(begun):
            time.sleep(after)
            at = time.time()
            os.kill(ranks[killed].pid, signal.SIGKILL)
        lines = {r: rank.output.readline() for r, rank in enumerate(ranks) if r != killed}
    finally:
        children.kill_children(started)
    told = {rank: json.loads(line) for rank, line in lines.items() if line}
    wrong = [f"rank {rank} ended without a word" for rank in lines if rank not in told]
    wrong += list(list_problems(told, killed))
    last = max((one["at"] - at for one in told.values() if one["said"]), default=None)
    counts: dict[str, int] = next(iter(told.values()))["counts"] if told else {}
    grown = [one["after"]["MiB"] - one["before"]["MiB"] for one in told.values() if one["before"]]
    return SoakRound(
        number,
        clusters,
        killed,
        counts.get("operations", 0),
        counts.get("groups", 0),
        None if killed is None or last is None else round(last, 3),
        round(max(grown, default=0.0), 1),
        wrong,
    )


def list_problems(told: dict[int, dict[str, Any]], killed: int | None) -> Iterator[str]:
    """Return what was wrong."""
    for rank, one in told.items():
        if one["wrong"]:
            yield f"rank {rank}, {one['wrong']}"
        if killed is not None:
            # A rank whose round was over before it missed anybody says nothing.
            if one["said"] and f": rank {killed} [" not in one["said"]:
                yield f"rank {rank} does not name rank {killed}: {one['said']}"
            continue
        if one["said"]:
            yield f"rank {rank}: {one['said']}"
        if not one["before"] or one["said"] or one["wrong"]:
            continue
        for name, spare in SPARE.items():
            had, has = one["before"][name], one["after"][name]
            if has > had + spare:
                yield f"rank {rank} has {has:.0f} {name}, had {had:.0f}"


def run_rounds(options: argparse.Namespace) -> Iterator[SoakRound]:
    """Yield rounds until the time is over, or their number is reached."""
    end = time.monotonic() + options.seconds
    number = options.first
    most = options.first + options.rounds if options.rounds else sys.maxsize
    while time.monotonic() < end and number < most:
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
    about = describe_machine("flagscale", "torch")
    done: list[SoakRound] = []
    for one in run_rounds(options):
        done.append(one)
        end = f", rank {one.killed} killed" if one.killed is not None else ""
        took = f", named after {one.named_after:.2f} s" if one.named_after is not None else ""
        print(
            f"round {one.number}: clusters {one.clusters}{end}: {one.operations} operations, "
            f"{one.groups} groups{took}, {one.grown_mib:+.1f} MiB",
            flush=True,
        )
        for words in one.wrong:
            print(f"    WRONG (--seed {options.seed} --first {one.number} --rounds 1): {words}")
        if options.json:
            told = {**about, "seconds": options.seconds, "rounds": [asdict(row) for row in done]}
            options.json.write_text(json.dumps(told, indent=1) + "\n")
    bad = sum(bool(one.wrong) for one in done)
    kills = [one.named_after for one in done if one.named_after is not None]
    print(
        f"{len(done)} rounds, {sum(one.operations for one in done)} operations, "
        f"{sum(one.groups for one in done)} groups, {len(kills)} kills, all named after "
        f"{max(kills, default=0.0):.2f} s at most; {bad} rounds wrong"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
