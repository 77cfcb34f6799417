"""Explanation of a hang from the flight records and stacks of all ranks. Nothing is changed; source
lines of stacks are read from files.

Ranks wait for ranks: a rank that is in a collective waits for every member of the group that has
not entered it, and a receiver waits for its sender. The rank that others wait for and that waits
for nobody is the cause. If there is none, ranks wait for each other in a cycle (a deadlock): two
groups are used in different orders, or a rank uses the wrong group. Ranks that have entered the
same collective with different operations, types or sizes are a mismatch.

A rank whose record is missing (its process is stopped or has ended, or it does not answer) is
treated as one that has entered nothing.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flagscale.flight_records import (
    FAILURE_REQUEST,
    RecordedGroup,
    RecordedOperation,
    format_ranks,
    parse_ranks,
)
from flagscale.launcher.liveness.messages import RankProgress
from flagscale.status import BUSY_ACTIVITIES

_MAX_LISTED_RANKS = 4
_MAX_DESCRIBED_EDGES = 3
_MAX_SOURCE_CHARACTERS = 60
# Largest time that is converted to a date: for huge numbers, which a damaged record may have,
# time.localtime fails.
_MAX_TIME = 2.0**33
_STACK_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.M)
_LIBRARY_PATH = re.compile(r"/(?:site-packages|dist-packages|lib(?:64)?/python3[^/]*)/|^<")
# A statement that waits for an earlier asynchronous operation; the stack has no frame of torch.
_WAITING_STATEMENT = re.compile(
    r"(?<![a-z])wait(?!ing|er)|synchronize|\.item\(|\.cpu\(|\.tolist\(|barrier"
)
# Descriptions of groups: torch's default group, Megatron's, and those of device meshes.
_DEFAULT_GROUP = "default_pg"
_MEGATRON_GROUP = re.compile(r"[A-Z][A-Z0-9_]+")
# Operations in which ranks may pass inputs of different sizes: all_to_all, gather, scatter and
# reduce_scatter with lists of tensors (not their variants with one tensor, such as
# _reduce_scatter_base), several operations in one, barriers and messages.
_UNEVEN_OPERATION = re.compile(
    r"all_?to_?all|scatter(?!_)|^gather|coalesced|barrier|send|recv", re.I
)


@dataclass(frozen=True)
class HangFinding:
    """Cause of a hang: the rank that is to blame, and the explanation without its name.

    ``in_collective`` is True if the rank itself waits in a collective, and so may be the one that
    reports a timeout.
    """

    rank: int
    host: str
    reason: str
    in_collective: bool = True

    def describe(self) -> str:
        """Return one sentence: ``rank 5 (h02) never entered all_reduce #1234 of …``."""
        return f"rank {self.rank}{f' ({self.host})' if self.host else ''} {self.reason}"


@dataclass
class _GroupOperation:
    """One operation of a group: which members have called it, and which have not."""

    group: RecordedGroup
    operation: RecordedOperation
    """The record of one of the ranks, of one that still waits if there is any."""
    members: tuple[int, ...]
    by_rank: dict[int, RecordedOperation] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    """Members that have not called it."""

    @property
    def waiting(self) -> list[int]:
        return sorted(rank for rank, operation in self.by_rank.items() if not operation.ended)

    @property
    def since(self) -> float:
        return min(self.by_rank[rank].time for rank in self.waiting or self.by_rank)

    def describe(self) -> str:
        return f"{self.operation.name} #{self.operation.sequence} of {describe_group(self.group)}"


def explain_hang(ranks: Sequence[RankProgress]) -> HangFinding | None:
    """Return the cause of a hang; None if no rank has a pending operation on record.

    Args:
        ranks: All running ranks of the job.
    """
    by_rank = {progress.rank: progress for progress in ranks}
    calls = sorted(
        [*_collect_collectives(by_rank), *_collect_messages(by_rank)], key=lambda call: call.since
    )
    for call in calls:
        if (finding := _explain_mismatch(call, by_rank)) is not None:
            return finding
    edges = _build_edges(calls)
    if edges:
        return _explain_missing(calls, edges, by_rank) or _explain_cycle(edges, by_rank)
    return _explain_incomplete(calls[0], by_rank) if calls else None


def explain_failed_collective(
    ranks: Sequence[RankProgress], finished_ranks: Collection[int] = ()
) -> HangFinding | None:
    """Return why ranks failed in a collective: they disagreed about it, or a rank had ended before
    it. None if the records do not show it.

    Args:
        ranks: Ranks with the records that they wrote when they failed.
        finished_ranks: Ranks that ended with exit code 0.
    """
    by_rank = {progress.rank: progress for progress in ranks}
    # An operation that has failed is recorded as ended, so that the last one of each rank counts.
    last_operations = {
        rank: progress.record.operations[-1]
        for rank, progress in by_rank.items()
        if progress.record is not None and progress.record.operations
    }
    calls = [
        call
        for call in sorted(_collect_collectives(by_rank, latest=True), key=lambda call: call.since)
        if any(last_operations[rank] is operation for rank, operation in call.by_rank.items())
    ]
    for call in calls:
        if (finding := _explain_mismatch(call, by_rank)) is not None:
            return finding
        ended = sorted(call.missing & ({*finished_ranks} - by_rank.keys()))
        if ended:
            failed = describe_ranks(list(call.by_rank))
            verb = "fails" if len(call.by_rank) == 1 else "fail"
            others = f"; the same holds for {describe_ranks(ended[1:])}" if ended[1:] else ""
            # Not "never entered": it may have ended before the others had its data.
            text = (
                f"ended with exit code 0 before the end of {call.describe()}, in which {failed} "
                f"{verb}{others}"
            )
            return HangFinding(ended[0], "", text, in_collective=False)
    return None


# -- who has called what -------------------------------------------------------------------------


def _collect_collectives(
    by_rank: Mapping[int, RankProgress], *, latest: bool = False
) -> Iterator[_GroupOperation]:
    """Yield the first pending collective of every rank and group, or the latest.

    A rank has called an operation if it has called a later one of the group. Records keep the last
    operations only, so a rank may be neither among the callers nor missing.
    """
    groups: dict[tuple[str, str, str], RecordedGroup] = {}
    operations: dict[tuple[str, str, str], dict[int, dict[int, RecordedOperation]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for rank, progress in by_rank.items():
        for group, operation in _iter_operations(progress):
            if operation.peer is None:
                key = group.backend, group.name, group.ranks
                groups[key] = group
                operations[key][rank][operation.sequence] = operation
    for key, by_member in operations.items():
        members = parse_ranks(groups[key].ranks) or tuple(sorted(by_member))
        last_sequences = {rank: max(calls) for rank, calls in by_member.items()}
        first_pending = {
            min(sequence for sequence, operation in calls.items() if not operation.ended)
            for calls in by_member.values()
            if not all(operation.ended for operation in calls.values())
        }
        for sequence in sorted({*last_sequences.values()} if latest else first_pending):
            called = {
                rank: calls[sequence] for rank, calls in by_member.items() if sequence in calls
            }
            operation = min(called.values(), key=lambda operation: operation.ended)
            call = _GroupOperation(groups[key], operation, members, called)
            call.missing = {rank for rank in members if last_sequences.get(rank, 0) < sequence}
            yield call


def _collect_messages(by_rank: Mapping[int, RankProgress]) -> Iterator[_GroupOperation]:
    """Yield the first pending message of every rank to or from every peer in a group. The peer is
    missing if it has no pending message in the other direction.
    """
    pending: dict[tuple[str, str, int, int, bool], tuple[RecordedGroup, RecordedOperation]] = {}
    for rank, progress in by_rank.items():
        for group, operation in _iter_operations(progress):
            if operation.peer is not None and not operation.ended:
                key = group.backend, group.name, rank, operation.peer, operation.sends
                pending.setdefault(key, (group, operation))
    for (backend, name, rank, peer, sends), (group, operation) in pending.items():
        call = _GroupOperation(group, operation, (rank, peer), {rank: operation})
        if (backend, name, peer, rank, not sends) not in pending:
            call.missing = {peer}
        yield call


def _iter_operations(progress: RankProgress) -> Iterator[tuple[RecordedGroup, RecordedOperation]]:
    record = progress.record
    if record is None:
        return
    for operation in record.operations:
        if 0 <= operation.group < len(record.groups):
            yield record.groups[operation.group], operation


def _build_edges(calls: Iterable[_GroupOperation]) -> dict[int, dict[int, _GroupOperation]]:
    """Return, for every waiting rank, the ranks that it waits for, each with the call."""
    edges: dict[int, dict[int, _GroupOperation]] = defaultdict(dict)
    for call in calls:
        for rank in call.waiting if call.missing else ():
            for missing in call.missing - {rank}:
                edges[rank].setdefault(missing, call)
    return dict(edges)


# -- explanations --------------------------------------------------------------------------------


def _explain_mismatch(
    call: _GroupOperation, by_rank: Mapping[int, RankProgress]
) -> HangFinding | None:
    """Explain ranks that disagree about a call; None if they agree."""
    ranks_by_signature: dict[object, list[int]] = defaultdict(list)
    for rank, operation in sorted(call.by_rank.items()):
        ranks_by_signature[_signature(operation)].append(rank)
    if len(ranks_by_signature) < 2:
        return None
    # The smallest party is to blame; of two of one size, the one without the lowest rank.
    parties = sorted(ranks_by_signature.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    majority, blamed = parties[0], parties[-1]
    wrong, usual = call.by_rank[blamed[0]], call.by_rank[majority[0]]
    number = f"#{wrong.sequence} of {describe_group(call.group)}"
    others = describe_ranks(majority)
    if wrong.name != usual.name:
        text = f"called {wrong.name} as {number}, where {others} called {usual.name}"
        if _is_called_next(call, blamed[0], usual, by_rank) and _is_called_next(
            call, majority[0], wrong, by_rank
        ):
            text += ": the same operations in another order"
    else:
        text = (
            f"called {wrong.name} {number} with {wrong.inputs or 'no tensor'}, where {others} "
            f"passed {usual.inputs or 'no tensor'}"
        )
    return _make_finding(blamed[0], by_rank, text, blamed[1:], since=call.since)


def _signature(operation: RecordedOperation) -> tuple[object, ...]:
    """Return what all ranks have to agree on."""
    if _UNEVEN_OPERATION.search(operation.name):
        return (operation.name,)
    # Inputs are sizes and types: "[4, 8] Float, [2] Long".
    types = tuple(text.rpartition(" ")[2] for text in operation.inputs.split(", ["))
    return operation.name, operation.elements, types


def _is_called_next(
    call: _GroupOperation,
    rank: int,
    operation: RecordedOperation,
    by_rank: Mapping[int, RankProgress],
) -> bool:
    """Return whether a rank has called an operation like this one right after the call."""
    return any(
        group.name == call.group.name
        and other.sequence == call.operation.sequence + 1
        and _signature(other) == _signature(operation)
        for group, other in _iter_operations(by_rank[rank])
    )


def _explain_missing(
    calls: Sequence[_GroupOperation],
    edges: Mapping[int, Mapping[int, _GroupOperation]],
    by_rank: Mapping[int, RankProgress],
) -> HangFinding | None:
    """Explain a rank that others wait for, and that waits for nobody; None if there is none."""
    awaited = {missing for targets in edges.values() for missing in targets}
    causes = awaited - edges.keys()
    # A rank with a pending asynchronous operation may do something else.
    causes = causes or {
        rank for rank in awaited if rank in by_rank and _is_computing(by_rank[rank])
    }
    if not causes:
        return None
    call = max(
        (call for call in calls if call.missing & causes),
        key=lambda call: (len(call.waiting), -call.since),
    )
    blamed = _select_most_suspect(call.missing & causes, by_rank)
    waiting = call.waiting
    verb = "has waited" if len(waiting) == 1 else "have waited"
    waiting_text = f"{describe_ranks(waiting)} {verb} in it since {format_clock(call.since)}"
    if call.operation.peer is None:
        text = f"never entered {call.describe()}; {waiting_text}"
    else:
        counterpart = "recv" if call.operation.sends else "send"
        text = f"never entered the {counterpart} for {call.describe()}; {waiting_text}"
    return _make_finding(blamed[0], by_rank, text, blamed[1:], in_collective=False)


def _select_most_suspect(ranks: Iterable[int], by_rank: Mapping[int, RankProgress]) -> list[int]:
    """Return the ranks that are to blame: those that have ended, are stopped or do not answer;
    without any, those that compute; without any, all. Not every backend records messages, so the
    stack of a rank may show that it only waits.
    """

    def innocence(rank: int) -> tuple[bool, bool]:
        progress = by_rank.get(rank)
        is_responsive = _is_responsive(progress)
        is_waiting = progress is not None and not _is_computing(progress)
        return is_responsive, is_responsive and is_waiting

    innocences = {rank: innocence(rank) for rank in sorted(ranks)}
    lowest = min(innocences.values())
    return [rank for rank, value in innocences.items() if value == lowest]


def _is_responsive(progress: RankProgress | None) -> bool:
    return progress is not None and progress.answered and not progress.stopped


def _is_computing(progress: RankProgress) -> bool:
    """Return whether the stack shows that a rank does not wait for another one. False without a
    stack.
    """
    statement = progress.place.rpartition("` at ")[0]
    return bool(progress.stack) and not (progress.waits or _WAITING_STATEMENT.search(statement))


def _explain_cycle(
    edges: Mapping[int, Mapping[int, _GroupOperation]], by_rank: Mapping[int, RankProgress]
) -> HangFinding | None:
    """Explain ranks that wait for each other, in a shortest cycle."""
    waiting_by_call: dict[int, int] = defaultdict(int)
    for targets in edges.values():
        for call_id in {id(call) for call in targets.values()}:
            waiting_by_call[call_id] += 1

    def preference(cycle: list[int]) -> tuple[int, int, int]:
        # The shortest one, beginning with the rank in whose operation the fewest others wait.
        return len(cycle), waiting_by_call[id(edges[cycle[0]][cycle[1]])], -cycle[0]

    cycles = [cycle for rank in edges if (cycle := _find_cycle(rank, edges))]
    if not cycles:
        return None
    cycle = min(cycles, key=preference)
    parts: list[str] = []
    are_several = False
    for rank, target in list(itertools.pairwise(cycle))[:_MAX_DESCRIBED_EDGES]:
        call = edges[rank][target]
        subject, verb = "", "waits"
        if len(parts) == 1:
            subject, verb = "which ", "wait" if are_several else "waits"
        elif parts:
            subject = f"rank {rank} "
        awaited = sorted(missing for missing, c in edges[rank].items() if c is call)
        are_several = len(awaited) > 1
        name = "it" if target == cycle[0] else describe_ranks(awaited, example=target)
        if target == cycle[0] and len(parts) > 1:
            name = f"rank {target}"
        parts.append(f"{subject}{verb} in {call.describe()} for {name}")
    if len(cycle) - 1 > len(parts):
        parts.append("and so on")
    since = max(edges[rank][target].since for rank, target in itertools.pairwise(cycle))
    return _make_finding(cycle[0], by_rank, ", ".join(parts), since=since)


def _find_cycle(start: int, edges: Mapping[int, Mapping[int, _GroupOperation]]) -> list[int]:
    """Return a shortest cycle ``[start, …, start]``; empty if there is none."""
    previous: dict[int, int] = {}
    queue = [start]
    for rank in queue:
        for target in sorted(edges.get(rank, {})):
            if target == start:
                path = [rank]
                while path[-1] != start:
                    path.append(previous[path[-1]])
                return [*reversed(path), start]
            if target not in previous:
                previous[target] = rank
                queue.append(target)
    return []


def _explain_incomplete(call: _GroupOperation, by_rank: Mapping[int, RankProgress]) -> HangFinding:
    """Explain an operation that all ranks have called, and that does not end."""
    waiting = call.waiting
    started = [rank for rank in waiting if call.by_rank[rank].started]
    not_started = [rank for rank in waiting if not call.by_rank[rank].started]
    if started and not_started:
        text = (
            f"called {call.describe()}, but its device has not started it: earlier work still "
            f"runs; {describe_ranks(started)} {'have' if len(started) > 1 else 'has'} started it"
        )
        return _make_finding(not_started[0], by_rank, text, not_started[1:], since=call.since)
    # One that does not respond is the more likely cause.
    rank = min(waiting, key=lambda rank: (_is_responsive(by_rank.get(rank)), rank))
    text = f"has been in {call.describe()} since {format_clock(call.since)}"
    finished = len(call.by_rank) - len(waiting)
    if finished:
        text += f", which {finished} of {len(call.by_rank)} ranks have finished"
    elif call.operation.peer is None:
        text += f", which all {len(call.members)} ranks have entered"
    if call.group.backend == "nccl" and not started:
        text += (
            ": a connection fails, or a kernel before it does not end on one of the devices "
            "(TORCH_NCCL_ENABLE_TIMING=1 in experiment.envs shows which)"
        )
    else:
        text += ": a connection or a device fails"
    return _make_finding(rank, by_rank, text, [other for other in waiting if other != rank])


# -- words ---------------------------------------------------------------------------------------


def _make_finding(
    rank: int,
    by_rank: Mapping[int, RankProgress],
    text: str,
    others: Sequence[int] = (),
    *,
    since: float | None = None,
    in_collective: bool = True,
) -> HangFinding:
    """Return a finding, with the time, the place of the rank, and others with the same cause."""
    progress = by_rank.get(rank)
    if since is not None:
        text += f", since {format_clock(since)}"
    text += f"; {describe_place(progress)}"
    if others:
        text += f"; the same holds for {describe_ranks(others)}"
    host = progress.host if progress is not None else ""
    return HangFinding(rank, host, text, in_collective=in_collective)


def describe_place(progress: RankProgress | None) -> str:
    """Return where a rank is: ``it is in `next(loader)` at data.py:88``."""
    if progress is None:
        return "its process has ended"
    if progress.stopped:
        return "its process is stopped (SIGSTOP)"
    activity = f" ({progress.doing})" if progress.doing in BUSY_ACTIVITIES else ""
    if progress.place:
        return f"it is in {progress.place}{activity}"
    if progress.record is not None and progress.record.request == FAILURE_REQUEST:
        return "it failed in that operation"
    return f"it did not report its stack{activity}"


def describe_group(group: RecordedGroup) -> str:
    """Return ``the default group``, ``the data-parallel group of ranks 0-3`` or ``group 'dp'``."""
    description = group.description
    if description == _DEFAULT_GROUP or (not description and group.name in ("", "0")):
        return "the default group"
    if _MEGATRON_GROUP.fullmatch(description):
        kind, _, other = description.replace("_GROUP", "").lower().partition("_with_")
        kind = re.sub("(_model)?_parallel", "-parallel", kind).replace("_", " ")
        name = f"the {kind} group{f' with {other}' if other else ''}"
    else:
        known_name = description if description not in ("", "undefined") else group.name
        name = f"group {known_name!r}"
    return f"{name} of ranks {group.ranks}" if group.ranks else name


def describe_ranks(ranks: Sequence[int], *, example: int | None = None) -> str:
    """Return ``rank 3``, ``ranks 0, 1 and 3``, ``ranks 0-6`` or ``12 ranks (rank 3 among them)``,
    with the ``example``.
    """
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    text = format_ranks(ordered)
    if len(ordered) <= _MAX_LISTED_RANKS and (len(ordered) == 2 or "," in text):
        return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"
    if text.count(",") < _MAX_LISTED_RANKS:
        return f"ranks {text}"
    return f"{len(ordered)} ranks" + (
        f" (rank {example} among them)" if example is not None else ""
    )


def format_clock(unix_time: float) -> str:
    """Return the time of day in the time zone of this host."""
    return time.strftime("%H:%M:%S", time.localtime(min(max(unix_time, 0.0), _MAX_TIME)))


def find_user_frame(stack: str) -> str:
    """Return the place in the user's program from a thread's stack, as faulthandler writes it.

    It is the innermost frame that is not in an installed package, with its line of source if the
    file is on this host: ```next(loader)` at data.py:88``; empty without a stack.
    """
    frames = [(m["file"], int(m["line"]), m["name"]) for m in _STACK_FRAME.finditer(stack)]
    if not frames:
        return ""
    file, line, function = next((f for f in frames if not _LIBRARY_PATH.search(f[0])), frames[0])
    source = _read_source(file, line)
    return f"`{source or function}` at {Path(file).name}:{line}"


def _read_source(file: str, line: int) -> str:
    try:
        with Path(file).open(encoding="utf-8", errors="replace") as source:
            text = next((t for number, t in enumerate(source, 1) if number == line), "").strip()
    except (OSError, ValueError):
        return ""
    limit = _MAX_SOURCE_CHARACTERS
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
