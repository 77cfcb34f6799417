"""Command line of ``flagscale bench collectives``, and conversion of its flags to a
:class:`BenchSpec`.

Flags are defined in :mod:`.options`. They are those of nccom-test, a benchmark of AWS Neuron, and
the short ones of nccl-tests, so that command lines of both work here. Every value is checked before
any rank starts. ``--batch`` runs several command lines on the same ranks, one per line of a file.
"""

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
from flagscale.bench.collectives.curves import read_results
from flagscale.bench.collectives.operations import (
    DATA_TYPES,
    OPERATIONS,
    REDUCTIONS,
    DataType,
    Operation,
    find_data_type,
    find_operation,
)
from flagscale.bench.collectives.options import CHECK_MODES, build_parser, normalize_arguments
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
from flagscale.bench.command import BenchCommand
from flagscale.bench.files import read_text, require_writable
from flagscale.bench.options import COMM, from_options, parse_backend_options, require_at_least
from flagscale.bench.placement import NO_SETUP_SCRIPT, parse_placement
from flagscale.bench.statistics import parse_statistics
from flagscale.comm import registry
from flagscale.errors import ConfigError
from flagscale.report.figure import require_image


class CollectivesCommand(BenchCommand[Batch]):
    """Command that measures collectives."""

    prog = "flagscale bench collectives"
    rank_entry_point = "flagscale.bench.collectives.worker:run_rank"

    def run_arguments(self, words: list[str], prog: str) -> int:
        if words:
            return super().run_arguments(words, prog)
        build_parser(prog).print_help()
        return 2

    def parse_plan(self, words: list[str], prog: str, *, writes_results: bool) -> Batch:
        return Batch(tuple(read_specs(words, prog, writes_results=writes_results)))

    def prints_header(self, plan: Batch) -> bool:
        return plan.specs[0].output.header

    def prints_debug(self, plan: Batch) -> bool:
        return plan.specs[0].output.debug


def read_specs(
    words: Sequence[str], prog: str = CollectivesCommand.prog, *, writes_results: bool = True
) -> list[BenchSpec]:
    """Return the specification of a command line, or one per line of ``--batch``, all for the
    same ranks.

    Args:
        words: arguments.
        prog: name of the command in messages.
        writes_results: this process writes and compares result files, so their paths are checked.

    Raises:
        ConfigError: a flag or value is wrong, or a file cannot be read or used. In a batch the
            message begins with the file and line.
    """
    parser = build_parser(prog)
    options = parser.parse(normalize_arguments(words))
    if options.batch is None:
        return [_make_spec(options, words, prog=prog, writes_results=writes_results)]
    if options.operation:
        raise ConfigError(f"--batch: the operation {options.operation!r} belongs in the file")
    specs: list[BenchSpec] = []
    for location, line_words in _read_batch(options.batch):
        try:
            arguments = [*words, *line_words]
            line_options = parser.parse(normalize_arguments(arguments))
            if line_options.batch != options.batch:
                raise ConfigError(f"--batch {line_options.batch}: not supported in a batch's file")
            spec = _make_spec(line_options, arguments, prog=prog, writes_results=writes_results)
        except ConfigError as error:
            raise type(error)(f"{location}: {error.message}", hint=error.hint) from error
        _require_same_ranks(spec, specs, location)
        specs.append(spec)
    if not specs:
        raise ConfigError(f"--batch {options.batch}: no command line in it")
    return specs


def _require_same_ranks(spec: BenchSpec, earlier_specs: Sequence[BenchSpec], location: str) -> None:
    """Refuse a line of a batch whose ranks or backend options differ from the earlier lines'."""
    for earlier in earlier_specs:
        earlier_placement = replace(earlier.placement, backend=spec.placement.backend)
        names = [field.name for field in fields(earlier_placement)]
        differing_names = [
            n for n in names if getattr(earlier_placement, n) != getattr(spec.placement, n)
        ]
        if differing_names:
            raise ConfigError(
                f"{location}: all lines run on the same ranks, and this one changes "
                f"{', '.join(differing_names)}",
                hint="set such flags once, next to --batch",
            )
        for name in {*earlier.backends} & {*spec.backends}:
            if earlier.options_of(name) != spec.options_of(name):
                raise ConfigError(
                    f"{location}: {COMM} of {name} applies to the whole process, and an earlier "
                    "line sets other values",
                    hint="measure them by two commands",
                )


def _read_batch(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the location (flag, file and line number) and the words of each line of a batch."""
    for number, line in enumerate(read_text(path, f"--batch {path}").splitlines(), start=1):
        location = f"--batch {path}:{number}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"{location}: {error}") from error
        if words:
            yield location, words


_AVERAGES: dict[str, Average] = dict(zip("0123", get_args(Average), strict=True))
_NO_FILES: Any = {"plots": [], "imports": []}
_NO_FILES |= dict.fromkeys(("json", "csv", "report", "baseline"))
# Last size without -e. The default of -b (:mod:`.options`) is the same: a single size.
_DEFAULT_MAX_BYTES = 32 * 2**20


def _make_spec(
    options: argparse.Namespace, arguments: Sequence[str], *, prog: str, writes_results: bool
) -> BenchSpec:
    """Return the specification that parsed flags describe. If this process writes no results,
    flags for result files are ignored: their paths may not exist on its host.
    """
    if not writes_results:
        options = argparse.Namespace(**{**vars(options), **_NO_FILES})
    operations = _parse_operations(options.operation)
    check, comparison = _make_check(options), _make_comparison(options)
    notes = tuple(_list_notes(options, operations))
    if options.ngpus != 1:
        raise ConfigError(
            f"-g {options.ngpus}: each rank uses one GPU; set the number of ranks with -r"
        )
    if options.average not in _AVERAGES:
        raise ConfigError(f"-a/--average {options.average!r}; expected 0, 1, 2 or 3")
    placement = parse_placement(options)
    backend_options = parse_backend_options(
        comparison.backends or (placement.backend,), options.comm
    )
    return BenchSpec(
        operations=operations,
        types=_parse_types(options.datatype),
        sizes=_parse_sizes(options, operations),
        reductions=_parse_reductions(options.redop),
        roots=_parse_roots(options.root),
        places=_select_places(options),
        iterations=_make_iterations(options),
        buffers=_make_buffers(options),
        check=check,
        groups=_make_groups(options),
        output=_make_output(options),
        comparison=comparison,
        placement=placement,
        backend_options={name: values for name, values in backend_options.items() if values},
        timing=options.timing,
        average=_AVERAGES[options.average],
        blocking=_parse_switch("-z/--blocking", options.blocking),
        cpu_time=_parse_switch("-C/--report-cputime", options.report_cputime),
        notes=notes,
        prog=prog,
        command=tuple(arguments),
    )


def _split_words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _parse_operations(text: str | None) -> tuple[Operation, ...]:
    if not text:
        raise ConfigError(
            f"the operation is missing (one of {', '.join(OPERATIONS)})",
            hint=f"{CollectivesCommand.prog} --help",
        )
    names: Iterable[str] = OPERATIONS if text == "all" else _split_words(text)
    return tuple(dict.fromkeys(find_operation(name) for name in names))


def _parse_types(text: str) -> tuple[DataType, ...]:
    names: Iterable[str] = DATA_TYPES if text == "all" else _split_words(text)
    return tuple(dict.fromkeys(find_data_type(name) for name in names))


def _parse_reductions(text: str) -> tuple[str, ...]:
    names = REDUCTIONS if text == "all" else _split_words(text)
    for name in names:
        if name not in REDUCTIONS:
            raise ConfigError(f"-o/--redop {name!r}; expected {', '.join(REDUCTIONS)} or all")
    return tuple(dict.fromkeys(names))


def _parse_roots(text: str) -> tuple[int, ...]:
    try:
        roots = tuple(int(word) for word in _split_words(text))
    except ValueError:
        roots = ()
    if not roots or min(roots) < -1:
        raise ConfigError(
            f"--root {text!r} is not a rank; expected such as 0, or -1 for every rank"
        )
    return roots


def _parse_sizes(options: argparse.Namespace, operations: Sequence[Operation]) -> tuple[int, ...]:
    minimum = sizes.parse_size(options.minbytes)
    moves_data = any(op.name != "barrier" for op in operations)
    if minimum < 1 and moves_data:
        raise ConfigError("-b/--minbytes 0: no data would be moved; expected at least 1")
    # A first size above the default last size is the only size.
    maximum = max(minimum, _DEFAULT_MAX_BYTES)
    if options.maxbytes is not None:
        maximum = sizes.parse_size(options.maxbytes)
    step = sizes.parse_size(options.stepbytes) if options.stepbytes else None
    swept_sizes = sizes.sweep_sizes(
        minimum, maximum, step=step, factor=_parse_factor(options.stepfactor)
    )
    return swept_sizes if moves_data else (0,)


def _parse_factor(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float(sizes.parse_size(text))
    if not math.isfinite(value):
        raise ConfigError(f"-f/--stepfactor {text} is not finite")
    return value


def _select_places(options: argparse.Namespace) -> tuple[Literal["out", "in"], ...] | None:
    if options.in_place:
        return ("in",)
    if options.out_of_place:
        return ("out",)
    return ("out", "in") if options.both_places or options.format == "nccl-tests" else None


def _make_iterations(options: argparse.Namespace) -> Iterations:
    require_at_least("-n/--iters", options.measured, 1)
    require_at_least("-w/--warmup_iters", options.warmup, 0)
    require_at_least("-W/--neff_warmup_iters", options.replay_warmup, 0)
    require_at_least("-m/--agg-iters", options.aggregated, 1)
    require_at_least("--run-cycles", options.cycles, 1)
    require_at_least("-I/--neff_iters", options.replays, 0)
    if options.replay_warmup and not options.replays:
        raise ConfigError("-W/--neff_warmup_iters needs -I/--neff_iters")
    return from_options(Iterations, options, replays=options.replays or None)


def _make_buffers(options: argparse.Namespace) -> Buffers:
    if options.shared_output_buff and not options.unique_buff:
        raise ConfigError(
            "--shared-output-buff needs --unique-buff: without it all buffers are shared"
        )
    return Buffers(
        unique=options.unique_buff,
        shared_output=options.shared_output_buff,
        registered=max(int(options.local_register), int(options.sb2sb)),
        ratio=_parse_ratio(options.coalesced_cc_size_ratio),
    )


def _parse_ratio(text: str | None) -> tuple[float, ...]:
    if text is None:
        return (1.0,)
    try:
        ratio = tuple(float(word) for word in _split_words(text.strip().strip("[]")))
    except ValueError:
        ratio = ()
    if not ratio or not all(0 < part < math.inf for part in ratio):
        raise ConfigError(f"--coalesced-cc-size-ratio {text!r}; expected such as [1,2,1]")
    return ratio


def _make_check(options: argparse.Namespace) -> Check:
    mode = {"1": "random", "0": None}.get(options.check, options.check)
    if mode not in (*CHECK_MODES, None):
        raise ConfigError(f"-c/--check {mode!r}; expected {' or '.join(CHECK_MODES)}")
    seed = int(time.time()) if options.seed is None else options.seed
    if not 0 <= seed < 2**62:
        raise ConfigError(f"--seed {seed}; expected 0 to 2**62 - 1")
    dump_directory = options.dump_dir.absolute()
    return Check(mode=mode, seed=seed, dump=dump_directory, dump_shown=dump_directory)


def _make_groups(options: argparse.Namespace) -> GroupsSpec:
    dimension, file = options.data_parallel_dimension, options.custom_replica_group
    require_at_least("--data-parallel-dimension", dimension, 1)
    if dimension is not None and file is not None:
        raise ConfigError("--data-parallel-dimension and --custom-replica-group exclude each other")
    pairs, counts = options.custom_src_target_pairs, options.alltoallv_metadata
    return GroupsSpec(
        custom=patterns.read_groups(file) if file else None,
        dimension=dimension,
        pairs=patterns.read_pairs(pairs) if pairs else None,
        exchange=patterns.read_exchange(counts) if counts else None,
    )


def _make_output(options: argparse.Namespace) -> Output:
    for path in options.plots:
        require_image(path, "--plot")
        require_writable(path, "--plot")
    files = {
        "--report": options.report,
        "--report-to-json-file": options.json,
        "--csv": options.csv,
    }
    for flag, path in files.items():
        if path is not None:
            require_writable(path, flag)
    return from_options(
        Output,
        options,
        statistics=parse_statistics(_split_words(options.stats)),
        interactive=not (options.non_interactive or options.debug),
        print_buffers=_parse_switch("-p/--print-buffer", options.print_buffer),
        plots=tuple(options.plots),
        imported_curves=tuple(curve for path in options.imports for curve in read_results(path)),
    )


def _make_comparison(options: argparse.Namespace) -> Comparison:
    names = _split_words(options.compare or "")
    if options.compare is not None and len(names) < 2:
        raise ConfigError(
            f"--compare {options.compare!r}; expected two backends, such as nccl,fsccl"
        )
    for name in names:
        registry.get_backend(name, source="--compare")
    require_at_least("--compare-rounds", options.rounds, 2)
    if options.peak is not None and not 0 < options.peak < math.inf:
        raise ConfigError(f"--peak {options.peak:g}; expected above 0")
    return from_options(
        Comparison,
        options,
        backends=tuple(names),
        baseline=read_baseline(options.baseline) if options.baseline else None,
        tolerance=_parse_fraction(options.tolerance),
    )


def _parse_fraction(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
    if match is None:
        raise ConfigError(f"--tolerance {text!r}; expected a share such as 5% or 0.05")
    return float(match[1]) / (100 if match[2] else 1)


def _parse_switch(flag: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(f"{flag} {text!r}; expected 0 or 1")
    return text == "1"


def _list_notes(options: argparse.Namespace, operations: Sequence[Operation]) -> Iterator[str]:
    """Yield notes on flags without effect, or with another effect than in other tools."""
    if options.sb2sb:
        yield (
            "--sb2sb: this device has no state buffer (on-chip memory of AWS Neuron); buffers are "
            "registered instead, as with --register 1"
        )
    if options.root != "0" and not any(op.rooted for op in operations):
        yield "--root: has no effect without a rooted operation"
    if options.slurm_setup_script == NO_SETUP_SCRIPT:
        yield "--slurm-setup-script default: has no effect; nothing needs to be installed"
    for name in ("kernel_num", "input_shape", "output_shape", "cc_dim"):
        if getattr(options, name) is not None:
            yield f"--{name.replace('_', '-')}: has no meaning on this device"
    if options.slurm_use_head_node_neuron_bench:
        yield "--slurm-use-head-node-neuron-bench: the program must be on a shared path"
    names = [op.name for op in operations]
    if options.custom_src_target_pairs is not None and "permute" not in names:
        yield "--custom-src-target-pairs: has no effect without permute"
    if options.alltoallv_metadata is not None and "all_to_all_v" not in names:
        yield "--alltoallv-metadata: has no effect without all_to_all_v"
    has_reduction = any(op.reduces for op in operations)
    if has_reduction and "all" not in (options.operation, options.datatype, options.redop):
        types, reductions = _parse_types(options.datatype), _parse_reductions(options.redop)
        unsupported = [f"{r} of {t.name}" for t in types for r in reductions if not t.reduces(r)]
        if unsupported:
            yield f"omitted, because torch does not support it: {', '.join(unsupported)}"


main = CollectivesCommand().main
