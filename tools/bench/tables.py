"""Write the tables of docs/performance.md from docs/results/, between their markers.

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

sys.path.insert(0, str(Path(__file__).resolve().parent))

import estimates

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
_PLACE = re.compile(
    r"(<!-- table: (\S+), written by tools/bench/tables\.py -->\n).*?(<!-- end -->)", re.S
)


def render(page: str) -> str:
    """The page with its tables written anew."""
    return _PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", page)


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((estimates.RESULTS / f"{name}.json").read_text())
    return found


def _rows(name: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in _read(name)["rows"]}


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _llama() -> str:
    headings = ("Sequence, micro-batch", "tokens/s", "MFU", "of the limit", "GiB")
    rows = []
    for row in _rows("gpu-1xh200").values():
        eight = ", `fp8: hybrid`" if "fp8" in row["options"] else ""
        rows.append(
            (
                f"{row['sequence']} x {row['micro_batch']}{eight}",
                f"{row['tokens_per_second_per_gpu']:,}",
                f"{row['mfu']:.1%}".replace("%", " %"),
                f"{row['share_of_matmul_limit']:.0%}".replace("%", " %"),
                f"{row['memory_gib']:.1f}",
            )
        )
    return _table(headings, rows)


def _traces() -> str:
    """Shares of kernels' time, of the runs that were profiled."""
    runs = {
        f"{row} ({name})": _shares(_rows(name)[row]["profile"])
        for name, row in (
            ("gpu-1xh200", "bf16"),
            ("gpu-1xh200-fp8", "fp8"),
            ("gpu-1xh200-moe", "mixtral"),
            ("gpu-1xh200-moe", "qwen3-moe"),
        )
    }
    kinds = list(dict.fromkeys(kind for shares in runs.values() for kind in shares))
    rows = [(kind, *(shares.get(kind, "") for shares in runs.values())) for kind in kinds]
    return _table(("of the kernels' time", *runs), rows)


def _shares(profile: Sequence[str]) -> dict[str, str]:
    """By kind, as one name where a later version of the profile has another."""
    found = (re.match(r"  (\S.*?)  +[\d.,]+ ms +([\d.]+) %$", line) for line in profile)
    kinds = {one[1]: one[2] for one in found if one}
    renamed = {"optimizer": "optimizer and norm"}
    return {renamed.get(kind, kind): f"{share} %" for kind, share in kinds.items()}


def _mixtures() -> str:
    rows = _rows("gpu-1xh200-moe")
    made = []
    for name, dense, title in (
        ("mixtral", "mixtral-dense", "Mixtral"),
        ("qwen3-moe", "qwen3-dense", "Qwen3-30B-A3B"),
    ):
        share = rows[name]["tflops_per_gpu"] / rows[dense]["tflops_per_gpu"]
        made.append(_mixture(title, rows[name], f"{share:.0%}".replace("%", " %")))
        made.append(_mixture("dense, as much arithmetic", rows[dense], ""))
    return _table(("", "TFLOP/s", "of the dense", "tokens/s", "GiB"), made)


def _mixture(title: str, row: Mapping[str, Any], share: str) -> Sequence[str]:
    speed, memory = row["tokens_per_second_per_gpu"], row["memory_gib"]
    return title, f"{row['tflops_per_gpu']:.0f}", share, f"{speed:,}", f"{memory:.1f}"


def _captured() -> str:
    rows = _rows("gpu-1xh200-captured")
    made = []
    for name, title in (("small", "bf16, tokens/s"), ("small-fp8", "`fp8: hybrid`, tokens/s")):
        speeds = (rows[run]["tokens_per_second_per_gpu"] for run in (name, f"{name}-captured"))
        made.append((title, *(f"{speed:,}" for speed in speeds)))
    return _table(("", "launched one by one", "captured"), made)


def _torchtitan() -> str:
    made = []
    for row in _read("torchtitan-2xh200")["rows"]:
        sequence = row["ours"][0]["sequence"]
        sizes = {one["micro_batch"] for whose in ("ours", "torchtitan") for one in row[whose]}
        for size in sorted(sizes):
            ours, theirs = (
                [o["tokens_per_second_per_gpu"] for o in row[whose] if o["micro_batch"] == size]
                for whose in ("ours", "torchtitan")
            )
            shown = (f"{max(speeds):,}" if speeds else "" for speeds in (ours, theirs))
            made.append((f"{sequence} x {size}", *shown, ""))
        made.append((f"{sequence}, the fastest of each", "", "", str(row["ratio"])))
    return _table(("Sequence, micro-batch", "tokens/s/GPU", "torchtitan", "ratio"), made)


def _layouts() -> str:
    rows = _rows("gpu-2xh100")
    base = rows["dp2"]["tokens_per_second_per_gpu"]
    made = []
    for name, title in (
        ("dp2", "dp2"),
        ("tp2", "tp2, sequence parallel, `tp_comm_overlap: true`"),
        ("pp2", "pp2, 5 layers and 3 with the head"),
    ):
        speed, gib = rows[name]["tokens_per_second_per_gpu"], rows[name]["memory_gib"]
        share, of_dp = f"{100 * rows[name]['mfu']:.1f} %", f"{100 * speed / base:.0f} %"
        made.append((title, f"{speed:,}", share, of_dp, f"{gib:.1f}"))
    return _table(("Layout", "tokens/s/GPU", "MFU", "of dp2", "GiB"), made)


def _estimates() -> str:
    made = []
    for run in estimates.compared():
        errors = (f"{100 * error:+.1f} %" for error in run.errors)
        took = f"{run.memory:.1f}", f"{run.seconds:.3f}"
        memory, seconds = errors
        made.append((run.name, took[0], memory, took[1], seconds))
    return _table(("Run", "GiB", "estimated", "s a step", "estimated"), made)


def _several() -> str:
    columns = ("gpus", "layers", "layout", "overrides", "speed", "each", "tflops", "mfu", "gib")
    made = []
    for values in _read("h200-llama3-8b")["rows"]:
        row = dict(zip(columns, values, strict=True))
        made.append(
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
    return _table(headings, made)


_LOCAL = {
    ("dryrun", "CPU s"): "`action=dryrun`: plan and scripts, no torch",
    ("action=run until it returns", "s"): "`action=run`, from the command until it returns with "
    "every rank joined",
    ("script by hand until every rank joined", "s"): "the same script started by hand, until every "
    "rank joined",
    ("launch overhead", "s"): "launch overhead: the difference, launch by launch",
    ("tiny, 1 rank(s)", "steps/s"): "tiny Llama-3, bf16, 1 rank, 4 x 256 tokens a step",
    ("tiny, 2 rank(s)", "steps/s"): "tiny Llama-3, bf16, 2 ranks, 8 x 256 tokens a step",
}


def _local() -> str:
    found = {(f["name"], f["unit"]): f["median"] for f in _read("local-launch-cpu")["figures"]}
    made = []
    for key, title in _LOCAL.items():
        digits = 1 if key[1] == "steps/s" else 2
        unit = "s of CPU time" if key[1] == "CPU s" else key[1]
        made.append((title, f"{found[key]:.{digits}f} {unit}"))
    return _table(("What", "Median"), made)


_WAYS = ("run", "query", "stop", "run unchecked", "run cold", "pdsh", "ssh+scp")


def _ssh() -> str:
    made = []
    for name, more in (
        ("ssh_launch", ""),
        ("ssh_launch_64", ", again (`results/ssh_launch_64.json`)"),
    ):
        for hosts, ways in _read(name)["hosts"].items():
            ratios = (ways[way]["ratio_to_bare"] if way in ways else None for way in _WAYS)
            shown = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
            made.append((f"{hosts}{more}", f"{ways['bare']['median_s']:.2f} s", *shown))
    return _table(("Hosts", "bare", *_WAYS[:-1], "ssh+scp, one after another"), made)


TABLES: Mapping[str, Callable[[], str]] = {
    "llama": _llama,
    "traces": _traces,
    "mixtures": _mixtures,
    "captured": _captured,
    "torchtitan": _torchtitan,
    "layouts": _layouts,
    "estimates": _estimates,
    "several": _several,
    "local": _local,
    "ssh": _ssh,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the tables of docs/performance.md.")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    options = parser.parse_args(argv)
    current = PAGE.read_text(encoding="utf-8")
    made = render(current)
    if options.check:
        if made != current:
            print(f"{PAGE} is out of date: run {Path(__file__).name}", file=sys.stderr)
        return int(made != current)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
