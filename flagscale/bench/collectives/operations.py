"""Operations and element types that ``flagscale bench collectives`` measures.

The size of an operation is that of its *logical buffer*: the output of an all-gather, the input of
a reduce-scatter, the data that one rank sends in a send-receive. A rank's own buffer is either the
whole logical buffer or its n-th part.

Algorithm bandwidth is size over time. Bus bandwidth is algorithm bandwidth times a factor that
makes it comparable between numbers of ranks. The factors are those of nccl-tests (PERFORMANCE.md)
and nccom-test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flagscale.bench.options import suggest_name
from flagscale.errors import ConfigError

Extent = Literal["whole", "part"]
"""A rank's buffer is the whole logical buffer or its n-th part."""

REDUCTIONS = ("sum", "prod", "min", "max", "avg")


@dataclass(frozen=True)
class Operation:
    """A collective or point-to-point pattern."""

    name: str
    summary: str
    aliases: tuple[str, ...]
    input: Extent = "whole"
    output: Extent = "whole"
    reduces: bool = False
    rooted: bool = False
    same_output: bool = False
    """Every rank ends with the same bytes."""
    out_of_place: bool = True
    """torch supports it between two buffers."""
    in_place: bool = False
    """torch supports it in one buffer."""

    def bus_factor(self, ranks: int) -> float:
        """Return bus bandwidth divided by algorithm bandwidth for ``ranks`` ranks."""
        share = (ranks - 1) / ranks
        if self.name == "all_reduce":
            return 2 * share
        return share if self.has_shards else 1.0

    @property
    def has_shards(self) -> bool:
        """True if the logical buffer is divided into one part per rank."""
        return "part" in (self.input, self.output) or self.name.startswith("all_to_all")


OPERATIONS: dict[str, Operation] = {
    o.name: o
    for o in (
        Operation(
            "all_reduce",
            "every rank gets the reduction of all ranks' buffers",
            ("allr", "allreduce"),
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
            same_output=True,
            in_place=True,
        ),
        Operation(
            "reduce_scatter",
            "every rank gets its part of the reduction",
            ("redsct", "reducescatter"),
            output="part",
            reduces=True,
            in_place=True,
        ),
        Operation("all_to_all", "rank i's j-th part goes to rank j's i-th", ("alltoall", "a2a")),
        Operation(
            "all_to_all_v",
            "all-to-all with a count and a place for every pair (--alltoallv-metadata)",
            ("alltoallv", "a2av"),
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
        Operation("gather", "the root gets all ranks' parts", (), input="part", rooted=True),
        Operation(
            "scatter",
            "every rank gets its part of the root's buffer",
            (),
            output="part",
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
_OPERATIONS_BY_NAME = {name: o for o in OPERATIONS.values() for name in (o.name, *o.aliases)}


def is_operation(words: str) -> bool:
    """Return whether a word of a command line names operations, separated by commas."""
    return all(word in _OPERATIONS_BY_NAME or word == "all" for word in words.split(","))


def find_operation(name: str) -> Operation:
    """Return the operation with this name or alias.

    Raises:
        ConfigError: there is none; the message has the nearest name.
    """
    match = _OPERATIONS_BY_NAME.get(name.lower().replace("-", "_"))
    if match is not None:
        return match
    suggestion = suggest_name(name.lower(), _OPERATIONS_BY_NAME)
    raise ConfigError(
        f"operation {name!r} is not known{suggestion} (known: {', '.join(OPERATIONS)})"
    )


@dataclass(frozen=True)
class DataType:
    """An element type."""

    name: str
    """Name in nccom-test's output."""
    torch: str
    """Attribute of the ``torch`` module."""
    nccl: str
    """Name in nccl-tests' output."""
    bytes: int
    kind: Literal["integer", "float"]
    roundoff: float = 0.0
    """Unit roundoff: half the distance from 1 to the next number. 0 for integers."""
    tiny: float = 0.0
    """Smallest number above 0, which bounds the error by underflow."""

    def reduces(self, reduction: str) -> bool:
        """Return whether torch's backends support a reduction of this type. They support no
        16-bit integers, and no unsigned integers of 32 and 64 bits; sums and products of the
        latter are computed as signed.
        """
        if self.kind == "float" or self.name in ("uint8", "int8", "int32", "int64"):
            return self.kind == "float" or reduction != "avg"
        return self.bytes > 2 and reduction in ("sum", "prod")


def _float_type(
    name: str, torch: str, nccl: str, size: int, *, mantissa: int, min_exponent: int
) -> DataType:
    return DataType(name, torch, nccl, size, "float", 2.0 ** -(mantissa + 1), 2.0**min_exponent)


DATA_TYPES: dict[str, DataType] = {
    t.name: t
    for t in (
        DataType("uint8", "uint8", "uint8", 1, "integer"),
        DataType("int8", "int8", "int8", 1, "integer"),
        DataType("uint16", "uint16", "uint16", 2, "integer"),
        DataType("int16", "int16", "int16", 2, "integer"),
        _float_type("fp16", "float16", "half", 2, mantissa=10, min_exponent=-24),
        _float_type("bf16", "bfloat16", "bfloat16", 2, mantissa=7, min_exponent=-133),
        DataType("uint32", "uint32", "uint32", 4, "integer"),
        DataType("int32", "int32", "int32", 4, "integer"),
        _float_type("fp32", "float32", "float", 4, mantissa=23, min_exponent=-149),
        DataType("int64", "int64", "int64", 8, "integer"),
        DataType("uint64", "uint64", "uint64", 8, "integer"),
        _float_type("fp64", "float64", "double", 8, mantissa=52, min_exponent=-1074),
    )
}
_ALIASES = {
    **{t.torch: t.name for t in DATA_TYPES.values()},
    **{t.nccl: t.name for t in DATA_TYPES.values()},
    "char": "int8",
    "byte": "uint8",
    "int": "int32",
    "f16": "fp16",
    "f32": "fp32",
    "f64": "fp64",
}


def find_data_type(name: str) -> DataType:
    """Return the type with this name in any tool: ``fp32``, ``float`` and ``float32`` are the
    same.

    Raises:
        ConfigError: there is no such type; the message has the nearest name.
    """
    match = DATA_TYPES.get(_ALIASES.get(name.lower(), name.lower()))
    if match is not None:
        return match
    suggestion = suggest_name(name.lower(), [*DATA_TYPES, *_ALIASES])
    raise ConfigError(
        f"-d/--datatype {name!r} is not known{suggestion} (known: {', '.join(DATA_TYPES)})"
    )
