#!/usr/bin/env python3
"""fsccl for hours: groups made and destroyed, random operations, killed ranks.

    tools/comm/soak.py --seconds 3600 --json soak.json
    tools/comm/soak.py --seed 7 --first 12 --rounds 1      # a round that failed, once more

In each round four ranks of this host, forked, join in clusters of a drawn shape; what is between
clusters goes by TCP over the loopback. All draw the same operations, types, sizes, roots and groups
from one seed, several under way at a time, and look at every result, for it is known what it must
be. In some rounds one of them gets SIGKILL at a drawn moment, and every other has to name it.

What a rank has of threads, descriptors and memory when its groups are gone must not grow with how
many there were.

Exits with 1 where anything was wrong; the line tells the seed and the round.
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

PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(PROJECT), str(Path(__file__).resolve().parent)]

import children  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from soak_steps import DTYPES, KINDS, Check, Step  # noqa: E402

import flagscale.comm.fsccl  # noqa: E402
from flagscale.bench.machine import facts  # noqa: E402

RANKS = 4
SHAPES = ("4", "2,2", "1,1,1,1", "3,1")
LIVE = 6
"""Groups that a rank keeps beside the world, at most."""
MOST = 18
"""Elements of an operation, as a power of two."""
SPARE = {"threads": LIVE + 2, "descriptors": 16, "MiB": 256.0}
"""By how much a rank may have grown though its groups are gone: workers that wait for the next one,
connections of the world that were not needed before, and what malloc keeps."""


# -- what ranks do ---------------------------------------------------------------------------------


@dataclass
class Life:
    """A rank's operations in groups that come and go."""

    rank: int
    chance: random.Random
    everyone: bool
    """Every group has all ranks, so that who dies is missed in all of them."""
    makes_groups: bool = True
    groups: list[tuple[Any, list[int]]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    under_way: list[Check] = field(default_factory=list)

    def step(self) -> None:
        """The next thing, which all ranks of the world draw alike."""
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
            self.settle()
        return None

    def settle(self) -> None:
        for check in self.under_way:
            check()
        self.under_way.clear()

    def make_group(self) -> None:
        world = dist.get_world_size()
        size = world if self.everyone else self.chance.randint(2, world)
        members = sorted(self.chance.sample(range(world), size))
        self.settle()
        made = dist.new_group(members, backend="fsccl", timeout=children.TIMEOUT)
        self.groups.append((made, members))
        self.counts["groups"] += 1

    def destroy(self, which: int) -> None:
        group, members = self.groups.pop(which)
        self.settle()
        if self.rank in members:
            dist.destroy_process_group(group)

    def leave(self) -> None:
        while self.groups:
            self.destroy(0)
        self.settle()


def resources() -> dict[str, float]:
    """Threads, descriptors and MiB of memory of this process."""
    me = psutil.Process()
    memory = me.memory_info().rss / 2**20
    return {"threads": me.num_threads(), "descriptors": me.num_fds(), "MiB": memory}


def live(seed: str, seconds: float, everyone: bool, rank: int, out: int) -> None:
    """A rank's round: what it found goes out as a line of JSON."""
    life = Life(rank, random.Random(seed), everyone)
    said, wrong, before = "", "", {}
    try:
        for _ in range(40):  # whatever is made once
            life.step()
        life.settle()
        if everyone:
            life.makes_groups = False  # torch waits for all in a store, and cannot know who is dead
        else:
            life.leave()
        before = resources()
        os.write(out, b"begun\n")
        end = time.monotonic() + seconds
        over = torch.zeros(1)
        while not over.item():
            for _ in range(25):
                life.step()
            life.settle()
            over.fill_(float(time.monotonic() > end))
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
        life.leave()
        dist.barrier()
    except AssertionError as error:
        wrong = f"operation {life.counts['operations']}: {error}"
    except RuntimeError as error:
        said = str(error)
    told = {"at": time.time(), "said": said, "wrong": wrong, "counts": life.counts}
    told |= {"before": before, "after": resources()}
    os.write(out, (json.dumps(told) + "\n").encode())
    signal.pause()  # leaving would be told to those who have yet to learn of a death


# -- rounds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """What was drawn, and what came of it."""

    number: int
    clusters: str
    killed: int | None
    operations: int
    groups: int
    named_after: float | None
    """Seconds from the kill until the last rank had raised."""
    grown_mib: float
    wrong: list[str]


def play(number: int, options: argparse.Namespace) -> Round:
    """One round, all of it drawn from the seed and its number."""
    seed = f"{options.seed}-{number}"
    chance = random.Random(seed)
    clusters = chance.choice(SHAPES)
    killed = chance.randrange(RANKS) if chance.random() < options.kills else None
    after = chance.uniform(0.0, options.round)
    keeper, port = children.start_store()
    started = [keeper]
    try:
        life = partial(live, seed, options.round, killed is not None)
        ranks = children.start_ranks(RANKS, port, clusters, life)
        started += ranks
        begun = [rank.words.readline() == "begun\n" for rank in ranks]
        at = 0.0
        if killed is not None and all(begun):
            time.sleep(after)
            at = time.time()
            os.kill(ranks[killed].pid, signal.SIGKILL)
        lines = {r: rank.words.readline() for r, rank in enumerate(ranks) if r != killed}
    finally:
        children.end(started)
    told = {rank: json.loads(line) for rank, line in lines.items() if line}
    wrong = [f"rank {rank} ended without a word" for rank in lines if rank not in told]
    wrong += list(problems(told, killed))
    last = max((one["at"] - at for one in told.values() if one["said"]), default=None)
    counts: dict[str, int] = next(iter(told.values()))["counts"] if told else {}
    grown = [one["after"]["MiB"] - one["before"]["MiB"] for one in told.values() if one["before"]]
    return Round(
        number,
        clusters,
        killed,
        counts.get("operations", 0),
        counts.get("groups", 0),
        None if killed is None or last is None else round(last, 3),
        round(max(grown, default=0.0), 1),
        wrong,
    )


def problems(told: dict[int, dict[str, Any]], killed: int | None) -> Iterator[str]:
    """What was not as it should be."""
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


def rounds(options: argparse.Namespace) -> Iterator[Round]:
    """One after the other until the time is over, or so many."""
    end = time.monotonic() + options.seconds
    number = options.first
    most = options.first + options.rounds if options.rounds else sys.maxsize
    while time.monotonic() < end and number < most:
        yield play(number, options)
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
    about = facts("flagscale", "torch")
    done: list[Round] = []
    for one in rounds(options):
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
