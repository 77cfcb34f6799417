"""Explanation of a hang from the flight records and stacks of all ranks. Pure functions.

Ranks wait for ranks: a rank that is in a collective waits for every member of the group that has
not entered it, and a receiver waits for its sender. The rank that others wait for and that waits
for nobody is the cause. If there is none, ranks wait for each other in a circle: two groups are
used in different orders, or a rank uses the wrong group. Ranks that have entered the same
collective with different operations, types or sizes are a mismatch.

A rank whose record is missing (its process is stopped or has ended, or it does not answer) is
treated as one that has entered nothing.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
_MAX_CIRCLE = 3
_MAX_SOURCE_CHARACTERS = 60
# Later than the clock of any host. Python cannot convert every number to a date.
_MAX_TIME = 2.0**33
_STACK_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.M)
_LIBRARY_PATH = re.compile(r"/(?:site-packages|dist-packages|lib(?:64)?/python3[^/]*)/|^<")
# A statement that waits for an earlier asynchronous operation; the stack has no frame of torch.
_WAITING_STATEMENT = re.compile(r"wait|synchronize|\.item\(|\.cpu\(|\.tolist\(|barrier")
# Descriptions of groups: torch's default group, Megatron's, and those of device meshes.
_DEFAULT_GROUP = "default_pg"
_MEGATRON_GROUP = re.compile(r"[A-Z][A-Z0-9_]+")
# Operations in which ranks may pass inputs of different sizes.
_UNEVEN_OPERATION = re.compile(
    r"all_?to_?all|scatter(?!_)|^gather|coalesced|barrier|send|recv", re.I
)


@dataclass(frozen=True)
class HangFinding:
    """Cause of a hang: the rank that is to blame, and the explanation without its name.

    ``in_collective`` is True if the rank itself waits in a collective, which may time out there.
    """

    rank: int
    host: str
    reason: str
    in_collective: bool = True

    def describe(self) -> str:
        """Return one sentence: ``rank 5 (h02) never entered all_reduce #1234 of …``."""
        return f"rank {self.rank}{f' ({self.host})' if self.host else ''} {self.reason}"


@dataclass
class _Call:
    """An operation number of a group with the ranks that have called it."""

    group: RecordedGroup
    operation: RecordedOperation
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
        return _explain_missing(calls, edges, by_rank) or _explain_circle(edges, by_rank)
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
    # An operation that has failed is over; it is the last one of its rank.
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
        ended = sorted(call.missing & {*finished_ranks} - by_rank.keys())
        if ended:
            failed = describe_ranks(list(call.by_rank))
            verb = "fails" if len(call.by_rank) == 1 else "fail"
            # It may have taken part in it, and have ended before the others had its data.
            text = f"ended with exit code 0 before the end of {call.describe()}, in which {failed} "
            others = f"; the same holds for {describe_ranks(ended[1:])}" if ended[1:] else ""
            return HangFinding(ended[0], "", f"{text}{verb}{others}", in_collective=False)
    return None


# -- who has called what -------------------------------------------------------------------------


def _collect_collectives(
    by_rank: Mapping[int, RankProgress], *, latest: bool = False
) -> Iterator[_Call]:
    """Yield the first pending collective of every rank and group, or the latest."""
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
        for sequence in sorted(last_sequences.values() if latest else first_pending):
            called = {
                rank: calls[sequence] for rank, calls in by_member.items() if sequence in calls
            }
            operation = min(called.values(), key=lambda operation: operation.ended)
            call = _Call(groups[key], operation, members, called)
            call.missing = {rank for rank in members if last_sequences.get(rank, 0) < sequence}
            yield call


def _collect_messages(by_rank: Mapping[int, RankProgress]) -> Iterator[_Call]:
    """Yield the first pending message of every rank and group, with its peer if that is missing."""
    pending: dict[tuple[int, int, bool], tuple[RecordedGroup, RecordedOperation]] = {}
    for rank, progress in by_rank.items():
        seen_groups = set()
        for group, operation in _iter_operations(progress):
            if operation.peer is None or operation.ended:
                continue
            pending.setdefault((rank, operation.peer, operation.sends), (group, operation))
            seen_groups.add(group.name)
    for (rank, peer, sends), (group, operation) in pending.items():
        call = _Call(group, operation, (rank, peer), {rank: operation})
        if (peer, rank, not sends) not in pending:
            call.missing = {peer}
        yield call


def _iter_operations(progress: RankProgress) -> Iterator[tuple[RecordedGroup, RecordedOperation]]:
    record = progress.record
    for operation in record.operations if record is not None else ():
        if record is not None and 0 <= operation.group < len(record.groups):
            yield record.groups[operation.group], operation


def _build_edges(calls: Iterable[_Call]) -> dict[int, dict[int, _Call]]:
    """Return, for every waiting rank, the ranks that it waits for, each with the call."""
    edges: dict[int, dict[int, _Call]] = defaultdict(dict)
    for call in calls:
        for rank in call.waiting if call.missing else ():
            for missing in call.missing - {rank}:
                edges[rank].setdefault(missing, call)
    return dict(edges)


# -- explanations --------------------------------------------------------------------------------


def _explain_mismatch(call: _Call, by_rank: Mapping[int, RankProgress]) -> HangFinding | None:
    """Explain ranks that disagree about a call; None if they agree."""
    ranks_by_signature: dict[object, list[int]] = defaultdict(list)
    for rank, operation in sorted(call.by_rank.items()):
        ranks_by_signature[_signature(operation)].append(rank)
    if len(ranks_by_signature) < 2:
        return None
    # The minority is to blame; of two parties of one size, the one without the lowest rank.
    *_, (_, blamed) = sorted(
        ranks_by_signature.items(), key=lambda item: (-len(item[1]), item[1][0])
    )
    majority = max(ranks_by_signature.values(), key=len)
    first, other = call.by_rank[blamed[0]], call.by_rank[majority[0]]
    where = f"#{first.sequence} of {describe_group(call.group)}"
    others = describe_ranks(majority)
    if first.name != other.name:
        text = f"called {first.name} as {where}, where {others} called {other.name}"
        if _is_called_next(call, blamed[0], other, by_rank) and _is_called_next(
            call, majority[0], first, by_rank
        ):
            text += ": the same operations in another order"
    else:
        text = (
            f"called {first.name} {where} with {first.inputs or 'no tensor'}, where {others} "
            f"passed {other.inputs or 'no tensor'}"
        )
    return _find(blamed[0], by_rank, text, blamed[1:], since=call.since)


def _signature(operation: RecordedOperation) -> tuple[object, ...]:
    """Return what all ranks have to agree on."""
    if _UNEVEN_OPERATION.search(operation.name):
        return (operation.name,)
    types = tuple(text.rpartition(" ")[2] for text in operation.inputs.split(", ["))
    return operation.name, operation.elements, types


def _is_called_next(
    call: _Call, rank: int, operation: RecordedOperation, by_rank: Mapping[int, RankProgress]
) -> bool:
    """Return whether a rank has called an operation like this one right after the call."""
    return any(
        group.name == call.group.name
        and other.sequence == call.operation.sequence + 1
        and _signature(other) == _signature(operation)
        for group, other in _iter_operations(by_rank[rank])
    )


def _explain_missing(
    calls: Sequence[_Call],
    edges: Mapping[int, Mapping[int, _Call]],
    by_rank: Mapping[int, RankProgress],
) -> HangFinding | None:
    """Explain a rank that others wait for, and that waits for nobody; None if there is none."""
    awaited = {missing for targets in edges.values() for missing in targets}
    causes = awaited - edges.keys()
    # A rank may wait for nobody although an operation that it began earlier is pending.
    causes = causes or {rank for rank in awaited if rank in by_rank and _is_busy(by_rank[rank])}
    if not causes:
        return None
    call = max(
        (call for call in calls if call.missing & causes),
        key=lambda call: (len(call.missing & causes) > 0, len(call.waiting), -call.since),
    )
    blamed = _rank_by_guilt(call.missing & causes, by_rank)
    waiting = call.waiting
    verb = "waits" if len(waiting) == 1 else "wait"
    since = f"{describe_ranks(waiting)} {verb} in it since {format_clock(call.since)}"
    if call.operation.peer is None:
        text = f"never entered {call.describe()}; {since}"
    else:
        own_call = "recv" if call.operation.sends else "send"
        text = (
            f"never entered the {own_call} for {call.operation.name} #{call.operation.sequence} of "
            f"{describe_group(call.group)}; {since}"
        )
    finding = _find(blamed[0], by_rank, text, blamed[1:])
    return replace(finding, in_collective=False)


def _rank_by_guilt(ranks: Iterable[int], by_rank: Mapping[int, RankProgress]) -> list[int]:
    """Return the ranks that are to blame, without those that only wait according to their stack:
    not every backend records messages.
    """

    def guilt(rank: int) -> tuple[bool, bool]:
        progress = by_rank.get(rank)
        is_alive = _is_running_well(progress)
        return is_alive, is_alive and progress is not None and not _is_busy(progress)

    ordered = sorted(ranks, key=lambda rank: (*guilt(rank), rank))
    return [rank for rank in ordered if guilt(rank) == guilt(ordered[0])]


def _is_running_well(progress: RankProgress | None) -> bool:
    return progress is not None and progress.answered and not progress.stopped


def _is_busy(progress: RankProgress) -> bool:
    """Return whether the stack shows that a rank does not wait for another one."""
    return bool(progress.stack) and not (
        progress.waits or _WAITING_STATEMENT.search(progress.place)
    )


def _explain_circle(
    edges: Mapping[int, Mapping[int, _Call]], by_rank: Mapping[int, RankProgress]
) -> HangFinding | None:
    """Explain ranks that wait for each other, in a shortest circle."""
    waiting_by_call: dict[int, int] = defaultdict(int)
    for targets in edges.values():
        for call in {id(call): call for call in targets.values()}.values():
            waiting_by_call[id(call)] += 1

    def order(circle: list[int]) -> tuple[int, int, int]:
        return len(circle), waiting_by_call[id(edges[circle[0]][circle[1]])], -circle[0]

    circles = [circle for rank in edges if (circle := _find_circle(rank, edges))]
    if not circles:
        return None
    circle = min(circles, key=order)
    parts: list[str] = []
    name = ""
    for rank, target in list(itertools.pairwise(circle))[:_MAX_CIRCLE]:
        call = edges[rank][target]
        awaited = sorted(missing for missing, c in edges[rank].items() if c is call)
        is_plural = " and " in name or "-" in name
        name = "it" if target == circle[0] else describe_ranks(awaited, first=target)
        pronoun = "" if rank == circle[0] else "which " if len(parts) == 1 else f"rank {rank} "
        verb = "wait" if pronoun == "which " and is_plural else "waits"
        parts.append(f"{pronoun}{verb} in {call.describe()} for {name}")
    since = max(edges[rank][target].since for rank, target in itertools.pairwise(circle))
    return _find(circle[0], by_rank, ", ".join(parts), since=since)


def _find_circle(start: int, edges: Mapping[int, Mapping[int, _Call]]) -> list[int]:
    """Return a shortest circle ``[start, …, start]``; empty if there is none."""
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


def _explain_incomplete(call: _Call, by_rank: Mapping[int, RankProgress]) -> HangFinding:
    """Explain an operation that all ranks have called, and that does not end."""
    waiting = call.waiting
    begun = [rank for rank in waiting if call.by_rank[rank].started]
    not_begun = [rank for rank in waiting if not call.by_rank[rank].started]
    if begun and not_begun:
        text = (
            f"called {call.describe()}, but its device has not begun it: earlier work still runs; "
            f"{describe_ranks(begun)} {'have' if len(begun) > 1 else 'has'} begun it"
        )
        return _find(not_begun[0], by_rank, text, not_begun[1:], since=call.since)
    rank = min(waiting, key=lambda rank: (_is_running_well(by_rank.get(rank)), rank))
    text = f"is in {call.describe()} since {format_clock(call.since)}"
    finished = len(call.by_rank) - len(waiting)
    if finished:
        text += f", which {finished} of {len(call.by_rank)} ranks have finished"
    elif call.operation.peer is None:
        text += f", which all {len(call.members)} ranks have entered"
    if call.group.backend == "nccl" and not begun:
        text += (
            ": a connection fails, or a kernel before it does not end on one of the devices "
            "(TORCH_NCCL_ENABLE_TIMING=1 in experiment.envs shows which)"
        )
    else:
        text += ": a connection or a device fails"
    return _find(rank, by_rank, text, [other for other in waiting if other != rank])


# -- words ---------------------------------------------------------------------------------------


def _find(
    rank: int,
    by_rank: Mapping[int, RankProgress],
    text: str,
    others: Sequence[int] = (),
    *,
    since: float | None = None,
) -> HangFinding:
    """Return a finding, with the time, the place of the rank, and others with the same cause."""
    progress = by_rank.get(rank)
    if since is not None:
        text += f", since {format_clock(since)}"
    text += f"; {describe_place(progress)}"
    if others:
        names = describe_ranks(others)
        text += f"; the same holds for {names}"
    return HangFinding(rank, progress.host if progress is not None else "", text)


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
        return "it failed there"
    return f"it did not report its stack{activity}"


def describe_group(group: RecordedGroup) -> str:
    """Return ``the data-parallel group``, ``group 'dp'`` or ``the default group``."""
    description = group.description
    if description == _DEFAULT_GROUP or (not description and group.name in ("", "0")):
        return "the default group"
    if _MEGATRON_GROUP.fullmatch(description):
        kind, _, other = description.replace("_GROUP", "").lower().partition("_with_")
        name = re.sub("(_model)?_parallel", "-parallel", kind).replace("_", " ")
        return f"the {name} group{f' with {other}' if other else ''} of ranks {group.ranks}"
    known_name = description if description not in ("", "undefined") else group.name
    return (
        f"group {known_name!r} of ranks {group.ranks}" if group.ranks else f"group {known_name!r}"
    )


def describe_ranks(ranks: Sequence[int], *, first: int | None = None) -> str:
    """Return ``rank 3``, ``ranks 0, 1 and 3``, ``ranks 0-6`` or ``12 ranks``."""
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    text = format_ranks(ordered)
    if len(ordered) <= _MAX_LISTED_RANKS and (len(ordered) == 2 or "," in text):
        return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"
    if text.count(",") < _MAX_LISTED_RANKS:
        return f"ranks {text}"
    return f"{len(ordered)} ranks" + (f" (rank {first} among them)" if first is not None else "")


def format_clock(unix_time: float) -> str:
    """Return the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(min(max(unix_time, 0.0), _MAX_TIME)))


def locate(stack: str) -> str:
    """Return the place in the user's program from a stack of faulthandler.

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
