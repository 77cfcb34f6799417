"""Generate the tables of docs/benchmarks from the result files in docs/results.

python tools/bench/tables.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import estimates

_BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
PAGES = tuple(_BENCHMARKS / f"{name}.md" for name in ("training", "launching", "layout-search"))
_TABLE_MARKERS = re.compile(
    r"(<!-- table: (\S+), written by tools/bench/tables\.py -->\n).*?(<!-- end -->)", re.S
)


def render(page: str) -> str:
    """Return the page with its tables regenerated."""
    return _TABLE_MARKERS.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", page)


def _read_results(name: str) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((estimates.RESULTS / f"{name}.json").read_text())
    return results


def _read_rows(name: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in _read_results(name)["rows"]}


def _format_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _speed_cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the cells of tokens/s of a GPU, MFU and GiB."""
    return (
        f"{row['tokens_per_second_per_gpu']:,}",
        f"{100 * row['mfu']:.1f} %",
        f"{row['memory_gib']:.1f}",
    )


def _step_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of the seconds of a step and of :func:`_speed_cells`."""
    return f"{row['step_seconds']:.2f}", *_speed_cells(row)


def _llama_table() -> str:
    headings = ("Sequence, micro-batch", "tokens/s", "MFU", "of the limit", "GiB")
    rows = []
    for row in _read_rows("gpu-1xh200").values():
        fp8_note = ", `fp8: hybrid`" if "fp8" in row["options"] else ""
        rows.append(
            (
                f"{row['sequence']} x {row['micro_batch']}{fp8_note}",
                f"{row['tokens_per_second_per_gpu']:,}",
                f"{row['mfu']:.1%}".replace("%", " %"),
                f"{row['share_of_matmul_limit']:.0%}".replace("%", " %"),
                f"{row['memory_gib']:.1f}",
            )
        )
    return _format_table(headings, rows)


def _trace_table() -> str:
    """Return the table of shares of kernel time in the profiled runs."""
    runs = {
        f"{row} ({name})": _parse_shares(_read_rows(name)[row]["profile"])
        for name, row in (
            ("gpu-1xh200", "bf16"),
            ("gpu-1xh200-fp8", "fp8"),
            ("gpu-1xh200-moe", "mixtral"),
            ("gpu-1xh200-moe", "qwen3-moe"),
        )
    }
    kinds = list(dict.fromkeys(kind for shares in runs.values() for kind in shares))
    rows = [(kind, *(shares.get(kind, "") for shares in runs.values())) for kind in kinds]
    return _format_table(("of the kernels' time", *runs), rows)


def _parse_shares(profile: Sequence[str]) -> dict[str, str]:
    """Parse a profile summary into shares by kind, using one name for kinds that were renamed
    later.
    """
    matches = (re.match(r"  (\S.*?)  +[\d.,]+ ms +([\d.]+) %$", line) for line in profile)
    kinds = {match[1]: match[2] for match in matches if match}
    renamed = {"optimizer": "optimizer and norm"}
    return {renamed.get(kind, kind): f"{share} %" for kind, share in kinds.items()}


def _moe_table() -> str:
    rows = _read_rows("gpu-1xh200-moe")
    table_rows = []
    for name, dense, title in (
        ("mixtral", "mixtral-dense", "Mixtral"),
        ("qwen3-moe", "qwen3-dense", "Qwen3-30B-A3B"),
    ):
        share = rows[name]["tflops_per_gpu"] / rows[dense]["tflops_per_gpu"]
        table_rows.append(_format_moe_row(title, rows[name], f"{share:.0%}".replace("%", " %")))
        table_rows.append(_format_moe_row("dense, as much arithmetic", rows[dense], ""))
    return _format_table(("", "TFLOP/s", "of the dense", "tokens/s", "GiB"), table_rows)


def _format_moe_row(title: str, row: Mapping[str, Any], share: str) -> Sequence[str]:
    speed, memory = row["tokens_per_second_per_gpu"], row["memory_gib"]
    return title, f"{row['tflops_per_gpu']:.0f}", share, f"{speed:,}", f"{memory:.1f}"


def _cuda_graph_table() -> str:
    rows = _read_rows("gpu-1xh200-captured")
    table_rows = []
    for name, title in (("small", "bf16, tokens/s"), ("small-fp8", "`fp8: hybrid`, tokens/s")):
        speeds = (rows[run]["tokens_per_second_per_gpu"] for run in (name, f"{name}-captured"))
        table_rows.append((title, *(f"{speed:,}" for speed in speeds)))
    return _format_table(("", "launched one by one", "captured"), table_rows)


def _torchtitan_table() -> str:
    table_rows = []
    for row in _read_results("torchtitan-2xh200")["rows"]:
        sequence = row["ours"][0]["sequence"]
        sizes = {run["micro_batch"] for trainer in ("ours", "torchtitan") for run in row[trainer]}
        for size in sorted(sizes):
            flagscale_speeds, torchtitan_speeds = (
                [
                    trainer_run["tokens_per_second_per_gpu"]
                    for trainer_run in row[trainer_name]
                    if trainer_run["micro_batch"] == size
                ]
                for trainer_name in ("ours", "torchtitan")
            )
            formatted = (
                f"{max(speeds):,}" if speeds else ""
                for speeds in (flagscale_speeds, torchtitan_speeds)
            )
            table_rows.append((f"{sequence} x {size}", *formatted, ""))
        table_rows.append((f"{sequence}, the fastest of each", "", "", str(row["ratio"])))
    return _format_table(
        ("Sequence, micro-batch", "tokens/s/GPU", "torchtitan", "ratio"), table_rows
    )


def _layout_table() -> str:
    rows = _read_rows("gpu-2xh100")
    dp2_speed = rows["dp2"]["tokens_per_second_per_gpu"]
    table_rows = []
    for name, title in (
        ("dp2", "dp2"),
        ("tp2", "tp2, sequence parallel, `tp_comm_overlap: true`"),
        ("pp2", "pp2, 5 layers and 3 with the head"),
    ):
        speed, gib = rows[name]["tokens_per_second_per_gpu"], rows[name]["memory_gib"]
        mfu, relative_speed = f"{100 * rows[name]['mfu']:.1f} %", f"{100 * speed / dp2_speed:.0f} %"
        table_rows.append((title, f"{speed:,}", mfu, relative_speed, f"{gib:.1f}"))
    return _format_table(("Layout", "tokens/s/GPU", "MFU", "of dp2", "GiB"), table_rows)


def _long_sequence_table() -> str:
    rows = _read_rows("gpu-2xh200-context")
    table_rows = [
        (f"{row['sequence']:,}", *_speed_cells(row))
        for row in sorted(rows.values(), key=lambda row: row["sequence"])
    ]
    return _format_table(("Sequence", "tokens/s/GPU", "MFU", "GiB"), table_rows)


def _offload_table() -> str:
    groups = {
        "gpu-1xh200-offload": {
            "kept-256k": "8 layers, states on the GPU",
            "offload-256k": "8 layers, states on the host",
        },
        "gpu-1xh200-offload-lean": {
            "kept-256k": "8 layers, states on the GPU, another H200",
            "offload-remainders-256k": "8 layers, `use_precision_aware_optimizer: true`",
            "offload-bf16-moments-256k": "8 layers, moments in bf16 as well",
        },
        "gpu-1xh100-offload": {
            "8b-offload": "32 layers, states on the host, 19 layers recomputed (H100, earlier)"
        },
    }
    table_rows = []
    for name, titles in groups.items():
        rows = _read_rows(name)
        kept = rows.get("kept-256k", {}).get("step_seconds")
        table_rows += [
            (
                title,
                *_step_cells(rows[row]),
                f"{kept / rows[row]['step_seconds'] * 100:.1f} %" if kept else "",
            )
            for row, title in titles.items()
        ]
    return _format_table(("", "s a step", "tokens/s", "MFU", "GiB", "of the speed"), table_rows)


def _transformers_table() -> str:
    titles = {"full": "all weights", "lora": "LoRA, rank 16, all linear layers"}
    table_rows = []
    for row in _read_results("transformers-1xh200")["rows"]:
        cells = [
            f"{run['tokens_per_second_per_gpu']:,} ({run['memory_gib']:.1f} GiB)"
            for (run,) in (row["flagscale"], row["transformers"])
        ]
        table_rows.append((titles[row["name"]], *cells, f"{row['ratio']:.2f}"))
    return _format_table(("", "flagscale", "transformers", "ratio"), table_rows)


def _sharding_table() -> str:
    rows = _read_rows("gpu-2xh200-sharded")
    titles = {
        "dp2": "8 layers, 4096 x 2, `optim`",
        "dp2-sharded": "8 layers, 4096 x 2, `optim_grads_params`",
        "8b-sharded": "32 layers, 4096 x 1, `optim_grads_params`, moments in bf16",
    }
    table_rows = [(title, *_step_cells(rows[name])) for name, title in titles.items()]
    return _format_table(("", "s a step", "tokens/s/GPU", "MFU", "GiB"), table_rows)


def _optimizer_states_table() -> str:
    results = _read_results("optimizer-states-cpu")
    compared = {row["precision"]: row for row in results["compared"]}
    table_rows = []
    for name, bytes_per_weight in _STATE_BYTES.items():
        losses = [c["validation_loss"] for c in results["curves"] if c["precision"] == name]
        difference = "reference"
        if row := compared.get(name):
            low, high = row["low"], row["high"]
            difference = f"{row['percent']:+.2f} % ({low:+.2f} to {high:+.2f})"
        mean_loss = f"{sum(losses) / len(losses):.4f}"
        table_rows.append((name, bytes_per_weight, mean_loss, difference))
    return _format_table(("States", "bytes a weight", "validation loss", "from fp32"), table_rows)


def _optimizers_table() -> str:
    results = _read_results("optimizers-cpu")
    compared = {row["precision"]: row for row in results["compared"]}
    table_rows = []
    for name in results["runs"]:
        losses = [c["validation_loss"] for c in results["curves"] if c["precision"] == name]
        difference = "reference"
        if row := compared.get(name):
            difference = f"{row['percent']:+.1f} % ({row['low']:+.1f} to {row['high']:+.1f})"
        table_rows.append((name, f"{sum(losses) / len(losses):.3f}", difference))
    return _format_table(("Run", "validation loss", "from the first"), table_rows)


_STATE_BYTES = {
    "fp32": "2 + 4 + 12",
    "remainders": "2 + 4 + 10",
    "bf16 moments": "2 + 4 + 6",
    "fp8 moments": "2 + 4 + 4",
    "fp8 moments, bf16 weights and gradients": "2 + 2 + 2",
}
"""Bytes of the model's weight, its gradient and the optimizer's states, by name of the format in
optimizer_states.py; scales of blocks not counted.
"""


def _context_parallel_table() -> str:
    table_rows = [
        (
            f"{row['sequence']:,}",
            f"`{row['communication']}`, {row['kernel']}" if "kernel" in row else "one GPU, cudnn",
            f"{1000 * row['seconds']:.0f}",
            f"{row['tflops_per_gpu']:.0f}",
            f"{100 * row['share_of_one_gpu']:.0f} %" if "kernel" in row else "",
        )
        for row in _read_results("context-parallel-2xh200")["rows"]
    ]
    headings = ("Sequence", "Attention", "ms", "TFLOP/s/GPU", "of one GPU")
    return _format_table(headings, table_rows)


def _estimate_table() -> str:
    table_rows = []
    for run in estimates.compare_runs():
        errors = (f"{100 * error:+.1f} %" for error in run.errors)
        measured = f"{run.memory:.1f}", f"{run.seconds:.3f}"
        memory, seconds = errors
        table_rows.append((run.name, measured[0], memory, measured[1], seconds))
    return _format_table(("Run", "GiB", "estimated", "s a step", "estimated"), table_rows)


def _multi_gpu_table() -> str:
    # Columns of the result file; speed is tokens/s of all GPUs, each is tokens/s of one GPU.
    columns = ("gpus", "layers", "layout", "overrides", "speed", "each", "tflops", "mfu", "gib")
    table_rows = []
    for values in _read_results("h200-llama3-8b")["rows"]:
        row = dict(zip(columns, values, strict=True))
        table_rows.append(
            (
                str(row["gpus"]),
                str(row["layers"]),
                row["layout"],
                f"`{row['overrides']}`",
                f"{row['each']:,}",
                f"{row['mfu']} %",
                f"{row['gib']}",
            )
        )
    headings = ("GPUs", "Layers", "Layout", "Overrides", "tokens/s/GPU", "MFU", "GiB/GPU")
    return _format_table(headings, table_rows)


_LOCAL_LAUNCH_TITLES = {
    ("dryrun", "CPU s"): "`action=dryrun`: plan and scripts, no torch",
    ("action=run until it returns", "s"): "`action=run`, from the command until it returns with "
    "every rank joined",
    ("script by hand until every rank joined", "s"): "the same script started by hand, until every "
    "rank joined",
    ("launch overhead", "s"): "launch overhead: the difference, launch by launch",
    ("tiny, 1 rank(s)", "steps/s"): "tiny Llama-3, bf16, 1 rank, 4 x 256 tokens a step",
    ("tiny, 2 rank(s)", "steps/s"): "tiny Llama-3, bf16, 2 ranks, 8 x 256 tokens a step",
}


def _local_launch_table() -> str:
    medians = {
        (f["name"], f["unit"]): f["median"] for f in _read_results("local-launch-cpu")["figures"]
    }
    table_rows = []
    for key, title in _LOCAL_LAUNCH_TITLES.items():
        digits = 1 if key[1] == "steps/s" else 2
        unit = "s of CPU time" if key[1] == "CPU s" else key[1]
        table_rows.append((title, f"{medians[key]:.{digits}f} {unit}"))
    return _format_table(("What", "Median"), table_rows)


# Measured commands, described in ssh_launch.py: "run unchecked" is a run without preflight checks,
# and "bare" one SSH connection and one command per host. Other commands are compared with "bare".
_SSH_KINDS = ("run", "query", "stop", "run unchecked", "run cold", "pdsh", "ssh+scp")


def _ssh_launch_table() -> str:
    table_rows = []
    for name, suffix in (
        ("ssh_launch", ""),
        ("ssh_launch_64", ", again (`results/ssh_launch_64.json`)"),
    ):
        for hosts, rows_by_kind in _read_results(name)["hosts"].items():
            ratios = (
                rows_by_kind[kind]["ratio_to_bare"] if kind in rows_by_kind else None
                for kind in _SSH_KINDS
            )
            formatted = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            table_rows.append(
                (f"{hosts}{suffix}", f"{rows_by_kind['bare']['median_s']:.2f} s", *formatted)
            )
    return _format_table(
        ("Hosts", "bare", *_SSH_KINDS[:-1], "ssh+scp, one after another"), table_rows
    )


_FAULT_ANSWERS = {
    "restart": "restart on the same hosts",
    "replace": "a spare takes its place",
    "shrink": "two of three hosts go on",
    "end": "the run ends",
}


def _faults_table() -> str:
    table_rows = []
    for row in _read_results("faults-cpu")["rows"]:
        goes_on = "next_step" in row
        table_rows.append(
            (
                row["fault"],
                _FAULT_ANSWERS[row["answer"]],
                f"{row['named']:.1f} s",
                f"{row['lost_steps']:g}" if goes_on else "",
                f"{row['next_step']:.0f} s" if goes_on else "",
            )
        )
    return _format_table(("Fault", "Answer", "named within", "steps lost", "next step"), table_rows)


def _checkpoints_table() -> str:
    headings = ("", "save, s/GiB", "of the rate alone", "load, s/GiB", "of the rate alone", "stall")
    rows = []
    for name, title in (("disk", "disk"), ("s3", "S3 server")):
        results = _read_results(f"checkpoints-{name}-cpu")
        row = results[name]
        rows.append(
            (
                title,
                f"{row['save'] / results['gib']:.1f}",
                f"{100 * row['save_of_alone']:.0f} %",
                f"{row['load'] / results['gib']:.1f}",
                f"{100 * row['load_of_alone']:.0f} %",
                f"{row['stall']:.2f} s",
            )
        )
    return _format_table(headings, rows)


def _layout_search_table() -> str:
    headings = (
        *("Experiment", "layouts", "trials of the search", "seconds", "slower than the best"),
        *("after trials for 25 %", "rank correlation", "trials of FlagScale's grid"),
        *("its winner, slower", "spread of a layout's trials"),
    )
    rows = []
    for name, row in (
        *_read_results("auto-tune-2xh200")["experiments"].items(),
        *_read_results("auto-tune-cpu")["experiments"].items(),
    ):
        grid, budget, spread = row["grid"], row.get("budget", {}), row["spread"]
        rows.append(
            (
                name,
                f"{row['measured_layouts']} of {row['layouts']} measured",
                f"{row['search_trials']}, {100 * row['share_of_layouts']:.0f} %",
                str(row["search_seconds"]),
                *(_format_slower(record) for record in (row, budget)),
                f"{row['rank_correlation']:.2f}",
                str(grid["trials"]),
                _format_slower(grid),
                f"{100 * spread['median']:.1f} %, at most {100 * spread['largest']:.1f} %",
            )
        )
    return _format_table(headings, rows)


def _format_slower(record: Mapping[str, Any]) -> str:
    return f"{100 * record['slower']:.1f} %" if "slower" in record else ""


def _layout_replays_table() -> str:
    headings = (
        *("Simulated grid", "layouts", "trials", "of all", "at most 25 %", "within 3 %"),
        *("within 3 % after trials for 25 %", "loss of 95 %", "largest loss"),
    )
    rows = [
        (
            name,
            str(row["layouts"]),
            f"{row['trials']:.1f}",
            f"{100 * row['share_of_layouts']:.0f} %",
            f"{100 * row['within_share']:.0f} %",
            f"{100 * row['within_3_percent']:.0f} %",
            f"{100 * row['within_3_percent_early']:.0f} %",
            f"{100 * row['loss_of_95_percent']:.1f} %",
            f"{100 * row['largest_loss']:.1f} %",
        )
        for name, row in _read_results("auto-tune-replays")["grids"].items()
    ]
    return _format_table(headings, rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "llama": _llama_table,
    "traces": _trace_table,
    "mixtures": _moe_table,
    "captured": _cuda_graph_table,
    "torchtitan": _torchtitan_table,
    "layouts": _layout_table,
    "estimates": _estimate_table,
    "long": _long_sequence_table,
    "context": _context_parallel_table,
    "offload": _offload_table,
    "transformers": _transformers_table,
    "sharding": _sharding_table,
    "states": _optimizer_states_table,
    "optimizers": _optimizers_table,
    "checkpoints": _checkpoints_table,
    "several": _multi_gpu_table,
    "local": _local_launch_table,
    "ssh": _ssh_launch_table,
    "faults": _faults_table,
    "layout-search": _layout_search_table,
    "layout-replays": _layout_replays_table,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generate the tables of docs/benchmarks.")
    parser.add_argument("--check", action="store_true", help="only report whether they are current")
    options = parser.parse_args(argv)
    outdated = 0
    for path in PAGES:
        current = path.read_text(encoding="utf-8")
        page = render(current)
        if page == current:
            continue
        outdated = 1
        if options.check:
            print(f"{path} is out of date: run {Path(__file__).name}", file=sys.stderr)
        else:
            path.write_text(page, encoding="utf-8")
    return outdated if options.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
