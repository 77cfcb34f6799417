"""The command: what its line, or the lines of its batch, ask for. From parsed flags to a
:class:`BenchSpec`, every value checked before any rank starts."""

from __future__ import annotations

import argparse
import math
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from flagscale.bench.collectives import patterns, sizes
from flagscale.bench.collectives.command import CHECK_MODES, build_parser, normalise
from flagscale.bench.collectives.curves import read_results
from flagscale.bench.collectives.operations import (
    DATA_TYPES,
    OPERATIONS,
    REDUCTIONS,
    DataType,
    Operation,
    data_type,
    operation,
)
from flagscale.bench.collectives.records import read_baseline
from flagscale.bench.collectives.spec import (
    Average,
    Batch,
    BenchSpec,
    Buffers,
    Check,
    Comparison,
    GroupsSpec,
    Iterations,
    Output,
)
from flagscale.bench.collectives.statistics import parse_statistics
from flagscale.bench.command_line import COMM, at_least, filled, judge
from flagscale.bench.files import read_text, require_writable
from flagscale.bench.placement import DEFAULT_SETUP, placement
from flagscale.bench.tool import Tool
from flagscale.comm import registry
from flagscale.errors import ConfigError
from flagscale.report.figure import require_image


class Bench(Tool[Batch]):
    """Measures collectives."""

    prog = "bench.py"
    run = "flagscale.bench.collectives.worker:run_rank"

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
        ConfigError: a flag or value is wrong, or a file it names cannot be read or used; of a
            batch, the message names the line.
    """
    parser = build_parser(prog)
    options = parser.parse(normalise(words))
    if options.batch is None:
        return [_from_options(options, words, prog=prog, keeps=keeps)]
    if options.operation:
        raise ConfigError(f"--batch: the operation {options.operation!r} belongs into the file")
    specs: list[BenchSpec] = []
    for where, own in _lines(options.batch):
        try:
            line = parser.parse(normalise([*words, *own]))
            if line.batch != options.batch:
                raise ConfigError(f"--batch {line.batch}: a line of a batch has none of its own")
            spec = _from_options(line, [*words, *own], prog=prog, keeps=keeps)
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


_AVERAGES: dict[str, Average] = dict(zip("0123", get_args(Average), strict=True))
_KEEPS_NOTHING: Any = {"plots": [], "imports": []}
_KEEPS_NOTHING |= dict.fromkeys(("json", "csv", "report", "baseline"))
_DEFAULT_SIZE = 32 * 2**20


def _from_options(
    options: argparse.Namespace, arguments: Sequence[str], *, prog: str, keeps: bool
) -> BenchSpec:
    """The run that parsed flags describe. Unless it ``keeps`` results, a rank other than the first,
    its host need not have the files for and of them."""
    if not keeps:
        options = argparse.Namespace(**{**vars(options), **_KEEPS_NOTHING})
    operations = _operations(options.operation)
    check, comparison = _check(options), _comparison(options)
    notes = tuple(_notes(options, operations))
    if options.ngpus != 1:
        raise ConfigError(f"-g {options.ngpus}: one rank drives one GPU; give more ranks with -r")
    if options.average not in _AVERAGES:
        raise ConfigError(f"-a/--average {options.average!r}; expected 0, 1, 2 or 3")
    place = placement(options)
    judged = judge(comparison.backends or (place.backend,), options.comm)
    return BenchSpec(
        operations=operations,
        types=_types(options.datatype),
        sizes=_sizes(options, operations),
        reductions=_reductions(options.redop),
        roots=_roots(options.root),
        places=_places(options),
        iterations=_iterations(options),
        buffers=_buffers(options),
        check=check,
        groups=_groups(options),
        output=_output(options),
        comparison=comparison,
        placement=place,
        options={name: values for name, values in judged.items() if values},
        timing=options.timing,
        average=_AVERAGES[options.average],
        blocking=_switch("-z/--blocking", options.blocking),
        cpu_time=_switch("-C/--report-cputime", options.report_cputime),
        notes=notes,
        prog=prog,
        command=tuple(arguments),
    )


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _operations(text: str | None) -> tuple[Operation, ...]:
    if not text:
        raise ConfigError(
            f"the operation is missing (one of {', '.join(OPERATIONS)})", hint="bench.py --help"
        )
    names: Iterable[str] = OPERATIONS if text == "all" else _words(text)
    return tuple(dict.fromkeys(operation(name) for name in names))


def _types(text: str) -> tuple[DataType, ...]:
    names: Iterable[str] = DATA_TYPES if text == "all" else _words(text)
    return tuple(dict.fromkeys(data_type(name) for name in names))


def _reductions(text: str) -> tuple[str, ...]:
    names = REDUCTIONS if text == "all" else _words(text)
    for name in names:
        if name not in REDUCTIONS:
            raise ConfigError(f"-o/--redop {name!r}; expected {', '.join(REDUCTIONS)} or all")
    return tuple(dict.fromkeys(names))


def _roots(text: str) -> tuple[int, ...]:
    try:
        roots = tuple(int(word) for word in _words(text))
    except ValueError:
        roots = ()
    if not roots or min(roots) < -1:
        raise ConfigError(f"--root {text!r} is no rank; expected such as 0, or -1 for every rank")
    return roots


def _sizes(options: argparse.Namespace, operations: Sequence[Operation]) -> tuple[int, ...]:
    minimum = sizes.parse_size(options.minbytes)
    moving = any(op.name != "barrier" for op in operations)
    if minimum < 1 and moving:
        raise ConfigError("-b/--minbytes 0: nothing would be moved; expected at least 1")
    # A start alone, above or below the default end, is meant as a start.
    maximum = max(minimum, _DEFAULT_SIZE)
    if options.maxbytes is not None:
        maximum = sizes.parse_size(options.maxbytes)
    step = sizes.parse_size(options.stepbytes) if options.stepbytes else None
    found = sizes.sweep(minimum, maximum, step=step, factor=_factor(options.stepfactor))
    return found if moving else (0,)


def _factor(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float(sizes.parse_size(text))
    if not math.isfinite(value):
        raise ConfigError(f"-f/--stepfactor {text} is not finite")
    return value


def _places(options: argparse.Namespace) -> tuple[Literal["out", "in"], ...] | None:
    if options.in_place:
        return ("in",)
    if options.out_of_place:
        return ("out",)
    return ("out", "in") if options.both_places or options.format == "nccl-tests" else None


def _iterations(options: argparse.Namespace) -> Iterations:
    at_least("-n/--iters", options.measured, 1)
    at_least("-w/--warmup_iters", options.warmup, 0)
    at_least("-W/--neff_warmup_iters", options.replay_warmup, 0)
    at_least("-m/--agg-iters", options.aggregated, 1)
    at_least("--run-cycles", options.cycles, 1)
    at_least("-I/--neff_iters", options.replays, 0)
    if options.replay_warmup and not options.replays:
        raise ConfigError("-W/--neff_warmup_iters needs -I/--neff_iters")
    return filled(Iterations, options, replays=options.replays or None)


def _buffers(options: argparse.Namespace) -> Buffers:
    if options.shared_output_buff and not options.unique_buff:
        raise ConfigError("--shared-output-buff needs --unique-buff: else all buffers are shared")
    return Buffers(
        unique=options.unique_buff,
        shared_output=options.shared_output_buff,
        registered=max(int(options.local_register), int(options.sb2sb)),
        ratio=_ratio(options.coalesced_cc_size_ratio),
    )


def _ratio(text: str | None) -> tuple[float, ...]:
    if text is None:
        return (1.0,)
    try:
        ratio = tuple(float(word) for word in _words(text.strip().strip("[]")))
    except ValueError:
        ratio = ()
    if not ratio or not all(0 < part < math.inf for part in ratio):
        raise ConfigError(f"--coalesced-cc-size-ratio {text!r}; expected such as [1,2,1]")
    return ratio


def _check(options: argparse.Namespace) -> Check:
    mode = {"1": "random", "0": None}.get(options.check, options.check)
    if mode not in (*CHECK_MODES, None):
        raise ConfigError(f"-c/--check {mode!r}; expected {' or '.join(CHECK_MODES)}")
    seed = int(time.time()) if options.seed is None else options.seed
    if not 0 <= seed < 2**62:
        raise ConfigError(f"--seed {seed}; expected 0 to 2**62 - 1")
    dump = options.dump_dir.absolute()
    return Check(mode=mode, seed=seed, dump=dump, dump_shown=dump)


def _groups(options: argparse.Namespace) -> GroupsSpec:
    dimension, file = options.data_parallel_dimension, options.custom_replica_group
    at_least("--data-parallel-dimension", dimension, 1)
    if dimension is not None and file is not None:
        raise ConfigError("--data-parallel-dimension and --custom-replica-group exclude each other")
    pairs, counts = options.custom_src_target_pairs, options.alltoallv_metadata
    return GroupsSpec(
        custom=patterns.read_groups(file) if file else None,
        dimension=dimension,
        pairs=patterns.read_pairs(pairs) if pairs else None,
        exchange=patterns.read_exchange(counts) if counts else None,
    )


def _output(options: argparse.Namespace) -> Output:
    for path in options.plots:
        require_image(path, "--plot")
        require_writable(path, "--plot")
    kept = {"--report": options.report, "--report-to-json-file": options.json, "--csv": options.csv}
    for flag, path in kept.items():
        if path is not None:
            require_writable(path, flag)
    return filled(
        Output,
        options,
        statistics=parse_statistics(_words(options.stats)),
        interactive=not (options.non_interactive or options.debug),
        print_buffers=_switch("-p/--print-buffer", options.print_buffer),
        plots=tuple(options.plots),
        imports=tuple(curve for path in options.imports for curve in read_results(path)),
    )


def _comparison(options: argparse.Namespace) -> Comparison:
    names = _words(options.compare or "")
    if options.compare is not None and len(names) < 2:
        raise ConfigError(
            f"--compare {options.compare!r}; expected two backends, such as nccl,fsccl"
        )
    for name in names:
        registry.backend(name, given_by="--compare")
    at_least("--compare-rounds", options.rounds, 2)
    if options.peak is not None and not 0 < options.peak < math.inf:
        raise ConfigError(f"--peak {options.peak:g}; expected above 0")
    return filled(
        Comparison,
        options,
        backends=tuple(names),
        baseline=read_baseline(options.baseline) if options.baseline else None,
        tolerance=_fraction(options.tolerance),
    )


def _fraction(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
    if found is None:
        raise ConfigError(f"--tolerance {text!r}; expected a share such as 5% or 0.05")
    return float(found[1]) / (100 if found[2] else 1)


def _switch(flag: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(f"{flag} {text!r}; expected 0 or 1")
    return text == "1"


def _notes(options: argparse.Namespace, operations: Sequence[Operation]) -> Iterator[str]:
    """What was asked for and does nothing, or not what it does elsewhere."""
    if options.sb2sb:
        yield "--sb2sb: no such memory here; buffers are registered instead"
    if options.root != "0" and not any(op.rooted for op in operations):
        yield "--root: of no effect without an operation that has one"
    if options.slurm_setup_script == DEFAULT_SETUP:
        yield "--slurm-setup-script default: there is nothing to install"
    for name in ("kernel_num", "input_shape", "output_shape", "cc_dim"):
        if getattr(options, name) is not None:
            yield f"--{name.replace('_', '-')}: has no meaning on this device"
    if options.slurm_use_head_node_neuron_bench:
        yield "--slurm-use-head-node-neuron-bench: the program must be on a shared path"
    names = [op.name for op in operations]
    if options.custom_src_target_pairs is not None and "permute" not in names:
        yield "--custom-src-target-pairs: of no effect without permute"
    if options.alltoallv_metadata is not None and "all_to_all_v" not in names:
        yield "--alltoallv-metadata: of no effect without all_to_all_v"
    reducing = any(op.reduces for op in operations)
    if reducing and "all" not in (options.operation, options.datatype, options.redop):
        types, reductions = _types(options.datatype), _reductions(options.redop)
        absent = [f"{r} of {t.name}" for t in types for r in reductions if not t.reduces(r)]
        if absent:
            yield f"left out: torch has no {', '.join(absent)}"


main = Bench().main
