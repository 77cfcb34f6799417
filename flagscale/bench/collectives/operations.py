"""What each operation moves, who holds what, and the factor from algorithm to bus bandwidth.

A size is that of the whole logical buffer: all of what an all-gather collects, all of what a
reduce-scatter reduces, what one rank sends in a send-receive. The factors make the bandwidth
comparable between rank counts; they are those of nccl-tests (PERFORMANCE.md) and nccom-test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flagscale.bench.command_line import did_you_mean
from flagscale.errors import ConfigError

Extent = Literal["whole", "part"]
"""Whether a rank's buffer is the whole logical buffer or its n-th part."""

REDUCTIONS = ("sum", "prod", "min", "max", "avg")


@dataclass(frozen=True)
class Operation:
    """One collective or point-to-point pattern."""

    name: str
    summary: str
    aliases: tuple[str, ...]
    input: Extent = "whole"
    output: Extent = "whole"
    factor: Literal["1", "(n-1)/n", "2(n-1)/n"] = "1"
    reduces: bool = False
    rooted: bool = False
    same_output: bool = False
    """Every rank ends with the same bytes."""
    out_of_place: bool = True
    """torch offers it between two buffers."""
    in_place: bool = False
    """torch offers it in one buffer."""

    def bus_factor(self, ranks: int) -> float:
        """Bus bandwidth divided by algorithm bandwidth, for ``ranks`` ranks."""
        if self.factor == "1":
            return 1.0
        share = (ranks - 1) / ranks
        return 2 * share if self.factor == "2(n-1)/n" else share

    @property
    def parts(self) -> bool:
        """The buffer is cut in one part a rank."""
        return "part" in (self.input, self.output) or self.name.startswith("all_to_all")


OPERATIONS: dict[str, Operation] = {
    o.name: o
    for o in (
        Operation(
            "all_reduce",
            "every rank gets the reduction of all ranks' buffers",
            ("allr", "allreduce"),
            factor="2(n-1)/n",
            reduces=True,
            same_output=True,
            out_of_place=False,
            in_place=True,
        ),
        Operation(
            "all_gather",
            "every rank gets all ranks' parts",
            ("allg", "allgather"),
            input="part",
            factor="(n-1)/n",
            same_output=True,
            in_place=True,
        ),
        Operation(
            "reduce_scatter",
            "every rank gets its part of the reduction",
            ("redsct", "reducescatter"),
            output="part",
            factor="(n-1)/n",
            reduces=True,
            in_place=True,
        ),
        Operation(
            "all_to_all",
            "rank i's j-th part goes to rank j's i-th",
            ("alltoall", "a2a"),
            factor="(n-1)/n",
        ),
        Operation(
            "all_to_all_v",
            "all-to-all with a count and a place for every pair (--alltoallv-metadata)",
            ("alltoallv", "a2av"),
            factor="(n-1)/n",
        ),
        Operation(
            "broadcast",
            "every rank gets the root's buffer",
            ("bcast",),
            rooted=True,
            same_output=True,
            out_of_place=False,
            in_place=True,
        ),
        Operation(
            "reduce",
            "the root gets the reduction of all ranks' buffers",
            ("red",),
            reduces=True,
            rooted=True,
            out_of_place=False,
            in_place=True,
        ),
        Operation(
            "gather",
            "the root gets all ranks' parts",
            (),
            input="part",
            factor="(n-1)/n",
            rooted=True,
        ),
        Operation(
            "scatter",
            "every rank gets its part of the root's buffer",
            (),
            output="part",
            factor="(n-1)/n",
            rooted=True,
        ),
        Operation(
            "sendrecv",
            "every rank sends to the next and receives from the one before",
            ("send_recv", "p2p"),
        ),
        Operation(
            "permute",
            "ranks send along the pairs of --custom-src-target-pairs",
            ("perm", "collective_permute"),
        ),
        Operation("barrier", "every rank waits for all ranks; no data", ("barr",)),
    )
}
_NAMES = {name: o for o in OPERATIONS.values() for name in (o.name, *o.aliases)}


def is_operation(words: str) -> bool:
    """Whether a word of a command line names operations, with commas between them."""
    return all(word in _NAMES or word == "all" for word in words.split(","))


def operation(name: str) -> Operation:
    """The operation called ``name``, by its own name or an alias.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    found = _NAMES.get(name.lower().replace("-", "_"))
    if found is not None:
        return found
    meant = did_you_mean(name.lower(), _NAMES)
    raise ConfigError(f"operation {name!r} is not known{meant} (known: {', '.join(OPERATIONS)})")
