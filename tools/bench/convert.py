#!/usr/bin/env python3
"""Benchmark checkpoint conversion and a training start from a Hugging Face model.

Models with layers as wide as Llama-3-8B's and random 16-bit weights are converted to flagscale
checkpoints and back by ``flagscale convert``. Each conversion runs in a process of its own on one
core. The process first converts a tiny model, so that all imports are done. Reported are its CPU
seconds, including those of the kernel, the elapsed time, and the peak memory above the memory used
before, without mapped files. The round with the fewest CPU seconds counts, because other load on
the machine can only slow it down.

``--start`` measures the start of a training run with such weights instead: the time to read the
weight file, and the time to build the model with these weights and with random ones.

    python tools/bench/convert.py --gigabytes 1 4 16 --output docs/results/convert-cpu.json
    python tools/bench/convert.py --start --output docs/results/convert-cpu.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from flagscale.bench import machine
from flagscale.cli_errors import run_command
from flagscale.config.arguments.compat.huggingface.config_reader import read_config
from flagscale.config.arguments.compat.huggingface.models import (
    arguments_of,
    effective,
    missing_arguments,
)
from flagscale.config.arguments.spec.command_line import words_of
from flagscale.config.arguments.spec.registry import arguments
from flagscale.errors import JobError
from flagscale.train.checkpoint.formats.base import StoredModel
from flagscale.train.checkpoint.formats.huggingface import HuggingFace
from flagscale.train.checkpoint.formats.lazy_tensors import MappedTensor, Shape
from flagscale.train.checkpoint.formats.weight_mappings import iter_weights

PROJECT = Path(__file__).resolve().parents[2]
LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MEDIUM_SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "vocab_size": 16000,
}
"""Sizes of a model for which the optimizer of one rank is created quickly."""
TINY_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
}
LAYER_BYTES, OTHER_BYTES = 436_224_000, 524_296_192
"""Bytes of one layer, and of all weights outside the layers."""
POLL_SECONDS = 0.005
READ_BYTES = 8 << 20
TRAINING_ARGUMENTS = (
    "--seq-length 32 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --train-iters 1 "
    "--mock-data --device cpu --eval-iters 0 --num-workers 0 --hidden-dropout 0 "
    "--attention-dropout 0 --bf16 --optimizer sgd --sgd-momentum 0"
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--gigabytes",
        type=int,
        nargs="+",
        default=[1],
        help="model sizes in GB (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds over all conversions (default: %(default)s)"
    )
    parser.add_argument(
        "--start", action="store_true", help="measure the start of a training run instead"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="parent of the working directory (default: the system's temporary directory)",
    )
    parser.add_argument("--output", type=Path, help="JSON file to write or to extend")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--convert", type=Path, nargs=3, help=argparse.SUPPRESS)
    options, extra_arguments = parser.parse_known_args(argv)
    if options.rank:
        return rank_main(options.rank, extra_arguments)
    if options.convert:
        tiny, source, target = options.convert
        return convert_main(tiny, source, target, extra_arguments)
    machine_facts = machine.describe_machine("flagscale", "torch")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        root = Path(directory)
        if options.start:
            results["start"] = {**machine_facts, **measure_start(root)}
        else:
            write_model(root / "tiny", 1, TINY_SIZES)
            for size in options.gigabytes:
                layers = max(1, round((size * 1e9 - OTHER_BYTES) / LAYER_BYTES))
                model = write_model(root / "model", layers)
                rounds = [measure_conversions(model, root) for _ in range(options.rounds)]
                results[f"{size} GB"] = {
                    **machine_facts,
                    "rounds": len(rounds),
                    "rows": summarize_rounds(rounds),
                }
                shutil.rmtree(model)
    print(json.dumps(results, indent=1))
    if options.output:
        earlier = json.loads(options.output.read_text()) if options.output.exists() else {}
        options.output.write_text(json.dumps({**earlier, **results}, indent=1) + "\n")
    return 0


def write_model(path: Path, layers: int, overrides: dict[str, Any] | None = None) -> Path:
    """Write a Hugging Face model directory with random weights. Return its path."""
    config = {**LLAMA_CONFIG, "num_hidden_layers": layers, **(overrides or {})}
    values = effective(arguments_of(config))
    noise = torch.randn(1 << 23).to(torch.bfloat16)

    def create_tensor(shape: Shape) -> MappedTensor:
        def get() -> torch.Tensor:
            return noise[: shape[-1]].expand(shape)

        return MappedTensor(shape, torch.bfloat16, get)

    tensors = {
        entry.name: entry.transform.to_megatron(
            [create_tensor(shape) for _, shape in entry.huggingface_tensors], entry.sizes
        )
        for entry in iter_weights("llama", values)
    }
    model = StoredModel(path, "llama", values, tensors, config)
    return HuggingFace().write(model, path, lambda _size: None, lambda _written: None)


def measure_conversions(model: Path, root: Path) -> dict[str, dict[str, float]]:
    """Measure converting a model to a flagscale checkpoint and back, with and without verification.

    The converted models are removed.
    """
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    rows = {}
    for verification, flags in (("compared", []), ("not compared", ["--no-verify"])):
        flagscale_model, converted_back = root / "ours", root / "back"
        rows[f"Hugging Face to ours, {verification}"] = run_conversion(
            model, flagscale_model, flags
        )
        rows[f"ours to Hugging Face, {verification}"] = run_conversion(
            flagscale_model, converted_back, flags
        )
        shutil.rmtree(flagscale_model)
        shutil.rmtree(converted_back)
    for row in rows.values():
        row["bytes"] = size
    return rows


def run_conversion(source: Path, target: Path, flags: Sequence[str]) -> dict[str, float]:
    """Run one conversion on one core. Return its CPU seconds, elapsed time and memory.

    Raises:
        JobError: The conversion failed.
    """
    tiny = source.parent / "tiny"
    arguments = ["--convert", str(tiny), str(source), str(target), *flags]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
    output, errors = process.communicate()
    if process.returncode:
        raise JobError(f"{source} was not converted:\n{errors}")
    metrics: dict[str, float] = json.loads(output.splitlines()[-1])
    return metrics


def convert_main(tiny: Path, source: Path, target: Path, flags: Sequence[str]) -> int:
    """Convert ``tiny``, then run the measured conversion. Print its figures as JSON."""
    from flagscale.train.checkpoint.formats import convert

    with tempfile.TemporaryDirectory() as directory:
        for start, end in (tiny, Path(directory) / "ours"), (Path(directory) / "ours", None):
            convert.main([str(start), str(end or Path(directory) / "back")])
    times_before, peak, begin = os.times(), [0], time.monotonic()
    idle_memory, stop = read_anonymous_memory(), threading.Event()
    tracker = threading.Thread(target=track_peak_memory, args=(peak, stop))
    tracker.start()
    code = convert.main([str(source), str(target), *flags])
    times_after, seconds = os.times(), time.monotonic() - begin
    stop.set()
    tracker.join()
    cpu = {
        "user": times_after.user - times_before.user,
        "system": times_after.system - times_before.system,
    }
    memory = {"memory": peak[0] - idle_memory, "idle": idle_memory}
    print(json.dumps({"seconds": seconds, **cpu, **memory}))
    return code


def track_peak_memory(peak: list[int], stop: threading.Event) -> None:
    """Record this process's peak anonymous memory in ``peak[0]`` until ``stop`` is set."""
    while not stop.wait(POLL_SECONDS):
        peak[0] = max(peak[0], read_anonymous_memory())


def read_anonymous_memory() -> int:
    """Return the bytes of this process's resident memory without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


def summarize_rounds(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Summarize each conversion by its best round."""
    summary: dict[str, dict[str, Any]] = {}
    for name in rounds[0]:
        rows = [conversions[name] for conversions in rounds]
        best = min(rows, key=lambda row: row["user"] + row["system"])
        cpu = best["user"] + best["system"]
        summary[name] = {
            "gigabytes": round(best["bytes"] / 1e9, 3),
            "megabytes_per_cpu_second": round(best["bytes"] / 1e6 / cpu),
            "megabytes_per_second": round(best["bytes"] / 1e6 / best["seconds"]),
            "cpu_seconds": round(cpu, 2),
            "of_the_kernel": round(best["system"], 2),
            "seconds": round(best["seconds"], 2),
            "cpu_seconds_of_rounds": [round(row["user"] + row["system"], 2) for row in rows],
            "memory_above_mapped_mb": round(max(row["memory"] for row in rows) / 1e6),
            "memory_before_mb": round(best["idle"] / 1e6),
            "largest_layer_mb": round(LAYER_BYTES / 1e6),
        }
    return summary


def measure_start(root: Path) -> dict[str, Any]:
    """Measure reading a model's file and starting a training run, with and without its weights.

    Each is measured on one core, with the file on disk and in the page cache.
    """
    model = write_model(root / "model", 2, MEDIUM_SIZES)
    (file,) = model.glob("*.safetensors")
    config = read_config(model)
    run_arguments = {"seq_length": 32}
    values = {a.name: a.default for a in arguments().values()} | run_arguments
    words = [
        *TRAINING_ARGUMENTS.split(),
        *words_of(missing_arguments(values, run_arguments, config)),
    ]
    core = {min(os.sched_getaffinity(0))}
    rows = []
    for cached in (False, True, False, True):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, core)
        set_page_cache(file, cached=cached)
        seconds = measure_read(file)
        set_page_cache(file, cached=cached)
        os.sched_setaffinity(0, cores)
        with_weights = measure_build([*words, "--pretrained-checkpoint", str(model)], root, core)
        random_weights = measure_build(words, root, core)
        source = "memory" if cached else "disk"
        row = {
            "from": source,
            "reading": seconds,
            "start": with_weights,
            "start_from_nothing": random_weights,
        }
        rows.append(row)
    return {"gigabytes": round(file.stat().st_size / 1e9, 3), "rows": rows}


def set_page_cache(file: Path, *, cached: bool) -> None:
    """Load a file into the kernel's page cache, or drop it from there."""
    if cached:
        measure_read(file)
        return
    with file.open("rb") as opened_file:
        os.fsync(opened_file.fileno())
        os.posix_fadvise(opened_file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_read(file: Path) -> float:
    """Return the seconds of reading a file."""
    buffer, begin = bytearray(READ_BYTES), time.perf_counter()
    with file.open("rb", buffering=0) as opened_file:
        while opened_file.readinto(buffer):
            pass
    return time.perf_counter() - begin


def measure_build(arguments: Sequence[str], root: Path, core: set[int]) -> float:
    """Return the seconds in which the training program builds its model and loads its weights.

    Raises:
        JobError: The training program failed.
    """
    result_file = root / "seconds"
    paths = [str(PROJECT), str(PROJECT / "third_party" / "Megatron-LM")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, __file__, "--rank", str(result_file), *arguments]
    process = subprocess.Popen(
        command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    os.sched_setaffinity(process.pid, core)
    output = process.communicate()[0]
    if process.returncode:
        raise JobError(f"training ended with {process.returncode}:\n{output.decode()[-3000:]}")
    return float(result_file.read_text())


def rank_main(result_file: Path, words: Sequence[str]) -> int:
    """Run the training program until the model has its weights. Write the seconds to
    ``result_file``.
    """
    os.environ["FLAGSCALE_DEVICE"] = "cpu"
    setup: Any = importlib.import_module("flagscale.train.setup")
    from flagscale.train.train_gpt import main as train_gpt

    build_state_untimed, start_times = setup.build_state, list[float]()

    def build_state(*args: Any, **options: Any) -> Any:
        start_times.append(time.perf_counter())
        return build_state_untimed(*args, **options)

    def report_and_exit(*_args: Any) -> NoReturn:
        result_file.write_text(str(time.perf_counter() - start_times[0]))
        os._exit(0)  # training itself is not measured

    # Loading of the data follows directly after the weights.
    setup.build_state, setup.Datasets = build_state, report_and_exit
    return train_gpt(words)


if __name__ == "__main__":
    sys.exit(run_command(main))
