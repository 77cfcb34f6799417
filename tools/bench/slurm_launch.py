#!/usr/bin/env python3
"""Benchmark Slurm jobs: seconds from the allocation until every rank has joined.

    python tools/bench/slurm_launch.py --output docs/results/slurm-launch.json

Two nodes are namespaces of this machine under a real Slurm (tests/bed). Root and Slurm's programs
are required, and the nodes share this machine's cores. The same program, which reports when it has
joined, is started alternately by ``action=run`` with ``runner.type: slurm`` and by the srun of a
handwritten batch script. The start of a job is the StartTime of ``scontrol``, in whole seconds: its
mean error over several rounds is half a second for both. The launcher may take one second longer.
The time of ``flagscale runs`` to list 100 runs is measured, too. The exit code is 4 if either
exceeds its limit.
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

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests"))

from flagscale.bench import machine
from flagscale.cli_errors import run_command
from flagscale.launcher.layout import Layout
from flagscale.status import read_events

if TYPE_CHECKING:
    from support.slurm_lab import SlurmLab  # type: ignore[import-not-found]

ALLOWED_OVERHEAD = 1.0
"""Seconds that the launcher may take in addition to srun."""
LISTED_RUNS, LISTING_LIMIT = 100, 1.0
RANK_PROGRAM = """\
import os, time
from pathlib import Path
rank = os.environ["SLURM_PROCID"]
Path(os.environ["OUT"], rank).write_text(repr(time.time()))
time.sleep(600)
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--rounds", type=int, default=6, help="launches of each kind (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    from support.slurm_lab import start_cluster

    machine_facts = machine.describe_machine("flagscale")
    with start_cluster() as slurm_cluster:
        launcher_seconds, srun_seconds = [], []
        for round_number in range(options.rounds):
            lab = slurm_cluster.create_lab(f"round{round_number}")
            launcher_seconds.append(measure_launcher(lab))
            srun_seconds.append(measure_srun(lab))
        version = slurm_cluster.slurm.run("sinfo", "--version").split()[-1]
        listing_seconds = measure_listing(slurm_cluster.create_lab("listed"))
    metrics = {
        "slurm": version,
        "launcher_seconds": launcher_seconds,
        "by_hand_seconds": srun_seconds,
        "more": statistics.mean(launcher_seconds) - statistics.mean(srun_seconds),
        "listing_100_runs": listing_seconds,
    }
    print(
        f"until every rank has joined: {statistics.mean(launcher_seconds):.2f} s by the launcher, "
        f"{statistics.mean(srun_seconds):.2f} s by srun; "
        f"{LISTED_RUNS} runs listed in {listing_seconds:.2f} s"
    )
    if options.output:
        options.output.write_text(json.dumps({**machine_facts, **metrics}, indent=1) + "\n")
    return 4 if metrics["more"] > ALLOWED_OVERHEAD or listing_seconds > LISTING_LIMIT else 0


def measure_launcher(lab: SlurmLab) -> float:
    """Return the seconds from a job's start by the launcher until the last rank has joined."""
    lab.write_config()
    process = lab.run_action("run")
    assert process.returncode == 0, process.stdout + process.stderr
    files = lab.layout.logs.rglob("rank_*.jsonl")
    join_times = [e.time for f in files for e in read_events(f)[0] if e.event == "joined"]
    start = read_start_time(lab, lab.job_id)
    lab.kill_processes()
    return max(join_times) - start


def measure_srun(lab: SlurmLab) -> float:
    """Return the seconds from a handwritten job's start until the last rank has joined."""
    from support.waiting import wait_for  # type: ignore[import-not-found]

    output_directory = lab.root / "by_hand"

    def write_program() -> dict[str, str]:
        output_directory.mkdir()
        (output_directory / "rank.py").write_text(RANK_PROGRAM)
        return {}

    lab.cluster.user.call(write_program)
    srun_command = (
        f"srun {shlex.quote(sys.executable)} {shlex.quote(str(output_directory / 'rank.py'))}"
    )
    options = [
        "--nodes=2",
        "--ntasks-per-node=1",
        f"--output={output_directory}/log",
        f"--export=ALL,OUT={output_directory}",
    ]
    command = [
        *lab.cluster.user.command_prefix,
        "sbatch",
        "--parsable",
        *options,
        f"--wrap={srun_command}",
    ]
    job = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    files = [output_directory / "0", output_directory / "1"]
    wait_for(lambda: all(file.is_file() and file.read_text() for file in files))
    start = read_start_time(lab, job)
    join_times = [float(file.read_text()) for file in files]
    lab.kill_processes()
    return max(join_times) - start


def read_start_time(lab: SlurmLab, job: str) -> float:
    description: str = lab.cluster.slurm.run("scontrol", "show", "job", job)
    word = next(word for word in description.split() if word.startswith("StartTime="))
    return time.mktime(time.strptime(word.partition("=")[2], "%Y-%m-%dT%H:%M:%S"))


def measure_listing(lab: SlurmLab) -> float:
    """Return the median seconds of ``flagscale runs`` with 100 runs, each in its own directory."""
    lab.write_config()
    assert lab.run_action("run").returncode == 0
    assert lab.run_action("stop").returncode == 0
    lab.cluster.user.call(lambda: copy_runs(lab))
    command = [*lab.cluster.user.command_prefix, sys.executable, "-m", "flagscale.cli", "runs"]
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        seconds.append(time.perf_counter() - begin)
        assert len(listing.splitlines()) > LISTED_RUNS, listing
    return statistics.median(seconds)


def copy_runs(lab: SlurmLab) -> dict[str, str]:
    """Copy a finished run until there are 100 runs."""
    state = lab.state()
    run_record = Path(os.environ["XDG_STATE_HOME"], "flagscale", "runs", f"{state.run_id}.json")
    for number in range(LISTED_RUNS - 1):
        run_id = f"{state.run_id[:-6]}{number:06x}"
        exp_dir = lab.root / f"copy{number}"
        shutil.copytree(state.exp_dir, exp_dir)
        for source, target in (
            (run_record, run_record.with_name(f"{run_id}.json")),
            (lab.layout.state, Layout(exp_dir).state),
        ):
            text = source.read_text().replace(state.run_id, run_id)
            target.write_text(text.replace(str(state.exp_dir), str(exp_dir)))
    return {}


if __name__ == "__main__":
    sys.exit(run_command(main))
