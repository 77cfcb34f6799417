"""Measure saving and loading of checkpoints, on a disk and on an S3 server of this machine.

    python tools/bench/checkpoints.py --only disk --output docs/results/checkpoints-disk-cpu.json
    python tools/bench/checkpoints.py --only s3 --output docs/results/checkpoints-s3-cpu.json
    python tools/bench/checkpoints.py --only stall --gib 14.9 --hidden-size 2048 \
        --output docs/results/checkpoint-stall-cpu.json

One rank holds a model in fp32 with Adam's moments in host memory. Measured are a save in the
foreground, the stall of a save in the background and the time until that one is complete, and a
load. They are compared with the rate of the disk itself (writing with fsync, reading with an empty
cache to memory that has been used) and with that of the S3 client, which transfers the same files.
On the disk, everything is done twice in a row, and the second time counts: a virtual machine takes
seconds to get a GiB of memory that it has not used lately, also for the page cache.

The S3 server is moto's, which is slow: what counts is the ratio to the client's own rate.
``--only stall`` measures only saves in the background to a disk, which a model that fills half of
the host's memory allows.

Requires the extra ``storage-tests``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from s3_lab import BUCKET, run_s3_server, s3_environment

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "third_party" / "Megatron-LM"))
os.environ.update({"FLAGSCALE_DEVICE": "cpu", "TORCHDYNAMO_DISABLE": "1"})
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "0")

from flagscale.bench import machine  # noqa: E402
from flagscale.files import write_json  # noqa: E402
from flagscale.object_storage import (  # noqa: E402
    CONCURRENT_PARTS,
    PART_BYTES,
    ObjectStore,
    StorageAddress,
)

_GIB = 1 << 30
_BYTES_PER_WEIGHT = 16  # the weight, its fp32 copy and two moments
_MODEL = """
--num-attention-heads 16
--seq-length 32 --micro-batch-size 1 --global-batch-size 1 --train-iters 10 --lr 1e-3
--vocab-size 512 --mock-data --eval-iters 0 --num-workers 0 --device cpu --disable-bias-linear
--position-embedding-type rope --use-distributed-optimizer --async-save --keep-last 1
"""


def main() -> int:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gib", type=float, default=2.6, help="size of a checkpoint (default: %(default)s)"
    )
    parser.add_argument("--hidden-size", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--only", choices=("disk", "s3", "stall"), help="default: disk and s3")
    parser.add_argument("--directory", type=Path, help="directory on the disk to measure")
    parser.add_argument("--output", type=Path, help="file of the result")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    result = machine.describe_machine("flagscale", "torch", "megatron-core", "s3fs", "moto")
    with (
        tempfile.TemporaryDirectory(dir=options.directory, prefix="flagscale-bench-") as scratch,
        run_s3_server() as server,
    ):
        os.environ.update(s3_environment(server.endpoint))
        root = Path(scratch)
        rank = Rank(options.gib, options.hidden_size, root / "staging")
        disk = rank.open(str(root / "disk"))
        s3 = rank.open(f"s3://{BUCKET}/bench")
        if options.only == "stall":
            result["stall"] = rank.measure_stalls(*disk, options.repetitions)
            names = []
        else:
            names = [options.only] if options.only else ["disk", "s3"]
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        disk_root = root / "disk"
        if names:
            rank.measure(*disk)  # the client transfers these files
        for _ in range(options.repetitions):
            # The rates alone are measured in turn, because other load on the machine varies.
            if "disk" in samples:
                sample = rank.measure(*disk, times=2)
                samples["disk"].append(
                    {**sample, **measure_disk(_newest(disk_root), root, times=2)}
                )
            if "s3" in samples:
                samples["s3"].append({**rank.measure(*s3), **measure_client(_newest(disk_root))})
        size = sum(path.stat().st_size for path in _newest(disk_root).rglob("*") if path.is_file())
        for _, checkpointer in (disk, s3):
            checkpointer.close()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result |= {
        "gib": round(size / _GIB, 4),
        "peak_memory_gib": round(usage.ru_maxrss / 2**20, 2),
        **{name: summarize(items) for name, items in samples.items()},
    }
    print(json.dumps(result, indent=1))
    if options.output:
        write_json(options.output, result)
    return 0


def summarize(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of samples, and the medians of the rates relative to those alone."""
    medians = {name: statistics.median(item[name] for item in samples) for name in samples[0]}
    ratios = {
        f"{name}_of_alone": statistics.median(
            item[f"{name}_alone"] / item[name] for item in samples
        )
        for name in ("save", "load")
    }
    rounded = {name: round(value, 3) for name, value in {**medians, **ratios}.items()}
    return {**rounded, "samples": [{k: round(v, 3) for k, v in item.items()} for item in samples]}


class Rank:
    """A rank with a model in host memory."""

    def __init__(self, gib: float, hidden_size: int, staging: Path) -> None:
        from flagscale.train import distributed
        from flagscale.train.device import choose_device

        layers = max(1, round(gib * _GIB / _BYTES_PER_WEIGHT / (12 * hidden_size**2)))
        self._flags = [*_MODEL.split(), "--num-layers", str(layers)]
        self._flags += [
            "--hidden-size",
            str(hidden_size),
            "--ffn-hidden-size",
            str(4 * hidden_size),
        ]
        self._flags += ["--save-staging-dir", str(staging)]
        self._staging = staging
        self._rank = distributed.RankIdentity.from_environment()
        self._device = choose_device("cpu", 0)
        distributed.init_default_group(self._rank, self._device, backend="gloo", timeout_minutes=5)
        self._state: Any = None

    def open(self, save: str) -> tuple[Any, Any]:
        """Return arguments and checkpointer for a directory or an address."""
        from flagscale.train.checkpoint import Checkpointer

        args = self._prepare(save)
        checkpointer = Checkpointer(args)
        checkpointer.check_writable()
        return args, checkpointer

    def measure(self, args: Any, checkpointer: Any, times: int = 1) -> dict[str, float]:
        """Save in the foreground and in the background, and load, each several times.

        Returns:
            Seconds of the last time, of which those in ``…_cpu`` are processor time of this
            process, and ``uploader_mib``, the peak memory of the process that uploads.
        """
        from flagscale.train.step import gathered_parameters

        gc.collect()
        gc.freeze()  # as the trainer does before the first step
        seconds: dict[str, float] = {}
        for _ in range(times):
            self._state.progress.iteration += 1
            with gathered_parameters(args, self._state.chunks):
                begin = time.monotonic()
                checkpointer.save(self._state, required=True)
                seconds["save"] = time.monotonic() - begin
                checkpointer.poll()
            _wait_for_removals(checkpointer)
        for _ in range(times):
            seconds |= self._save_in_background(args, checkpointer)
        # Read from the storage itself, not from copies on this machine.
        for path in self._staging.glob("iter_*/manifest.json"):
            path.unlink()
        # The fork to save has made the state's memory copy-on-write, which the first load ends. A
        # run that resumes has not forked before.
        for _ in range(1 + times):
            with gathered_parameters(args, self._state.chunks):
                _drop_caches(Path(args.save))
                begin, begin_cpu = time.monotonic(), time.process_time()
                checkpointer.load(self._state)
                seconds["load"] = time.monotonic() - begin
                seconds["load_cpu"] = time.process_time() - begin_cpu
        return seconds

    def measure_stalls(
        self, args: Any, checkpointer: Any, repetitions: int
    ) -> list[dict[str, float]]:
        """Save in the background, several times; see :meth:`measure`."""
        gc.collect()
        gc.freeze()
        self._save_in_background(args, checkpointer)  # allocates the optimizer's moments
        samples = [self._save_in_background(args, checkpointer) for _ in range(repetitions)]
        return [{name: round(value, 3) for name, value in sample.items()} for sample in samples]

    def _save_in_background(self, args: Any, checkpointer: Any) -> dict[str, float]:
        from flagscale.train.step import gathered_parameters

        memory = 0.0
        self._state.progress.iteration += 1
        with gathered_parameters(args, self._state.chunks):
            begin, begin_cpu = time.monotonic(), time.process_time()
            checkpointer.save(self._state)
            stall, stall_cpu = time.monotonic() - begin, time.process_time() - begin_cpu
        while not checkpointer.poll():
            memory = max(memory, _uploader_memory())
            time.sleep(0.01)
        complete = time.monotonic() - begin
        _wait_for_removals(checkpointer)
        return {
            "stall": stall,
            "stall_cpu": stall_cpu,
            "async_complete": complete,
            "uploader_mib": memory,
        }

    def _prepare(self, save: str) -> Any:
        from flagscale.config.arguments.derive import derive_arguments, rank_arguments
        from flagscale.config.arguments.spec.command_line import parse_arguments
        from flagscale.train import distributed
        from flagscale.train.build import build_state, padded_vocabulary_size
        from flagscale.train.data.tokenizers import build_tokenizer
        from flagscale.train.models.config import build_transformer_config

        flags = [*self._flags, "--save", save, "--load", save]
        args = rank_arguments(derive_arguments(parse_arguments(flags), 1), 0)
        if self._state is None:
            distributed.init_model_parallel(args)
            config = build_transformer_config(args, self._device)
            vocabulary = padded_vocabulary_size(args, build_tokenizer(args))
            self._state = build_state(args, config, vocabulary, self._device)
        return args


def _wait_for_removals(checkpointer: Any) -> None:
    """Wait until superseded checkpoints are deleted, for which training does not wait."""
    for removal in checkpointer._removals:
        removal.result()


def _newest(root: Path) -> Path:
    """Return the newest checkpoint in a directory."""
    return max(root.glob("iter_*"))


def measure_disk(directory: Path, root: Path, times: int) -> dict[str, float]:
    """Write and read the files of a checkpoint without any other work, each several times.

    Returns:
        Seconds of the last time.
    """
    files = [path for path in directory.iterdir() if path.is_file()]
    content = {path: path.read_bytes() for path in files}
    targets = [root / f"alone_{path.name}" for path in files]
    seconds = {}
    for _ in range(times):
        begin = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_write_synced, targets, content.values()))
        seconds["save_alone"] = time.monotonic() - begin
        for target in targets:
            target.unlink()
    del content
    buffers = {path: memoryview(bytearray(path.stat().st_size)) for path in files}
    for _ in range(times):
        _drop_caches(directory)
        begin = time.monotonic()
        for path, buffer in buffers.items():
            _read_whole(path, buffer)
        seconds["load_alone"] = time.monotonic() - begin
    return seconds


def _read_whole(path: Path, buffer: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        while buffer:
            buffer = buffer[file.readinto(buffer) :]


def measure_client(directory: Path) -> dict[str, float]:
    """Transfer the files of a checkpoint by the client of S3 without any other work."""
    client = ObjectStore(StorageAddress.parse(f"s3://{BUCKET}/alone"))._fs
    files = [path for path in directory.iterdir() if path.is_file()]
    options = {"chunksize": PART_BYTES, "max_concurrency": CONCURRENT_PARTS}
    begin = time.monotonic()
    for path in files:
        client.put_file(str(path), f"{BUCKET}/alone/{path.name}", **options)
    upload_seconds = time.monotonic() - begin
    parts = [
        (f"{BUCKET}/alone/{path.name}", start, min(start + PART_BYTES, path.stat().st_size))
        for path in files
        for start in range(0, path.stat().st_size, PART_BYTES)
    ]
    begin = time.monotonic()
    with ThreadPoolExecutor(CONCURRENT_PARTS) as pool:
        list(pool.map(partial(_read_part, client), parts))
    return {"save_alone": upload_seconds, "load_alone": time.monotonic() - begin}


def _read_part(client: Any, part: tuple[str, int, int]) -> int:
    name, begin, end = part
    return len(client.cat_file(name, start=begin, end=end))


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def _drop_caches(directory: Path) -> None:
    """Remove the files of a directory from the page cache."""
    for path in directory.rglob("*") if directory.is_dir() else ():
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _uploader_memory() -> float:
    """Return the resident memory of the processes that upload, in MiB."""
    memory = 0.0
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended meanwhile
            if any("upload_worker" in word for word in child.cmdline()):
                memory += child.memory_info().rss / 2**20
    return memory


if __name__ == "__main__":
    sys.exit(main())
