"""Ranks of ``soak.py``: random operations in groups that are created, left, destroyed and
initialized again.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import children
import psutil
import torch
import torch.distributed as dist
from soak_steps import DTYPES, START_FUNCTIONS, Check, Step

RANKS = 4
MAX_GROUPS = 6
"""Maximum number of groups at a time, in addition to the world."""
MAX_ELEMENTS_LOG2 = 18
"""Binary logarithm of the maximum number of elements of an operation."""
WARM_UP_STEPS = 40
BEGUN_LINE = "begun\n"
"""Line that a rank writes after its warm-up, or when it has failed in it."""


@dataclass(frozen=True)
class Attempt:
    """Parameters of the ranks of an attempt: of a round, or of its repetition after a kill."""

    seed: str
    seconds: float
    """Duration after the warm-up."""
    port: int
    """Port of the store, the same for all attempts of a round."""
    clusters: str
    expects_kill: bool
    """A rank will be killed."""
    has_leaves: bool
    """Ranks leave groups that others still call."""


@dataclass(frozen=True)
class Departure:
    """A member's record of a rank that left a group which the others still called."""

    number: int
    """Number of the departure in the attempt."""
    leaver: int
    time: float
    """Time of day at which the rank called the group for the last time, or left it."""
    error_time: float | None = None
    """Time of day of the error. None on the rank that left."""
    error: str = ""
    is_joint: bool = False
    """The error was raised in an operation that the leaver has called. It is right if another rank
    has failed the group in a later operation in the meantime.
    """


@dataclass
class RankActivity:
    """Random steps of a rank: operations, and the creation, departure from and end of groups. All
    ranks draw the same ones.
    """

    rank: int
    attempt: Attempt
    store: Any
    """Client of the store, used again at each initialization."""
    generator: random.Random
    """Generator with the same seed on all ranks."""
    changes_groups: bool = True
    """Groups are created, left and destroyed."""
    groups: list[tuple[Any, list[int]]] = field(default_factory=list)
    """Groups in addition to the world, with their members."""
    counts: Counter[str] = field(default_factory=Counter)
    departures: list[Departure] = field(default_factory=list)
    pending_checks: list[Check] = field(default_factory=list)

    def join(self) -> None:
        children.join_world(self.rank, RANKS, self.store, self.attempt.clusters)

    def step(self) -> None:
        """Run the next step."""
        choice = self.generator.random() if self.changes_groups else 1.0
        if choice < 0.1 and len(self.groups) < MAX_GROUPS:
            self.make_group()
        elif choice < 0.17 and self.groups:
            self.destroy(self.generator.randrange(len(self.groups)))
        elif choice < 0.2 and self.attempt.has_leaves:
            self.depart_from_group()
        elif choice < 0.22:
            self.reinitialize()
        else:
            self.run_operation()

    # -- operations

    def run_operation(self) -> None:
        """Start an operation. Finish it now or, together with others, in a later step."""
        group, members = self.generator.choice(self.all_groups())
        generator = random.Random(self.generator.random())
        is_asynchronous = self.generator.random() < 0.4
        self.counts["operations"] += 1
        if self.rank not in members:
            return
        self.pending_checks.append(
            self.start_operation(group, members, self.counts["operations"], generator)
        )
        if not is_asynchronous or len(self.pending_checks) > 8:
            self.finish_operations()

    def start_operation(
        self, group: Any, members: list[int], number: int, generator: random.Random
    ) -> Check:
        start_function, dtype = generator.choice(START_FUNCTIONS), generator.choice(DTYPES)
        count = int(2 ** generator.uniform(0, MAX_ELEMENTS_LOG2))
        index = members.index(self.rank)
        return start_function(Step(group, members, index, number, generator), count, dtype)

    def finish_operations(self) -> None:
        for check in self.pending_checks:
            check()
        self.pending_checks.clear()

    def all_groups(self) -> list[tuple[Any, list[int]]]:
        return [(dist.group.WORLD, list(range(RANKS))), *self.groups]

    # -- groups

    def make_group(self) -> None:
        # All ranks, so that a rank that is killed is a member of all groups.
        size = RANKS if self.attempt.expects_kill else self.generator.randint(2, RANKS)
        members = sorted(self.generator.sample(range(RANKS), size))
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

    def reinitialize(self) -> None:
        """Destroy the world and initialize it with the same store, up to three times, with or
        without groups and operations in between.
        """
        self.finish_operations()
        for _ in range(self.generator.randint(1, 3)):
            dist.destroy_process_group()
            self.groups.clear()
            self.join()
            self.counts["reinitializations"] += 1
            for _ in range(self.generator.randrange(3)):
                self.make_group()
            for _ in range(self.generator.randrange(3)):
                self.run_operation()
            self.finish_operations()

    def depart_from_group(self) -> None:
        """Let a rank leave a group, unused or used, that the others call until they fail. All other
        groups must work during and after that.
        """
        if not self.groups or self.generator.random() < 0.5:
            self.make_group()
            group, members = self.groups.pop()
        else:
            group, members = self.groups.pop(self.generator.randrange(len(self.groups)))
            self.finish_operations()
        generator = random.Random(self.generator.random())
        self.counts["leaves"] += 1
        for _ in range(self.generator.randrange(3)):  # in progress in the meantime
            self.run_operation()
        if self.rank in members:
            self.departures.append(self.run_departure(group, members, generator))
            if self.rank != self.departures[-1].leaver:
                dist.destroy_process_group(group)
        self.finish_operations()
        for other_group, other_members in self.all_groups():
            if self.rank in other_members:
                dist.barrier(other_group)

    def run_departure(self, group: Any, members: list[int], generator: random.Random) -> Departure:
        number, leaver = self.counts["leaves"], generator.choice(members)
        delays = {member: generator.choice((0.0, generator.uniform(0, 0.1))) for member in members}
        joint_operations = generator.randrange(4)
        # More than one without the leaver, because a broadcast, for example, may not need it.
        for i in itertools.count():
            if i == joint_operations:
                time.sleep(delays[self.rank])
            call_time = time.time()
            if i == joint_operations and self.rank == leaver:
                dist.destroy_process_group(group)
                break
            try:
                self.start_operation(group, members, i, random.Random(generator.random()))()
            except RuntimeError as error:
                if self.rank == leaver:
                    raise
                is_joint = i < joint_operations
                return Departure(number, leaver, call_time, time.time(), str(error), is_joint)
        return Departure(number, leaver, call_time)


def measure_resources() -> dict[str, float]:
    """Return threads, descriptors and MiB of memory of this process."""
    process = psutil.Process()
    memory = process.memory_info().rss / 2**20
    return {"threads": process.num_threads(), "descriptors": process.num_fds(), "MiB": memory}


def run_rank(attempt: Attempt, rank: int, output: int) -> None:
    """Run a rank, and write its result to the descriptor ``output`` as a line of JSON."""
    # A failed departure leaves operations of torch's batch_isend_irecv that were not started.
    warnings.filterwarnings("ignore", "Some coalesced collectives haven't been launched")
    store = children.connect_to_store(attempt.port)
    activity = RankActivity(rank, attempt, store, random.Random(attempt.seed))
    error_text, wrong_result, resources_before = "", "", {}
    has_begun = False
    try:
        activity.join()
        for _ in range(WARM_UP_STEPS):  # allocate resources that are created only once
            activity.step()
        activity.finish_operations()
        if attempt.expects_kill:
            # If a rank is killed before it comes to a new group, the others wait for the timeout.
            activity.changes_groups = False
        else:
            activity.destroy_all()
        resources_before = measure_resources()
        os.write(output, BEGUN_LINE.encode())
        has_begun = True
        end_time = time.monotonic() + attempt.seconds
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
    error_time = time.time()
    if not has_begun:
        os.write(output, BEGUN_LINE.encode())
    report = {
        "time": error_time,
        "error": error_text,
        "wrong": wrong_result,
        "counts": activity.counts,
        "departures": [asdict(departure) for departure in activity.departures],
        "before": resources_before,
        "after": measure_resources(),
    }
    os.write(output, (json.dumps(report) + "\n").encode())
    # An exit would be reported to ranks that have not detected the killed rank yet.
    signal.pause()
