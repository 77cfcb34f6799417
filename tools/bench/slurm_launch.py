#!/usr/bin/env python3
"""How long a job of Slurm's takes from its allocation until every rank has joined.

    python tools/bench/slurm_launch.py --output docs/results/slurm-launch.json

Two nodes are namespaces of this machine under a real Slurm (tests/bed; needs root and Slurm's
programs), so their cores are this machine's. By turns the same program, which tells when it has
joined, is started by ``action=run`` with ``runner.type: slurm``, and by a batch script written by
hand whose srun starts it. A job's start is what ``scontrol`` calls StartTime, in whole seconds:
over several rounds both are wrong by half a second. The launcher may take a second more. Beside
it, how long ``flagscale runs`` takes to list 100 runs. Exits with 4 where either misses its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests"))

from flagscale.bench import machine
from flagscale.cli_errors import guard
from flagscale.launcher.layout import Layout
from flagscale.status import read_events

if TYPE_CHECKING:
    from support.slurm_lab import SlurmLab  # type: ignore[import-not-found]

MORE = 1.0
"""Seconds that the launcher may take more than srun by hand."""
LISTED, LISTING = 100, 1.0
BY_HAND = """\
import os, time
from pathlib import Path
rank = os.environ["SLURM_PROCID"]
Path(os.environ["OUT"], rank).write_text(repr(time.time()))
time.sleep(600)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=6, help="of both, %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    from support.slurm_lab import cluster

    facts = machine.facts("flagscale")
    with cluster() as made:
        launched, by_hand = [], []
        for number in range(options.rounds):
            lab = made.lab(f"round{number}")
            launched.append(by_launcher(lab))
            by_hand.append(by_srun(lab))
        version = made.slurm.run("sinfo", "--version").split()[-1]
        listing = seconds_to_list(made.lab("listed"))
    found = {
        "slurm": version,
        "launcher_seconds": launched,
        "by_hand_seconds": by_hand,
        "more": statistics.mean(launched) - statistics.mean(by_hand),
        "listing_100_runs": listing,
    }
    print(
        f"until every rank has joined: {statistics.mean(launched):.2f} s by the launcher, "
        f"{statistics.mean(by_hand):.2f} s by srun; {LISTED} runs listed in {listing:.2f} s"
    )
    if options.output:
        options.output.write_text(json.dumps({**facts, **found}, indent=1) + "\n")
    return 4 if found["more"] > MORE or listing > LISTING else 0


def by_launcher(lab: SlurmLab) -> float:
    """Seconds from a job's start until the last rank has joined."""
    lab.slurm()
    done = lab.do("run")
    assert done.returncode == 0, done.stdout + done.stderr
    files = lab.layout.logs.rglob("rank_*.jsonl")
    joined = [e.time for f in files for e in read_events(f)[0] if e.event == "joined"]
    began = start_time(lab, lab.job)
    lab.clear()
    return max(joined) - began


def by_srun(lab: SlurmLab) -> float:
    """The same of a script that somebody might write."""
    from support.launch_lab import until  # type: ignore[import-not-found]

    out = lab.root / "by_hand"

    def write() -> dict[str, str]:
        out.mkdir()
        (out / "rank.py").write_text(BY_HAND)
        return {}

    lab.cluster.user.do(write)
    wrapped = f"srun {shlex.quote(sys.executable)} {shlex.quote(str(out / 'rank.py'))}"
    options = ["--nodes=2", "--ntasks-per-node=1", f"--output={out}/log", f"--export=ALL,OUT={out}"]
    command = [*lab.cluster.user.under, "sbatch", "--parsable", *options, f"--wrap={wrapped}"]
    job = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    files = [out / "0", out / "1"]
    until(lambda: all(file.is_file() and file.read_text() for file in files))
    began = start_time(lab, job)
    joined = [float(file.read_text()) for file in files]
    lab.clear()
    return max(joined) - began


def start_time(lab: SlurmLab, job: str) -> float:
    told: str = lab.cluster.slurm.run("scontrol", "show", "job", job)
    word = next(word for word in told.split() if word.startswith("StartTime="))
    return time.mktime(time.strptime(word.partition("=")[2], "%Y-%m-%dT%H:%M:%S"))


def seconds_to_list(lab: SlurmLab) -> float:
    """Median seconds of ``flagscale runs`` after 100 runs, each in a directory of its own."""
    lab.slurm()
    assert lab.do("run").returncode == 0
    assert lab.do("stop").returncode == 0
    lab.cluster.user.do(lambda: copy_runs(lab))
    command = [*lab.cluster.user.under, sys.executable, "-m", "flagscale.cli", "runs"]
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        taken.append(time.perf_counter() - begin)
        assert len(listed.splitlines()) > LISTED, listed
    return statistics.median(taken)


def copy_runs(lab: SlurmLab) -> dict[str, str]:
    """Make so many runs of one that has ended that there are 100."""
    state = lab.state()
    kept = Path(os.environ["XDG_STATE_HOME"], "flagscale", "runs", f"{state.run_id}.json")
    for number in range(LISTED - 1):
        run_id = f"{state.run_id[:-6]}{number:06x}"
        exp_dir = lab.root / f"copy{number}"
        shutil.copytree(state.exp_dir, exp_dir)
        for source, target in (
            (kept, kept.with_name(f"{run_id}.json")),
            (lab.layout.state, Layout(exp_dir).state),
        ):
            text = source.read_text().replace(state.run_id, run_id)
            target.write_text(text.replace(str(state.exp_dir), str(exp_dir)))
    return {}


if __name__ == "__main__":
    sys.exit(guard(main))
