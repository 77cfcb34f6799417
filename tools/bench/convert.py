#!/usr/bin/env python3
"""Measure conversions and a start from a model of Hugging Face; write the figures.

Models with layers as wide as Llama-3-8B's, of random weights in 16 bits, are converted to
checkpoints of ours and back by ``flagscale convert``, each in a process of its own on one core,
which has converted next to nothing before, so that everything is imported. Told are its CPU
seconds, those of the kernel among them; the time; and the most memory that is not mapped files,
beyond what was taken before. Of several rounds it is the one that took the fewest CPU seconds:
whatever else the machine does only slows. ``--start`` begins a training with such weights instead:
it tells how long reading their file takes, and how long building the model with these weights and
with drawn ones.

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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from flagscale.bench import machine
from flagscale.cli_errors import guard
from flagscale.config.arguments.flatten import flatten
from flagscale.config.arguments.huggingface.models import arguments_of, effective, missing
from flagscale.config.arguments.huggingface.reading import read_config
from flagscale.config.arguments.registry import arguments
from flagscale.errors import JobError
from flagscale.train.checkpoint.formats.base import Model
from flagscale.train.checkpoint.formats.huggingface import HuggingFace
from flagscale.train.checkpoint.formats.tables import entries
from flagscale.train.checkpoint.formats.tensors import Mapped, Shape

PROJECT = Path(__file__).resolve().parents[2]
CONFIG = {
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
MEDIUM = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "vocab_size": 16000,
}
"""One of which a rank's optimizer is soon made."""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
}
LAYER, ENDS = 436_224_000, 524_296_192
"""Bytes of a layer, and of what is no layer."""
PAUSE = 0.005
READ = 8 << 20
RUN = (
    "--seq-length 32 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --train-iters 1 "
    "--mock-data --device cpu --eval-iters 0 --num-workers 0 --hidden-dropout 0 "
    "--attention-dropout 0 --bf16 --optimizer sgd --sgd-momentum 0"
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--gigabytes", type=int, nargs="+", default=[1], help="sizes of models")
    parser.add_argument("--rounds", type=int, default=3, help="of all conversions, %(default)s")
    parser.add_argument("--start", action="store_true", help="measure a start of training instead")
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one without it")
    parser.add_argument("--output", type=Path, help="JSON file to write, or to add to")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--convert", type=Path, nargs=3, help=argparse.SUPPRESS)
    options, further = parser.parse_known_args(argv)
    if options.rank:
        return rank_main(options.rank, further)
    if options.convert:
        tiny, source, target = options.convert
        return convert_main(tiny, source, target, further)
    before = machine.facts("flagscale", "torch")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        root = Path(directory)
        if options.start:
            found["start"] = {**before, **start(root)}
        else:
            write_model(root / "tiny", 1, TINY)
            for size in options.gigabytes:
                layers = max(1, round((size * 1e9 - ENDS) / LAYER))
                model = write_model(root / "model", layers)
                rounds = [conversions(model, root) for _ in range(options.rounds)]
                found[f"{size} GB"] = {**before, "rounds": len(rounds), "rows": told(rounds)}
                shutil.rmtree(model)
    print(json.dumps(found, indent=1))
    if options.output:
        earlier = json.loads(options.output.read_text()) if options.output.exists() else {}
        options.output.write_text(json.dumps({**earlier, **found}, indent=1) + "\n")
    return 0


def write_model(path: Path, layers: int, more: dict[str, Any] | None = None) -> Path:
    """A directory of Hugging Face with a model of random weights."""
    config = {**CONFIG, "num_hidden_layers": layers, **(more or {})}
    values = effective(arguments_of(config))
    noise = torch.randn(1 << 23).to(torch.bfloat16)

    def made(shape: Shape) -> Mapped:
        def get() -> torch.Tensor:
            return noise[: shape[-1]].expand(shape)

        return Mapped(shape, torch.bfloat16, get)

    tensors = {
        entry.name: entry.rule.join([made(shape) for _, shape in entry.theirs], entry.sizes)
        for entry in entries("llama", values)
    }
    model = Model(path, "llama", values, tensors, config)
    return HuggingFace().write(model, path, lambda _size: None, lambda _written: None)


def conversions(model: Path, root: Path) -> dict[str, dict[str, float]]:
    """What converting a model there and back takes, with what was written read again, and without;
    nothing stays of it."""
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    found = {}
    for way, flags in (("compared", []), ("not compared", ["--no-verify"])):
        ours, back = root / "ours", root / "back"
        found[f"Hugging Face to ours, {way}"] = converted(model, ours, flags)
        found[f"ours to Hugging Face, {way}"] = converted(ours, back, flags)
        shutil.rmtree(ours)
        shutil.rmtree(back)
    for row in found.values():
        row["bytes"] = size
    return found


def converted(source: Path, target: Path, flags: Sequence[str]) -> dict[str, float]:
    """CPU seconds, time and memory of a conversion on one core."""
    tiny = source.parent / "tiny"
    words = ["--convert", str(tiny), str(source), str(target), *flags]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
    output, errors = process.communicate()
    if process.returncode:
        raise JobError(f"{source} was not converted:\n{errors}")
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def convert_main(tiny: Path, source: Path, target: Path, flags: Sequence[str]) -> int:
    """Convert ``tiny``, and then what is measured; the figures, on standard output."""
    from flagscale.train.checkpoint.formats import convert

    with tempfile.TemporaryDirectory() as directory:
        for start, end in (tiny, Path(directory) / "ours"), (Path(directory) / "ours", None):
            convert.main([str(start), str(end or Path(directory) / "back")])
    before, most, begin = os.times(), [0], time.monotonic()
    idle, over = anonymous(), threading.Event()
    watch = threading.Thread(target=watched, args=(most, over))
    watch.start()
    code = convert.main([str(source), str(target), *flags])
    after, seconds = os.times(), time.monotonic() - begin
    over.set()
    watch.join()
    cpu = {"user": after.user - before.user, "system": after.system - before.system}
    memory = {"memory": most[0] - idle, "idle": idle}
    print(json.dumps({"seconds": seconds, **cpu, **memory}))
    return code


def watched(most: list[int], over: threading.Event) -> None:
    """Keep the most memory of its own that this process has until it is ``over``."""
    while not over.wait(PAUSE):
        most[0] = max(most[0], anonymous())


def anonymous() -> int:
    """Bytes of memory that this process has beside mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


def told(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """The figures of all conversions by name, each of its best round."""
    found: dict[str, dict[str, Any]] = {}
    for name in rounds[0]:
        rows = [one[name] for one in rounds]
        best = min(rows, key=lambda row: row["user"] + row["system"])
        cpu = best["user"] + best["system"]
        found[name] = {
            "gigabytes": round(best["bytes"] / 1e9, 3),
            "megabytes_per_cpu_second": round(best["bytes"] / 1e6 / cpu),
            "megabytes_per_second": round(best["bytes"] / 1e6 / best["seconds"]),
            "cpu_seconds": round(cpu, 2),
            "of_the_kernel": round(best["system"], 2),
            "seconds": round(best["seconds"], 2),
            "cpu_seconds_of_rounds": [round(row["user"] + row["system"], 2) for row in rows],
            "memory_above_mapped_mb": round(max(row["memory"] for row in rows) / 1e6),
            "memory_before_mb": round(best["idle"] / 1e6),
            "largest_layer_mb": round(LAYER / 1e6),
        }
    return found


def start(root: Path) -> dict[str, Any]:
    """Seconds of reading a model's file, of starting from it, from the disk and from memory, and of
    starting from nothing, on a core each time."""
    model = write_model(root / "model", 2, MEDIUM)
    (file,) = model.glob("*.safetensors")
    config = read_config(model)
    given = {"seq_length": 32}
    values = {a.name: a.default for a in arguments().values()} | given
    words = [*RUN.split(), *flatten({"model": missing(values, given, config)})]
    core = {min(os.sched_getaffinity(0))}
    rows = []
    for cached in (False, True, False, True):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, core)
        prepared(file, cached=cached)
        seconds = reading(file)
        prepared(file, cached=cached)
        os.sched_setaffinity(0, cores)
        taken = built([*words, "--pretrained-checkpoint", str(model)], root, core)
        nothing = built(words, root, core)
        where = "memory" if cached else "disk"
        row = {"from": where, "reading": seconds, "start": taken, "start_from_nothing": nothing}
        rows.append(row)
    return {"gigabytes": round(file.stat().st_size / 1e9, 3), "rows": rows}


def prepared(file: Path, *, cached: bool) -> None:
    """Have the kernel hold a file, or nothing of it."""
    if cached:
        reading(file)
        return
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def reading(file: Path) -> float:
    """Seconds of reading a file."""
    buffer, begin = bytearray(READ), time.perf_counter()
    with file.open("rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass
    return time.perf_counter() - begin


def built(words: Sequence[str], root: Path, core: set[int]) -> float:
    """Seconds in which a run of the training program builds its model and has its weights."""
    answer = root / "seconds"
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
    command = [sys.executable, __file__, "--rank", str(answer), *words]
    process = subprocess.Popen(
        command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    os.sched_setaffinity(process.pid, core)
    output = process.communicate()[0]
    if process.returncode:
        raise JobError(f"training ended with {process.returncode}:\n{output.decode()[-3000:]}")
    return float(answer.read_text())


def rank_main(answer: Path, words: Sequence[str]) -> int:
    """The training program, which tells how long it took to have a model with its weights."""
    os.environ["FLAGSCALE_DEVICE"] = "cpu"
    setup: Any = importlib.import_module("flagscale.train.setup")
    from flagscale.train.train_gpt import main as train_gpt

    plain, begun = setup.build_state, list[float]()

    def build_state(*args: Any, **options: Any) -> Any:
        begun.append(time.perf_counter())
        return plain(*args, **options)

    def tell(*_args: Any) -> NoReturn:
        answer.write_text(str(time.perf_counter() - begun[0]))
        os._exit(0)  # nothing is to be trained

    # Data is what comes next.
    setup.build_state, setup.Datasets = build_state, tell
    return train_gpt(words)


if __name__ == "__main__":
    sys.exit(guard(main))
