"""The element types of the benchmark: their names in every dialect, sizes and precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flagscale.bench.command_line import did_you_mean
from flagscale.errors import ConfigError


@dataclass(frozen=True)
class DataType:
    """One element type."""

    name: str
    """As nccom-test prints it."""
    torch: str
    """Its attribute of the ``torch`` module."""
    nccl: str
    """As nccl-tests prints it."""
    bytes: int
    kind: Literal["integer", "float"]
    roundoff: float = 0.0
    """Unit roundoff: half the distance from 1 to the next number. 0 for integers."""
    tiny: float = 0.0
    """The smallest number above 0, which bounds what underflow loses."""

    def reduces(self, reduction: str) -> bool:
        """Whether torch's backends can reduce it. They know no 16-bit integers and no unsigned
        ones of 32 and 64 bits; sums and products of the latter are those of the signed ones."""
        if self.kind == "float" or self.name in ("uint8", "int8", "int32", "int64"):
            return self.kind == "float" or reduction != "avg"
        return self.bytes > 2 and reduction in ("sum", "prod")


def _float(name: str, torch: str, nccl: str, size: int, *, mantissa: int, least: int) -> DataType:
    return DataType(name, torch, nccl, size, "float", 2.0 ** -(mantissa + 1), 2.0**least)


DATA_TYPES: dict[str, DataType] = {
    t.name: t
    for t in (
        DataType("uint8", "uint8", "uint8", 1, "integer"),
        DataType("int8", "int8", "int8", 1, "integer"),
        DataType("uint16", "uint16", "uint16", 2, "integer"),
        DataType("int16", "int16", "int16", 2, "integer"),
        _float("fp16", "float16", "half", 2, mantissa=10, least=-24),
        _float("bf16", "bfloat16", "bfloat16", 2, mantissa=7, least=-133),
        DataType("uint32", "uint32", "uint32", 4, "integer"),
        DataType("int32", "int32", "int32", 4, "integer"),
        _float("fp32", "float32", "float", 4, mantissa=23, least=-149),
        DataType("int64", "int64", "int64", 8, "integer"),
        DataType("uint64", "uint64", "uint64", 8, "integer"),
        _float("fp64", "float64", "double", 8, mantissa=52, least=-1074),
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


def data_type(name: str) -> DataType:
    """The type called ``name`` in any dialect: ``fp32``, ``float`` and ``float32`` are one.

    Raises:
        ConfigError: there is no such type; the message names the nearest.
    """
    found = DATA_TYPES.get(_ALIASES.get(name.lower(), name.lower()))
    if found is not None:
        return found
    meant = did_you_mean(name.lower(), [*DATA_TYPES, *_ALIASES])
    raise ConfigError(
        f"-d/--datatype {name!r} is not known{meant} (known: {', '.join(DATA_TYPES)})"
    )
