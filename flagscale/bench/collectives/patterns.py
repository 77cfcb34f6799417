"""Communication patterns: replica groups, permutation pairs, all-to-all-v counts.

Each is read from a JSON file in nccom-test's format (``read_…``), and checked against the number of
ranks once that is known (``…_for``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.bench.files import read_text
from flagscale.errors import ConfigError

Groups = tuple[tuple[int, ...], ...]
Pairs = tuple[tuple[int, int], ...]

_GROUPS_FLAG = "--custom-replica-group"
_PAIRS_FLAG = "--custom-src-target-pairs"
_COUNTS_FLAG = "--alltoallv-metadata"
ALIGNMENT_BYTES = 32
"""All-to-all-v counts are rounded up to this many bytes, as in nccom-test."""


def _read_list(path: Path, flag: str, key: str) -> tuple[str, Any]:
    """Read a list from a JSON file: the value of ``key``, or the whole file if it is a list.

    Returns:
        The flag and path for error messages, and the list.

    Raises:
        ConfigError: the file cannot be read, is no JSON, or has no such key.
    """
    location = f"{flag}: {path}"
    text = read_text(path, location)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{location}:{error.lineno}: not JSON: {error.msg}") from error
    if isinstance(data, list):
        return location, data
    if isinstance(data, dict) and key in data:
        return location, data[key]
    raise ConfigError(f'{location}: expected {{"{key}": [...]}}')


def _is_list_of_naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _refuse_duplicates(ranks: Sequence[int], location: str, problem: str) -> None:
    duplicates = [rank for rank in ranks if ranks.count(rank) > 1]
    if duplicates:
        raise ConfigError(f"{location}: rank {min(duplicates)} {problem}")


def _refuse_unknown_ranks(ranks: Iterable[int], world: int, flag: str) -> None:
    absent = next((rank for rank in ranks if rank >= world), None)
    if absent is not None:
        raise ConfigError(f"{flag}: rank {absent} does not exist among {world} ranks")


def read_groups(path: Path) -> Groups:
    """Read replica groups from ``{"replica_groups": [[0, 1], [2, 3]]}``.

    Raises:
        ConfigError: the form is wrong, a rank is in two groups, or sizes differ.
    """
    location, data = _read_list(path, _GROUPS_FLAG, "replica_groups")
    if not data or not all(_is_list_of_naturals(group) and group for group in data):
        raise ConfigError(f"{location}: expected lists of ranks, such as [[0, 1], [2, 3]]")
    _refuse_duplicates(
        [rank for group in data for rank in group], location, "is in more than one place"
    )
    if len({len(group) for group in data}) > 1:
        sizes = ", ".join(str(len(group)) for group in data)
        raise ConfigError(f"{location}: the groups must be equally large, found {sizes}")
    # torch numbers the ranks of a group in ascending order, regardless of the order in the file.
    return tuple(tuple(sorted(group)) for group in data)


def groups_for(world: int, custom: Groups | None, dimension: int | None) -> Groups:
    """Return the groups that run at the same time among ``world`` ranks.

    A ``dimension`` (data-parallel size) of ``k`` gives ``world/k`` groups of ``k`` ranks with a
    stride of ``world/k``: with one group per rank of a host, each has one rank of every host.

    Raises:
        ConfigError: a rank does not exist, or the dimension does not divide the world.
    """
    if custom is not None:
        _refuse_unknown_ranks((rank for group in custom for rank in group), world, _GROUPS_FLAG)
        return custom
    if dimension is None:
        return (tuple(range(world)),)
    if world % dimension:
        raise ConfigError(f"--data-parallel-dimension {dimension} does not divide {world} ranks")
    count = world // dimension
    return tuple(tuple(range(first, world, count)) for first in range(count))


def read_pairs(path: Path) -> Pairs:
    """Read source and target pairs from ``{"src_target_pairs": [[[0, 1], [1, 0]]]}``, or with
    one list less.

    Raises:
        ConfigError: the form is wrong, or a rank sends or receives twice.
    """
    location, data = _read_list(path, _PAIRS_FLAG, "src_target_pairs")
    if data and isinstance(data[0], list) and data[0] and isinstance(data[0][0], list):
        if len(data) > 1:
            raise ConfigError(f"{location}: one list of pairs is run, found {len(data)}")
        data = data[0]
    if not data or not all(_is_list_of_naturals(pair) and len(pair) == 2 for pair in data):
        raise ConfigError(f"{location}: expected pairs of ranks, such as [[[0, 1], [1, 0]]]")
    for index, verb in ((0, "sends"), (1, "receives")):
        _refuse_duplicates([pair[index] for pair in data], location, f"{verb} more than once")
    return tuple((pair[0], pair[1]) for pair in data)


def pairs_for(ranks: int, custom: Pairs | None) -> Pairs:
    """Return the pairs of a permutation among ``ranks`` ranks; by default a ring.

    Raises:
        ConfigError: a rank does not exist.
    """
    if custom is None:
        return tuple((rank, (rank + 1) % ranks) for rank in range(ranks))
    _refuse_unknown_ranks((rank for pair in custom for rank in pair), ranks, _PAIRS_FLAG)
    return custom


@dataclass(frozen=True)
class Exchange:
    """One rank's counts and displacements of an all-to-all-v in elements, one entry per rank."""

    send_counts: tuple[int, ...]
    send_displs: tuple[int, ...]
    recv_counts: tuple[int, ...]
    recv_displs: tuple[int, ...]

    @property
    def _sides(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        return (self.send_counts, self.send_displs), (self.recv_counts, self.recv_displs)

    @property
    def extents(self) -> list[int]:
        """Elements of the send buffer and of the receive buffer, up to their last blocks' ends."""
        return [max(map(sum, zip(*side, strict=True)), default=0) for side in self._sides]

    @property
    def is_packed(self) -> bool:
        """True if the blocks of all ranks are contiguous and in the order of the ranks."""
        return all(displs == _contiguous_displacements(counts) for counts, displs in self._sides)


def _contiguous_displacements(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(counts[:i]) for i in range(len(counts)))


_EXCHANGE_KEYS = ("send_counts", "send_displs", "recv_counts", "recv_displs")


def read_exchange(path: Path) -> tuple[Exchange, ...]:
    """Read all-to-all-v entries from ``{"alltoallv_metadata": [{"send_counts": ...}]}``.

    Raises:
        ConfigError: a key is missing, a count is no whole number, or lengths differ.
    """
    location, data = _read_list(path, _COUNTS_FLAG, "alltoallv_metadata")
    if not data or not all(isinstance(entry, dict) for entry in data):
        raise ConfigError(f"{location}: expected one object, or one a rank")
    for number, entry in enumerate(data):
        for key in _EXCHANGE_KEYS:
            if not _is_list_of_naturals(entry.get(key)) or not entry[key]:
                raise ConfigError(
                    f"{location}: entry {number}: {key} must be a list of whole numbers "
                    f"from 0 on, found {json.dumps(entry.get(key))[:60]}"
                )
        if len({len(entry[key]) for key in _EXCHANGE_KEYS}) > 1:
            lengths = ", ".join(f"{key} {len(entry[key])}" for key in _EXCHANGE_KEYS)
            raise ConfigError(f"{location}: entry {number}: lengths differ: {lengths}")
    return tuple(Exchange(*(tuple(entry[key]) for key in _EXCHANGE_KEYS)) for entry in data)


def exchanges_for(
    ranks: int, custom: tuple[Exchange, ...] | None, size: int, element_bytes: int
) -> tuple[tuple[Exchange, ...], tuple[str, ...]]:
    """Return each rank's exchange for about ``size`` bytes, and notes for the user.

    The counts of the file are proportions: they are scaled so that the rank that sends most
    sends ``size`` bytes, with each count rounded up to 32 bytes. Displacements keep their order
    and gaps. A single entry stands for all ranks; receive counts then follow from its send
    counts.

    Raises:
        ConfigError: the number of entries or their length does not fit ``ranks``; two ranks have
            different counts; blocks of a buffer overlap.
    """
    entries = (_default_exchange(ranks),) if custom is None else custom
    for entry in entries:
        if len(entry.send_counts) != ranks:
            raise ConfigError(f"{_COUNTS_FLAG}: {len(entry.send_counts)} counts for {ranks} ranks")
    if len(entries) not in (1, ranks):
        mismatch = f"{len(entries)} entries for {ranks} ranks"
        raise ConfigError(f"{_COUNTS_FLAG}: {mismatch}; expected 1 or {ranks}")
    notes: tuple[str, ...] = ()
    if len(entries) != ranks:
        first_entry, entries = entries[0], _expand_entry(entries[0], ranks)
        if custom is not None and any(e.recv_counts != first_entry.recv_counts for e in entries):
            notes = ("all_to_all_v: receive counts follow from one entry's send counts",)
    _check_counts_match(entries)
    max_sent = max(sum(entry.send_counts) for entry in entries)
    if max_sent == 0:
        raise ConfigError(f"{_COUNTS_FLAG}: every count is 0")
    unit_elements = max(1, ALIGNMENT_BYTES // element_bytes)

    def scale(count: int) -> int:
        # Rounded up in whole units of ALIGNMENT_BYTES. Sender and receiver of a block have the same
        # count, so that both round it in the same way.
        return -(-count * size // (max_sent * element_bytes * unit_elements)) * unit_elements

    return tuple(_scale_exchange(entry, scale) for entry in entries), notes


def _default_exchange(ranks: int) -> Exchange:
    """Return the default pattern: rank j receives in proportion to j + 1, so that no two counts are
    equal.
    """
    counts = tuple(range(1, ranks + 1))
    return Exchange(
        counts, _contiguous_displacements(counts), counts, _contiguous_displacements(counts)
    )


def _expand_entry(entry: Exchange, ranks: int) -> tuple[Exchange, ...]:
    entries = []
    for rank in range(ranks):
        received = (entry.send_counts[rank],) * ranks
        displs = (
            entry.recv_displs
            if received == entry.recv_counts
            else _contiguous_displacements(received)
        )
        entries.append(Exchange(entry.send_counts, entry.send_displs, received, displs))
    return tuple(entries)


def _check_counts_match(entries: Sequence[Exchange]) -> None:
    for source, sender in enumerate(entries):
        for target, receiver in enumerate(entries):
            sent, received = sender.send_counts[target], receiver.recv_counts[source]
            if sent != received:
                text = f"rank {source} sends {sent} elements to rank {target}, which expects"
                raise ConfigError(f"{_COUNTS_FLAG}: {text} {received}")


def _scale_exchange(entry: Exchange, scale: Callable[[int], int]) -> Exchange:
    def scale_displacements(counts: tuple[int, ...], displs: tuple[int, ...]) -> tuple[int, ...]:
        displacements = [0] * len(counts)
        end = old_end = 0  # of the previous block, scaled and as in the file
        for i in sorted(range(len(counts)), key=lambda i: (displs[i], counts[i])):
            if displs[i] < old_end and counts[i]:
                raise ConfigError(f"{_COUNTS_FLAG}: pieces overlap at displacement {displs[i]}")
            displacements[i] = end + scale(max(displs[i] - old_end, 0))
            end = displacements[i] + scale(counts[i])
            old_end = max(old_end, displs[i] + counts[i])
        return tuple(displacements)

    return Exchange(
        send_counts=tuple(scale(c) for c in entry.send_counts),
        send_displs=scale_displacements(entry.send_counts, entry.send_displs),
        recv_counts=tuple(scale(c) for c in entry.recv_counts),
        recv_displs=scale_displacements(entry.recv_counts, entry.recv_displs),
    )
