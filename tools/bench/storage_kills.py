"""Kill training again and again while it saves to an S3 server with faults.

    python tools/bench/storage_kills.py --seconds 300 --output docs/results/storage-kills-cpu.json

Each round trains two ranks of a tiny model, which save every step, behind a proxy that throttles,
answers errors, cuts connections and delays. At a random time it kills both ranks and their
processes, one rank, or a process that uploads. Then the newest complete checkpoint is determined
from the objects alone, and the next round must load exactly that one. The server is moto's.

Requires the extra ``storage-tests``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from s3_lab import BUCKET, FaultProxy, run_fault_proxy, run_s3_server, s3_environment

from flagscale.bench import machine
from flagscale.files import write_json
from flagscale.free_port import free_port
from flagscale.object_storage import ObjectStore, StorageAddress

os.environ.update({"FLAGSCALE_DEVICE": "cpu", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"})
_PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_PROJECT / "third_party" / "Megatron-LM"))

# Imported before the ranks are forked.
import flagscale.train.setup  # noqa: E402, F401
from flagscale.train import train_gpt  # noqa: E402

ADDRESS = f"s3://{BUCKET}/kills"
_RANKS = 2
_VICTIMS = ("both ranks", "one rank", "an uploading process")
_MAX_SAVING_SECONDS = 30.0
_MAX_DELAY_SECONDS = 4.0
_START_SECONDS = 90
_MODEL = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1
--global-batch-size 4 --train-iters 1000000 --lr 1e-3 --vocab-size 500 --mock-data --swiglu
--disable-bias-linear --position-embedding-type rope --normalization RMSNorm --eval-iters 0
--num-workers 0 --device cpu --use-distributed-optimizer --log-interval 1000 --lr-decay-iters 100
--save-interval 1 --async-save --keep-last 2 --no-exit-signal-handler
"""


def main() -> int:
    """Run rounds until the time is over; return 1 if one of them has lost a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--seconds", type=float, default=300, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, help="end after this number of rounds")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="file of the result")
    options = parser.parse_args()
    conditions = machine.describe_machine("flagscale", "torch", "s3fs", "moto")
    with (
        run_s3_server() as server,
        run_fault_proxy(server.endpoint, options.seed) as proxy,
        tempfile.TemporaryDirectory(prefix="flagscale-kills-") as scratch,
    ):
        os.environ.update(s3_environment(server.endpoint))
        lab = KillLab(proxy, Path(scratch), random.Random(options.seed))
        deadline = time.monotonic() + options.seconds
        result = {**conditions, **lab.summarize()}
        while time.monotonic() < deadline and len(lab.rounds) != options.rounds:
            lab.run_round()
            result = {**conditions, **lab.summarize()}
            if options.output:  # an interrupted run keeps its rounds
                write_json(options.output, result)
    print(json.dumps(result, indent=1))
    return 1 if result["lost"] else 0


class KillLab:
    """Runs rounds and compares what each loads with what the one before has left."""

    def __init__(self, proxy: FaultProxy, directory: Path, generator: random.Random) -> None:
        self._proxy, self._directory, self._random = proxy, directory, generator
        self._store = ObjectStore(StorageAddress.parse(ADDRESS))
        self._expected: int | None = None
        self._counts: Mapping[str, int] = {}
        self.rounds: list[dict[str, Any]] = []

    def run_round(self) -> None:
        """Train until a kill, and check which checkpoint was loaded and which ones remain."""
        faults = {
            "latency": self._random.choice((0, 0.01, 0.1)),
            "slow_down": self._random.choice((0, 0.1, 0.3)),
            "internal_error": self._random.choice((0, 0.05)),
            "cut": self._random.choice((0, 0.1)),
        }
        self._proxy.set_faults(**faults)
        victim = self._random.choice(_VICTIMS)
        log = self._directory / f"round_{len(self.rounds)}.log"
        processes = self._start_ranks(log)
        try:
            loaded = self._wait_until_loaded(processes, log)
            self._wait_for_kill(log)
            self._kill(victim, processes)
        finally:
            for process in processes:
                _kill_group(process)
        self._counts = self._proxy.set_faults()
        newest = self._find_newest()
        is_lost = loaded != self._expected
        self.rounds.append(
            {
                "victim": victim,
                "faults": faults,
                "expected": self._expected,
                "loaded": loaded,
                "newest": newest,
                "lost": is_lost,
            }
        )
        if is_lost:
            print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
        self._expected = newest

    def summarize(self) -> dict[str, Any]:
        """Return the result of all rounds."""
        return {
            "rounds": len(self.rounds),
            "lost": sum(item["lost"] for item in self.rounds),
            "saved_steps": self._expected,
            "rounds_with_new_checkpoints": sum(
                item["newest"] != item["expected"] for item in self.rounds
            ),
            "victims": dict(Counter(item["victim"] for item in self.rounds)),
            "faults": dict(self._counts),
            "partial_uploads_left": self._count_partial(),
        }

    def _start_ranks(self, log: Path) -> list[psutil.Process]:
        # Half of the rounds find the staged copy of the round before, the others none.
        staging = self._directory / f"staging_{len(self.rounds) // 2}"
        words = [*_MODEL.split(), "--save", ADDRESS, "--load", ADDRESS]
        words += ["--save-staging-dir", str(staging), "--data-cache-path", str(self._directory)]
        environment = {
            **s3_environment(self._proxy.endpoint),
            **{"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
            "WORLD_SIZE": str(_RANKS),
        }
        log.touch()
        return [
            _fork_rank({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, words, log)
            for rank in range(_RANKS)
        ]

    def _wait_until_loaded(self, processes: list[psutil.Process], log: Path) -> int | None:
        """Wait for the first step after loading; return the iteration that was loaded."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            text = log.read_text(errors="replace")
            if match := re.search(r"loaded iteration (\d+) from", text):
                return int(match[1])
            if re.search(r"^.*step +\d+/", text, re.MULTILINE):
                return None
            if any(process.status() == psutil.STATUS_ZOMBIE for process in processes):
                break
            time.sleep(0.05)
        raise RuntimeError(f"training does not start:\n{log.read_text(errors='replace')[-4000:]}")

    def _wait_for_kill(self, log: Path) -> None:
        """Wait for up to two checkpoints, depending on chance, and then for some seconds."""
        count = self._random.choice((0, 1, 1, 2))
        deadline = time.monotonic() + _MAX_SAVING_SECONDS
        while time.monotonic() < deadline:
            if log.read_text(errors="replace").count("| checkpoint saved in") >= count:
                break
            time.sleep(0.05)
        time.sleep(self._random.uniform(0, _MAX_DELAY_SECONDS))

    def _kill(self, victim: str, processes: list[psutil.Process]) -> None:
        """Kill a victim, and train on a little if ranks survive."""
        if victim == "both ranks":
            return
        rank = self._random.choice(processes)
        if victim == "one rank":
            _kill_group(rank)
        else:
            for child in rank.children():
                with suppress(psutil.Error):  # it has ended meanwhile
                    if any("upload_worker" in word for word in child.cmdline()):
                        child.kill()
        time.sleep(self._random.uniform(0, 3))

    def _find_newest(self) -> int | None:
        """Return the newest iteration whose objects are what its manifest says."""
        sizes = self._store.list_sizes(self._store.address)
        iterations = []
        for name in sizes:
            match = re.fullmatch(r"iter_(\d+)/manifest\.json", name)
            if match is None:
                continue
            prefix = name.removesuffix("manifest.json")
            manifest = json.loads(self._store.read(self._store.address / name))
            whole = all(
                sizes.get(prefix + file) == size for file, size in manifest["files"].items()
            )
            for file, digest in manifest["digests"].items() if whole else ():
                content = self._store.read(self._store.address / (prefix + file))
                whole &= hashlib.sha256(content).hexdigest() == digest
            if whole:
                iterations.append(int(match[1]))
        return max(iterations, default=None)

    def _count_partial(self) -> int:
        names = self._store.list_sizes(self._store.address)
        return sum(name.endswith("/.partial") for name in names)


def _fork_rank(environment: Mapping[str, str], words: list[str], log: Path) -> psutil.Process:
    """Fork a rank, because importing torch and megatron.core takes longer than a round."""
    pid = os.fork()
    if pid:
        return psutil.Process(pid)
    exit_code = 1
    try:
        os.setsid()
        os.environ.update(environment)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        exit_code = train_gpt.main(words)
    finally:
        sys.stdout.flush()
        os._exit(exit_code)


def _kill_group(process: psutil.Process) -> None:
    """Kill a rank with the processes that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(process.pid, 0)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    sys.exit(main())
