"""The command: what its line, or the lines of its batch, ask for."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from flagscale.bench.collectives.command import build_parser, normalise
from flagscale.bench.collectives.settings import from_options
from flagscale.bench.collectives.spec import Batch, BenchSpec
from flagscale.bench.command_line import COMM
from flagscale.bench.files import read_text
from flagscale.bench.tool import Tool
from flagscale.errors import ConfigError


class Bench(Tool[Batch]):
    """Measures collectives."""

    prog = "bench.py"
    run = "flagscale.bench.collectives.ranks:run_rank"

    def run_line(self, words: list[str], prog: str) -> int:
        if words:
            return super().run_line(words, prog)
        build_parser(prog).print_help()
        return 2

    def read(self, words: list[str], prog: str, *, keeps: bool) -> Batch:
        return Batch(tuple(read_specs(words, prog, keeps=keeps)))

    def header(self, plan: Batch) -> bool:
        return plan.specs[0].output.header

    def debug(self, plan: Batch) -> bool:
        return plan.specs[0].output.debug


def read_specs(
    words: Sequence[str], prog: str = "bench.py", *, keeps: bool = True
) -> list[BenchSpec]:
    """One specification, or one a line of ``--batch``; all of them for the same ranks. ``keeps``:
    this process is the one that writes files and compares with them, so they are looked at.

    Raises:
        ConfigError: a line is wrong; the message names it.
    """
    parser = build_parser(prog)
    options = parser.parse(normalise(words))
    if options.batch is None:
        return [from_options(options, words, prog=prog, keeps=keeps)]
    if options.operation:
        raise ConfigError(f"--batch: the operation {options.operation!r} belongs into the file")
    specs: list[BenchSpec] = []
    for where, own in _lines(options.batch):
        try:
            line = parser.parse(normalise([*words, *own]))
            if line.batch != options.batch:
                raise ConfigError(f"--batch {line.batch}: a line of a batch has none of its own")
            spec = from_options(line, [*words, *own], prog=prog, keeps=keeps)
        except ConfigError as error:
            raise type(error)(f"{where}: {error.message}", hint=error.hint) from error
        _require_same_ranks(spec, specs, where)
        specs.append(spec)
    if not specs:
        raise ConfigError(f"--batch {options.batch}: it has no line to run")
    return specs


def _require_same_ranks(spec: BenchSpec, before: Sequence[BenchSpec], where: str) -> None:
    """Refuse a line of a batch that would need processes of its own."""
    for other in before:
        place = replace(other.placement, backend=spec.placement.backend)
        names = [field.name for field in fields(place)]
        differing = [n for n in names if getattr(place, n) != getattr(spec.placement, n)]
        if differing:
            raise ConfigError(
                f"{where}: all lines run in the same ranks, and this one asks for others "
                f"({', '.join(differing)})",
                hint="give such flags once, beside --batch",
            )
        for name in {*other.backends} & {*spec.backends}:
            if other.options_of(name) != spec.options_of(name):
                raise ConfigError(
                    f"{where}: {COMM} of {name} holds for the whole process, and an earlier line "
                    "gives others",
                    hint="measure them one after the other, by two commands",
                )


def _lines(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Where each line of a batch is, and its words."""
    for number, line in enumerate(read_text(path, f"--batch {path}").splitlines(), start=1):
        where = f"--batch {path}:{number}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        if words:
            yield where, words


main = Bench().main
