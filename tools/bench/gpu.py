"""Measure training speed on this machine's GPUs; write the figures to a file.

Each row trains Llama-3-8B, whole or some of its layers with its head, on fresh random tokens by
the training program itself: data, micro-batches, gradient reduction, clipping, optimizer. Beside
them stands the limit of the GPU in this very run: how fast it multiplies the matrices of these
layers, without a pause, for as long as a row takes.

    python tools/bench/gpu.py --output docs/results/gpu-1xh200.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.accelerators.cuda import Cuda
from flagscale.bench import machine
from flagscale.cli_errors import guard
from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.resolve import resolve
from flagscale.errors import ConfigError, JobError
from flagscale.estimate.arithmetic import flops_per_token
from flagscale.status import STATUS_DIR_VARIABLE, Event, read_events

PROJECT = Path(__file__).resolve().parents[2]
PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"
HIDDEN, FFN, HEADS, GROUPS, VOCABULARY = 4096, 14336, 32, 8, 128256
MODEL = f"""
--hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads {HEADS}
--num-query-groups {GROUPS} --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 64
--normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
--position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --init-method-std 0.02
--tokenizer-type NullTokenizer --split 1 --eval-iters 0 --num-workers 1
--lr 3e-4 --lr-decay-style constant --clip-grad 1.0 --bf16
--use-distributed-optimizer --log-interval 2
"""
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
ASKED = {
    "driver": "driver_version",
    "power_limit": "power.limit",
    "sm_clock_at_most": "clocks.max.sm",
    "memory_clock_at_most": "clocks.max.memory",
}
"""What nvidia-smi is asked of the GPUs, by its names for it."""
WARM_UP = 4
"""Steps that are not counted: compiling, first allocations, clocks settling."""


@dataclass(frozen=True)
class Row:
    """One configuration. ``accumulated``: micro-batches a step."""

    name: str
    layers: int
    sequence: int
    micro_batch: int
    accumulated: int
    gpus: int = 1
    options: str = ""
    model: str = ""
    """Arguments that replace those of Llama-3-8B."""
    overlap: str = OVERLAP

    @property
    def tokens(self) -> int:
        """A micro-batch's."""
        return self.sequence * self.micro_batch

    @property
    def replicas(self) -> int:
        """Data-parallel ones."""
        words, model = self.options.split(), 1
        for name in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
            model *= int(words[words.index(name) + 1]) if name in words else 1
        return self.gpus // model


EXPERTS = "--moe-grouped-gemm --moe-aux-loss-coeff 1e-2"
MIXTRAL = f"--vocab-size 32000 {EXPERTS} --num-experts 8 --moe-router-topk 2"
QWEN3 = """--hidden-size 2048 --num-attention-heads 32 --num-query-groups 4 --kv-channels 128
--vocab-size 151936 --qk-layernorm"""
"""Of 30B-A3B. The dense rows beside the mixtures take as much arithmetic a token."""
SMALL = """--num-attention-heads 12 --num-query-groups 4 --hidden-size 768 --ffn-hidden-size 2048
--vocab-size 50304"""
"""Of 125 million weights, whose kernels the GPU is done with sooner than the host launches them."""
FEW = (12, 1024, 2, 8, 1)
SHARDED = "--tensor-model-parallel-size 2 --sequence-parallel"
CAPTURED = "--cuda-graph-impl local --cuda-graph-scope full_iteration"
SHORT, LONG = (8, 4096, 2, 8), (8, 8192, 1, 8)
DOUBLE = (8, 4096, 2, 16)
"""A step of as many tokens as two replicas take; of two stages the one with the head has fewer
layers, so that both take about as long."""
ROWS = (
    Row("plain", *SHORT, options="--transformer-impl local --attention-backend flash"),
    Row("bf16", *SHORT),
    Row("fp8", *SHORT, options="--fp8 hybrid"),
    Row("fp8-rowwise", *SHORT, options="--fp8 hybrid --fp8-recipe rowwise"),
    Row("fp8-blockwise", *SHORT, options="--fp8 e4m3 --fp8-recipe blockwise"),
    Row("bf16-8k", *LONG),
    Row("fp8-8k", *LONG, options="--fp8 hybrid"),
    Row("bf16-recompute", *SHORT, options="--recompute-granularity full --recompute-method "
        "uniform --recompute-num-layers 1"),
    Row("bf16-auto", *SHORT, options="--recompute-granularity auto --recompute-memory-gib 50"),
    Row("mixtral", 2, 4096, 2, 8, model=MIXTRAL),
    Row("mixtral-dense", 2, 4096, 2, 8, model="--ffn-hidden-size 28672 --vocab-size 32000"),
    Row("qwen3-moe", 6, 4096, 2, 8, model=f"{QWEN3} {EXPERTS} --num-experts 128 "
        "--moe-router-topk 8 --moe-ffn-hidden-size 768"),
    Row("qwen3-dense", 6, 4096, 2, 8, model=f"{QWEN3} --ffn-hidden-size 6144"),
    Row("small", *FEW, "", SMALL, ""),
    Row("small-captured", *FEW, CAPTURED, SMALL, ""),
    Row("small-fp8", *FEW, "--fp8 hybrid", SMALL, ""),
    Row("small-fp8-captured", *FEW, f"--fp8 hybrid {CAPTURED}", SMALL, ""),
    Row("dp2", *SHORT, gpus=2),
    Row("dp2-fp8", *SHORT, gpus=2, options="--fp8 hybrid"),
    Row("dp2-8k", *LONG, gpus=2),
    Row("tp2", *DOUBLE, gpus=2, options=f"{SHARDED} --tp-comm-overlap"),
    Row("tp2-exposed", *DOUBLE, gpus=2, options=SHARDED),
    Row("pp2", *DOUBLE, gpus=2, options="--pipeline-model-parallel-size 2 "
        "--decoder-first-pipeline-num-layers 5"),
    Row("dp4", 32, 4096, 2, 2, gpus=4),
    Row("dp4-fp8", 32, 4096, 2, 2, gpus=4, options="--fp8 hybrid"),
)  # fmt: skip


def measure(
    rows: Sequence[Row], steps: int, scratch: Path, profiles: Path | None
) -> Iterator[dict[str, Any]]:
    """A record for each row, with what the GPU can do beside it. The last two of the ``steps`` are
    not counted: there a profile is made where ``profiles`` is a directory."""
    for row in rows:
        data = write_tokens(scratch, 48 << 20, settings(row).vocab_size)
        limit = limit_in_a_process(row.tokens)
        begun = time.time()
        wanted = "" if profiles is None else profiling(steps, profiles / row.name)
        events = train(row, steps, data, scratch / row.name, wanted)
        record = {**asdict(row), **figures(row, events, begun, steps - 2)}
        if profiles is not None:
            record["profile"] = summary_in(scratch / row.name / "output")
        record["matmul_limit_tflops"] = round(limit, 1)
        record["share_of_matmul_limit"] = round(record["tflops_per_gpu"] / limit, 4)
        yield record


def write_tokens(directory: Path, count: int, vocabulary: int) -> Path:
    """An indexed data set of ``count`` random tokens, made once; its prefix."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = directory / f"random-{vocabulary}"
    if prefix.with_suffix(".idx").exists():
        return prefix
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    tokens = np.random.default_rng(0).integers(0, vocabulary - 1, count, dtype=np.int32)
    for document in np.array_split(tokens, 64):
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def profiling(steps: int, directory: Path) -> str:
    """Arguments that record the last two of ``steps``."""
    return f"""--profile --profile-dir {directory.absolute()} --profile-step-start {steps - 1}
    --profile-step-end {steps + 1}"""


def summary_in(output: Path) -> list[str]:
    """The lines in which a profile was summed up."""
    lines = output.read_text(errors="replace").splitlines()
    begin = next((i for i, text in enumerate(lines) if "of kernels a step" in text), len(lines))
    return [text for text in lines[begin : begin + 24] if " ms" in text]


def train(row: Row, steps: int, data: Path, directory: Path, wanted: str) -> list[Event]:
    """Train ``row`` with the arguments ``wanted``; the events of rank 0."""
    files = ["--data-path", str(data), "--data-cache-path", str(directory.parent / "cache")]
    return program([*arguments(row, steps), *wanted.split(), *files], row.gpus, directory)


def arguments(row: Row, steps: int) -> list[str]:
    """Of the training program, without data."""
    batch = row.micro_batch * row.accumulated * row.replicas
    size = f"""--num-layers {row.layers} --seq-length {row.sequence}
    --micro-batch-size {row.micro_batch} --global-batch-size {batch} --train-iters {steps}"""
    return f"{MODEL} {row.model} {size} {row.options} {row.overlap}".split()


def program(arguments: Sequence[str], gpus: int, directory: Path) -> list[Event]:
    """Run the training program in a process a GPU, in the new ``directory``; events of rank 0.

    Raises:
        JobError: it fails.
    """
    directory.mkdir()
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus))
    environment = {**os.environ, STATUS_DIR_VARIABLE: str(directory / "status")}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with (directory / "output").open("wb") as output:
        code = subprocess.run(
            [sys.executable, *launcher, str(PROGRAM), *arguments],
            env=environment, cwd=directory, stdout=output, stderr=output, check=False,
        ).returncode  # fmt: skip
    if code:
        tail = (directory / "output").read_text(errors="replace")[-3000:]
        raise JobError(f"{directory.name} ended with {code}:\n{tail}")
    return read_events(directory / "status" / "rank_0.jsonl")[0]


def figures(row: Row, events: Sequence[Event], begun: float, last: int) -> dict[str, Any]:
    """Median step, throughput and memory of a row, up to the ``last`` step that counts."""
    progress = [event for event in events if event.event == "progress"]
    counted = [e.get("step_seconds") for e in progress if WARM_UP < e.get("step") <= last]
    seconds = statistics.median(counted)
    tokens = row.tokens * row.accumulated * row.replicas / row.gpus
    model = settings(row)
    flops = flops_per_token(model, model.vocab_size) * tokens / seconds
    device = next(event.get("device") for event in events if event.event == "started")
    peak = Cuda().peak_tflops(device)
    return {
        "device": device,
        "step_seconds": seconds,
        "step_seconds_of_all": counted,
        "tokens_per_second_per_gpu": round(tokens / seconds),
        "tflops_per_gpu": round(flops / 1e12, 1),
        "mfu": round(flops / 1e12 / peak, 4) if peak else 0.0,
        "memory_gib": max(event.get("memory_gib") for event in progress),
        "seconds_to_first_step": round(progress[0].time - begun, 1),
        "first_loss": progress[0].get("loss"),
        "last_loss": progress[-1].get("loss"),
        "grad_norm": progress[0].get("grad_norm"),
    }


def settings(row: Row) -> argparse.Namespace:
    """The row's resolved arguments."""
    return resolve(parse_arguments([*arguments(row, 1), "--mock-data"]), row.gpus)


def gpu_facts() -> dict[str, Any]:
    """What the GPUs run with, as far as torch and nvidia-smi tell."""
    import torch

    cudnn: Any = torch.backends.cudnn
    libraries = {"cuda": torch.version.cuda, "cudnn": cudnn.version()}
    query = ["nvidia-smi", f"--query-gpu={','.join(ASKED.values())}", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        told = ""
    return {**libraries, **told_by_driver(told)}


def told_by_driver(lines: str) -> dict[str, str]:
    """The answer to :data:`ASKED`, a line a GPU: each value once, without those in brackets, which
    the driver does not tell."""
    gpus = [[value.strip() for value in line.split(",")] for line in lines.splitlines()]
    whole = [values for values in gpus if len(values) == len(ASKED)]
    found = {}
    for index, name in enumerate(ASKED):
        values = dict.fromkeys(values[index] for values in whole)
        found[name] = ", ".join(value for value in values if not value.startswith("["))
    return {name: text for name, text in found.items() if text}


def limit_in_a_process(tokens: int) -> float:
    """:func:`matmul_limit` in a process of its own, which leaves the GPU's memory free."""
    found = subprocess.run(
        [sys.executable, __file__, "--matmul-limit", str(tokens)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(found.stdout)


def matmul_limit(tokens: int, seconds: float = 6.0) -> float:
    """TFLOP/s of the layers' matrix products, forward and backward, on ``tokens`` tokens, kept up
    for ``seconds``: a GPU at its power limit is slower than in a short run."""
    import torch

    shapes = ((HIDDEN, (HEADS + 2 * GROUPS) * HIDDEN // HEADS), (HIDDEN, HIDDEN),
              (HIDDEN, 2 * FFN), (FFN, HIDDEN))  # fmt: skip
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    sets = [(torch.randn(tokens, i, **new), torch.randn(o, i, **new) * 0.02,
             torch.randn(tokens, o, **new)) for i, o in shapes]  # fmt: skip

    def once() -> None:
        for x, w, g in sets:
            x @ w.t()
            g @ w
            g.t() @ x

    def timed(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.monotonic()
        for _ in range(count):
            once()
        torch.cuda.synchronize()
        return (time.monotonic() - begin) / count

    count = max(1, int(seconds / timed(20)))
    timed(count // 2)
    flops = sum(6 * tokens * i * o for i, o in shapes)
    return flops / timed(count // 2) / 1e12


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", help="comma-separated names; default: all that fit this machine")
    parser.add_argument("--steps", type=int, default=12, help="of each row, %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--profiles", type=Path, help="directory for a trace of each row")
    parser.add_argument("--matmul-limit", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.matmul_limit:
        print(matmul_limit(options.matmul_limit))
        return 0
    rows = chosen(options.rows)
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        for record in measure(rows, options.steps, Path(scratch), options.profiles):
            records.append(record)
            print("\n".join([line(record), *record.get("profile", ())]), flush=True)
            if options.output:
                facts = {**machine.facts("torch", "triton", "megatron-core"), **gpu_facts()}
                options.output.write_text(json.dumps({**facts, "rows": records}, indent=1) + "\n")
    return 0


def chosen(names: str | None) -> list[Row]:
    """The rows to run.

    Raises:
        ConfigError: there is no such row, or there are too few GPUs.
    """
    import torch

    known = {row.name: row for row in ROWS}
    gpus = torch.cuda.device_count()
    if names is None:
        return [row for row in ROWS if row.gpus <= gpus]
    for name in names.split(","):
        if name not in known:
            raise ConfigError(f"--rows: there is no row {name!r}", hint=f"rows: {', '.join(known)}")
        if known[name].gpus > gpus:
            raise ConfigError(f"--rows: {name} needs {known[name].gpus} GPUs, here are {gpus}")
    return [known[name] for name in names.split(",")]


def line(record: dict[str, Any]) -> str:
    """A row to read."""
    speed, mfu = record["tokens_per_second_per_gpu"], 100 * record["mfu"]
    share, limit = 100 * record["share_of_matmul_limit"], record["matmul_limit_tflops"]
    return (
        f"{record['name']:>15} | {record['step_seconds']:.3f} s/step | {speed:,} tok/s/GPU | "
        f"{record['tflops_per_gpu']:.0f} TFLOP/s | MFU {mfu:.1f} % | {share:.0f} % of {limit:.0f} "
        f"| {record['memory_gib']:.1f} GiB | {record['seconds_to_first_step']:.0f} s to step 1 | "
        f"loss {record['first_loss']:.3f} .. {record['last_loss']:.3f}"
    )


if __name__ == "__main__":
    sys.exit(guard(main))
