"""Train through many random faults in a row, and compare all losses with an undisturbed run.

    python tools/bench/fault_series.py --faults 50 --output docs/results/fault-series-cpu.json

Three hosts, namespaces of this machine with a real sshd each (tests/bed), train a tiny Llama-3 with
``nnodes: 2:3`` and ``on_bad_host: shrink``. A random fault of a random host, the first one
included, follows another as soon as all hosts train again. A host that the job has lost comes back,
and its script is started again.

The global batch does not depend on the number of hosts, so each loss that any attempt reports must
equal that of the same step on one host. The exit code is 4 if one does not, or a process is left.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from faults import FaultRun, wait_for

from flagscale.bench import machine
from flagscale.files import write_json
from flagscale.launcher.layout import latest_status_directory, status_directory

PROJECT = Path(__file__).resolve().parents[2]
_HOSTS = 3
_LOST_HOST_TIMEOUT = 4
_HANG_TIMEOUT = 5
_STEPS_BETWEEN = 5
_MAX_SECONDS = 180.0
# So small that rounding errors do not grow. With 1e-3, undisturbed runs on one host and on three
# differ by more than the tolerance after some 4,000 steps.
_LEARNING_RATE = 1e-5
_TOLERANCE = 1e-5
"""Relative and absolute difference of losses, which different numbers of hosts may cause."""
_AGENT = "flagscale.launcher.agent"
_LOST_HOST = ("host without network", "host frozen", "agent killed")
_FAILED_RANK = ("rank killed", "rank stopped")


class FaultSeries:
    """A run, its faults so far, and the times until all hosts trained again."""

    def __init__(self, run: FaultRun, rng: random.Random) -> None:
        self._run, self._rng = run, rng
        self.rows: list[dict[str, Any]] = []

    def add_fault(self) -> None:
        """Cause a fault, and wait until all hosts train again."""
        # Few ranks fail, because the wait before a restart doubles with each failure.
        kinds = _FAILED_RANK if self._rng.random() < 0.2 else _LOST_HOST
        fault = self._rng.choice(kinds)
        name = self._rng.choice(self._run.bed.names)
        attempt = self._find_attempt()
        start = time.monotonic()
        self._cause(fault, name)
        self._await_steps(after=attempt)
        seconds = time.monotonic() - start
        if fault in _LOST_HOST:
            self._bring_back(fault, name, attempt)
            self._await_steps(after=attempt, hosts=_HOSTS)
        row = {"fault": fault, "host": name, "next_step": round(seconds, 1)}
        self.rows.append({**row, "whole_again": round(time.monotonic() - start, 1)})
        print(json.dumps(self.rows[-1]), flush=True)

    def _cause(self, fault: str, name: str) -> None:
        if fault == "host without network":
            self._run.bed[name].set_link("down")
        elif fault == "host frozen":
            self._run.signal_processes(name, signal.SIGSTOP)
        elif fault == "agent killed":
            self._run.signal_processes(name, signal.SIGKILL, _AGENT)
        elif fault == "rank stopped":
            self._run.signal_rank(name, signal.SIGSTOP)
        else:
            self._run.signal_rank(name, signal.SIGKILL)

    def _bring_back(self, fault: str, name: str, attempt: int) -> None:
        """End a fault, and start the script of the host once it has no process of the run.

        The agent of a host that has come back before stays, and joins the job by itself.
        """
        host = self._run.bed[name]
        if fault == "host without network":
            host.set_link("up")
        elif fault == "host frozen":
            self._run.signal_processes(name, signal.SIGCONT)

        def has_ended() -> bool:
            return not self._run.lab.run_processes(host)

        wait_for(
            lambda: has_ended() or self._has_steps(after=attempt, hosts=_HOSTS),
            f"end of the processes on {name}",
            _MAX_SECONDS,
        )
        if has_ended():
            script = next(h.script for h in self._run.lab.state().hosts if h.name == name)
            host.run(["bash", "-c", f"nohup bash {script} </dev/null >/dev/null 2>&1 &"])

    def _find_attempt(self) -> int:
        """Return the number of the newest attempt."""
        return max(
            int(latest_status_directory(host.run_dir).suffix[1:] or 0)
            for host in self._run.lab.state().hosts
        )

    def _has_steps(self, *, after: int, hosts: int = 0) -> bool:
        """Return whether an attempt after this one has some steps, on so many hosts."""
        attempt = self._find_attempt()
        if attempt <= after or len(self._run.read_steps(attempt)) < _STEPS_BETWEEN:
            return False
        if not hosts:
            return True
        job = self._run.lab.query()
        # The next attempt is counted before its status directory exists.
        return (job["attempt"], job["joined"], job["world_size"]) == (attempt + 1, hosts, hosts)

    def _await_steps(self, *, after: int, hosts: int = 0) -> None:
        wait_for(
            lambda: self._has_steps(after=after, hosts=hosts),
            f"steps after attempt {after}, fault {len(self.rows) + 1}",
            _MAX_SECONDS,
        )

    def read_losses(self) -> list[tuple[int, int, float]]:
        """Return attempt, step and loss of all reports."""
        from support.training_lab import read_losses  # type: ignore[import-not-found]

        losses = []
        for attempt in range(self._find_attempt() + 1):
            rows = read_losses(self._run.lab, status_directory(attempt))
            losses += [(attempt, row[0], row[1]) for row in rows]
        return losses


def _configure(lab: Any, runner: dict[str, Any], steps: int | None, **logging: Any) -> None:
    from support.training_lab import LLAMA, PROGRAM, train_sections

    train = train_sections(steps, logging=logging)
    model = {
        **LLAMA["model"],
        "global_batch_size": 6,  # divides by the replicas of two and of three hosts
        "train_iters": 1_000_000,
        "optimizer": {"lr": _LEARNING_RATE, "lr_decay_style": "constant"},
    }
    lab.configure(
        light=False,
        task={"entrypoint": str(PROGRAM)},
        top={"train": {**train, "model": model}},
        runner=runner,
    )


def train_through_faults(faults: int, seed: int, directory: Path) -> dict[str, Any]:
    """Train through so many faults in a new directory, and return their times and the largest
    difference of a loss.
    """
    from bed.lab import Bed  # type: ignore[import-not-found]
    from support.ssh_lab import ssh_lab  # type: ignore[import-not-found]

    bed_directory, shared = directory / "bed", directory / "shared"
    bed_directory.mkdir(parents=True)
    shared.mkdir()
    with Bed.open(bed_directory, _HOSTS, shared=[shared]) as bed:
        with bed.ssh_config.open("a") as config:
            config.write("  ConnectTimeout 3\n")
        with ssh_lab(bed, shared / "series") as lab:
            checkpoints = str(lab.exp_dir / "checkpoints")
            runner = {
                "nnodes": f"{_HOSTS - 1}:{_HOSTS}",
                "on_bad_host": "shrink",
                "max_restarts": 10 * faults,
                "lost_host_timeout": _LOST_HOST_TIMEOUT,
                "hang_detection_timeout": _HANG_TIMEOUT,
            }
            _configure(
                lab,
                runner,
                None,
                save=checkpoints,
                load=checkpoints,
                keep_last=2,
                non_persistent_save_interval=1,
            )
            result = lab.run_action("run", timeout=240)
            if result.returncode:
                raise SystemExit(f"the run did not start\n{result.stderr}")
            series = FaultSeries(FaultRun(bed, lab), random.Random(seed))
            wait_for(lambda: len(FaultRun(bed, lab).read_steps(0)) >= _STEPS_BETWEEN, "steps")
            for _ in range(faults):
                series.add_fault()
            lab.run_action("stop", timeout=180)
            processes = sum(map(len, lab.remaining_processes().values()))
            losses = series.read_losses()
        last_step = max(step for _, step, _ in losses)
        with ssh_lab(bed, shared / "undisturbed") as lab:
            local = {"type": "local", "hostfile": None, "nproc_per_node": 1}
            _configure(lab, local, last_step)
            result = lab.run_action("test", timeout=900)
            if result.returncode:
                raise SystemExit(f"the undisturbed run failed\n{result.stderr}")
            from support.training_lab import read_losses

            expected = {row[0]: row[1] for row in read_losses(lab)}
    excess = [
        abs(loss - expected[step]) / (_TOLERANCE * (1 + abs(expected[step])))
        for _, step, loss in losses
    ]
    return {
        "faults": len(series.rows),
        "by_kind": dict(Counter(row["fault"] for row in series.rows)),
        "of_the_first_host": sum(row["host"] == "h00" for row in series.rows),
        "attempts": 1 + max(attempt for attempt, _, _ in losses),
        "steps": last_step,
        "repeated_steps": len(losses) - len({step for _, step, _ in losses}),
        "largest_difference_in_tolerances": round(max(excess), 3),
        "processes": processes,
        "rows": series.rows,
    }


def main() -> int:
    """Train, and return 4 if a loss differs or a process is left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--faults", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument(
        "--directory", type=Path, help="new directory of the runs, which stays; default: none stays"
    )
    options = parser.parse_args()
    sys.path.insert(0, str(PROJECT / "tests"))
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.directory or Path(scratch)
        figures = train_through_faults(options.faults, options.seed, directory.absolute())
    record = {
        **machine.describe_machine("flagscale", "torch"),
        "hosts_are": "namespaces of this machine",
        "seed": options.seed,
        "lost_host_timeout": _LOST_HOST_TIMEOUT,
        "hang_detection_timeout": _HANG_TIMEOUT,
        **figures,
    }
    print(json.dumps({key: value for key, value in record.items() if key != "rows"}, indent=1))
    if options.output:
        write_json(options.output, record)
    return 4 if figures["processes"] or figures["largest_difference_in_tolerances"] > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
