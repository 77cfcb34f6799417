"""Benchmark training speed on this machine's GPUs; write the results as JSON.

Each row trains Llama-3-8B, or some of its layers with its head, on random tokens. It runs the real
training program: data loading, micro-batches, gradient reduction, clipping and optimizer. Each row
is compared with the limit of the GPU, measured in the same run: the sustained throughput of the
matrix multiplications (GEMMs) of these layers alone.

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

from flagscale.accelerators.cuda import Cuda
from flagscale.bench import machine
from flagscale.cli_errors import run_command
from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.errors import ConfigError, JobError
from flagscale.estimate.arithmetic import flops_per_token
from flagscale.status import STATUS_DIR_VARIABLE, Event, read_events

PROJECT = Path(__file__).resolve().parents[2]
PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"
HIDDEN, FFN_HIDDEN, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 8, 128256
MODEL = f"""
--hidden-size {HIDDEN} --ffn-hidden-size {FFN_HIDDEN} --num-attention-heads {HEADS}
--num-query-groups {KV_HEADS} --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 64
--normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
--position-embedding-type rope --rotary-base 500000
--hidden-dropout 0 --attention-dropout 0 --init-method-std 0.02
--tokenizer-type NullTokenizer --split 1 --eval-iters 0 --num-workers 1
--lr 3e-4 --lr-decay-style constant --clip-grad 1.0 --bf16
--use-distributed-optimizer --log-interval 2
"""
UNTIED = "--untie-embeddings-and-output-weights"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
NVIDIA_SMI_FIELDS = {
    "driver": "driver_version",
    "power_limit": "power.limit",
    "sm_clock_at_most": "clocks.max.sm",
    "memory_clock_at_most": "clocks.max.memory",
}
"""Queried fields of nvidia-smi, by their keys in the results."""
WARM_UP = 4
"""Leading steps that are not counted: compilation, first allocations, clock ramp-up."""


@dataclass(frozen=True)
class GpuRow:
    """One benchmarked configuration."""

    name: str
    layers: int
    sequence: int
    """Tokens of a sequence."""
    micro_batch: int
    """Sequences of a micro-batch."""
    accumulated: int
    """Number of micro-batches per step and data-parallel replica."""
    gpus: int = 1
    options: str = ""
    model: str = ""
    """Arguments that replace those of Llama-3-8B."""
    overlap: str = OVERLAP
    tie: str = UNTIED
    """Argument that gives the head its own weights; empty if they are the embedding's."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequence * self.micro_batch

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas."""
        arguments, ranks_per_replica = self.options.split(), 1
        for name in (
            "--tensor-model-parallel-size",
            "--pipeline-model-parallel-size",
            "--context-parallel-size",
        ):
            ranks_per_replica *= (
                int(arguments[arguments.index(name) + 1]) if name in arguments else 1
            )
        return self.gpus // ranks_per_replica


MOE_ARGUMENTS = "--moe-grouped-gemm --moe-aux-loss-coeff 1e-2"
MIXTRAL_ARGUMENTS = f"--vocab-size 32000 {MOE_ARGUMENTS} --num-experts 8 --moe-router-topk 2"
QWEN3_ARGUMENTS = """--hidden-size 2048 --num-attention-heads 32 --num-query-groups 4
--kv-channels 128 --vocab-size 151936 --qk-layernorm"""
"""Sizes of Qwen3-30B-A3B. The dense rows compared with the MoE rows do as much arithmetic per
token.
"""
SMALL_MODEL = """--num-attention-heads 12 --num-query-groups 4 --hidden-size 768
--ffn-hidden-size 2048 --vocab-size 50304"""
"""A model of 125 million weights. The GPU finishes its kernels faster than the host launches them.
"""
SMALL_BATCH = (12, 1024, 2, 8, 1)  # layers, sequence, micro_batch, accumulated, gpus
LLAMA_1B = """--hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32
--num-query-groups 8 --make-vocab-size-divisible-by 1"""
"""Layers of Llama-3.2-1B. An odd vocabulary must not slow down the output layer."""
TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel"
CONTEXT_PARALLEL = "--context-parallel-size 2 --recompute-granularity auto"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
OFFLOAD = "--optimizer-cpu-offload"
SHARDED = "--data-parallel-sharding-strategy optim_grads_params"
PRECISION_AWARE = "--use-precision-aware-optimizer"
BF16_MOMENTS = f"{PRECISION_AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
FP8_MOMENTS = f"{PRECISION_AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"
LEAN = f"{FP8_MOMENTS} --main-params-dtype bf16 --main-grads-dtype bf16"
"""Weights, gradients and states take 6 bytes a weight instead of 18."""
TOKENS_256K = (4096, 2, 32)
"""Sequence length, micro-batch size and micro-batches of a step of 262,144 tokens. The update of
offloaded weights takes the same time for any number of tokens.
"""
CUDA_GRAPH = "--cuda-graph-impl local --cuda-graph-scope full_iteration"
SEQUENCE_4K, SEQUENCE_8K = (8, 4096, 2, 8), (8, 8192, 1, 8)
SEQUENCE_4K_DOUBLE_BATCH = (8, 4096, 2, 16)
SEQUENCE_4K_MBS4 = (8, 4096, 4, 8)
"""Layers, sequence length, micro-batch size, and number of micro-batches per step.

``SEQUENCE_4K_MBS4`` has twice as many tokens per micro-batch as ``SEQUENCE_4K``.
``SEQUENCE_4K_DOUBLE_BATCH`` has as many tokens per step as two data-parallel replicas of
``SEQUENCE_4K``. In the rows with two pipeline stages, the stage with the output head has fewer
layers, so that both take about the same time.
"""
ROWS = (
    GpuRow("plain", *SEQUENCE_4K, options="--transformer-impl local --attention-backend flash"),
    GpuRow("bf16", *SEQUENCE_4K),
    GpuRow("fp8", *SEQUENCE_4K, options="--fp8 hybrid"),
    GpuRow("fp8-rowwise", *SEQUENCE_4K, options="--fp8 hybrid --fp8-recipe rowwise"),
    GpuRow("fp8-blockwise", *SEQUENCE_4K, options="--fp8 e4m3 --fp8-recipe blockwise"),
    GpuRow("bf16-8k", *SEQUENCE_8K),
    GpuRow("fp8-8k", *SEQUENCE_8K, options="--fp8 hybrid"),
    GpuRow("bf16-recompute", *SEQUENCE_4K, options="--recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1"),
    GpuRow("bf16-norms", *SEQUENCE_4K, options=f"{SELECTIVE} layernorm"),
    GpuRow("bf16-norms-mlp", *SEQUENCE_4K, options=f"{SELECTIVE} layernorm mlp"),
    GpuRow("bf16-core-attention", *SEQUENCE_4K, options=f"{SELECTIVE} core_attn"),
    GpuRow("bf16-auto", *SEQUENCE_4K, options="--recompute-granularity auto "
        "--recompute-memory-gib 50"),
    GpuRow("mixtral", 2, 4096, 2, 8, model=MIXTRAL_ARGUMENTS),
    GpuRow("mixtral-dense", 2, 4096, 2, 8, model="--ffn-hidden-size 28672 --vocab-size 32000"),
    GpuRow("qwen3-moe", 6, 4096, 2, 8, model=f"{QWEN3_ARGUMENTS} {MOE_ARGUMENTS} --num-experts 128 "
        "--moe-router-topk 8 --moe-ffn-hidden-size 768"),
    GpuRow("qwen3-dense", 6, 4096, 2, 8, model=f"{QWEN3_ARGUMENTS} --ffn-hidden-size 6144"),
    GpuRow("small", *SMALL_BATCH, model=SMALL_MODEL, overlap=""),
    GpuRow("small-captured", *SMALL_BATCH, options=CUDA_GRAPH, model=SMALL_MODEL, overlap=""),
    GpuRow("small-fp8", *SMALL_BATCH, options="--fp8 hybrid", model=SMALL_MODEL, overlap=""),
    GpuRow("small-fp8-captured", *SMALL_BATCH, options=f"--fp8 hybrid {CUDA_GRAPH}",
        model=SMALL_MODEL, overlap=""),
    GpuRow("1b", 16, 2048, 4, 4, model=f"{LLAMA_1B} --vocab-size 128256"),
    GpuRow("1b-odd", 16, 2048, 4, 4, model=f"{LLAMA_1B} --vocab-size 128257"),
    GpuRow("kept-256k", 8, *TOKENS_256K),
    GpuRow("offload-256k", 8, *TOKENS_256K, options=OFFLOAD),
    GpuRow("8b-offload", 32, *TOKENS_256K, options=f"{OFFLOAD} {PRECISION_AWARE} "
        "--recompute-granularity auto --recompute-memory-gib 64"),
    GpuRow("bf16-sections", *SEQUENCE_4K, options="--log-straggler"),
    GpuRow("muon", *SEQUENCE_4K, options="--optimizer muon"),
    GpuRow("muon-256k", 8, *TOKENS_256K, options="--optimizer muon"),
    GpuRow("remainders", *SEQUENCE_4K, options=PRECISION_AWARE),
    GpuRow("bf16-moments", *SEQUENCE_4K, options=BF16_MOMENTS),
    GpuRow("fp8-moments", *SEQUENCE_4K, options=FP8_MOMENTS),
    GpuRow("lean", *SEQUENCE_4K, options=LEAN),
    GpuRow("8b-lean", 32, *TOKENS_256K, options=f"{LEAN} --recompute-granularity auto "
        "--recompute-memory-gib 64"),
    GpuRow("offload-remainders-256k", 8, *TOKENS_256K, options=f"{OFFLOAD} {PRECISION_AWARE}"),
    GpuRow("offload-bf16-moments-256k", 8, *TOKENS_256K, options=f"{OFFLOAD} {BF16_MOMENTS}"),
    GpuRow("offload-fp8-moments-256k", 8, *TOKENS_256K, options=f"{OFFLOAD} {FP8_MOMENTS}"),
    GpuRow("offload-layers-256k", 8, *TOKENS_256K, options="--cpu-offloading-num-layers 2"),
    GpuRow("offload-all-256k", 8, *TOKENS_256K, options="--cpu-offloading-num-layers 7 "
        f"{SELECTIVE} layernorm mlp"),
    GpuRow("dp2", *SEQUENCE_4K, gpus=2),
    GpuRow("dp2-fp8", *SEQUENCE_4K, gpus=2, options="--fp8 hybrid"),
    GpuRow("dp2-8k", *SEQUENCE_8K, gpus=2),
    GpuRow("dp2-sharded", *SEQUENCE_4K, gpus=2, options=SHARDED),
    GpuRow("dp2-sharded-fp8", *SEQUENCE_4K, gpus=2, options=f"{SHARDED} --fp8 hybrid"),
    GpuRow("dp2-mbs4", *SEQUENCE_4K_MBS4, gpus=2),
    GpuRow("dp2-sharded-mbs4", *SEQUENCE_4K_MBS4, gpus=2, options=SHARDED),
    GpuRow("dp2-sharded-gradients", *SEQUENCE_4K, gpus=2,
        options="--data-parallel-sharding-strategy optim_grads"),
    GpuRow("8b-sharded", 32, 4096, 1, 32, gpus=2,
        options=f"{SHARDED} {BF16_MOMENTS}"),
    GpuRow("tp2", *SEQUENCE_4K_DOUBLE_BATCH, gpus=2,
        options=f"{TENSOR_PARALLEL} --tp-comm-overlap"),
    GpuRow("tp2-exposed", *SEQUENCE_4K_DOUBLE_BATCH, gpus=2, options=TENSOR_PARALLEL),
    GpuRow("pp2", *SEQUENCE_4K_DOUBLE_BATCH, gpus=2, options="--pipeline-model-parallel-size 2 "
        "--decoder-first-pipeline-num-layers 5"),
    GpuRow("cp2-64k", 8, 65536, 1, 2, gpus=2, options=CONTEXT_PARALLEL),
    GpuRow("cp2-64k-gather", 8, 65536, 1, 2, gpus=2,
        options=f"{CONTEXT_PARALLEL} --cp-comm-type all_gather"),
    GpuRow("cp2-128k", 8, 131072, 1, 1, gpus=2, options=CONTEXT_PARALLEL),
    GpuRow("cp2-128k-gather", 8, 131072, 1, 1, gpus=2,
        options=f"{CONTEXT_PARALLEL} --cp-comm-type all_gather"),
    GpuRow("dp4", 32, 4096, 2, 2, gpus=4),
    GpuRow("dp4-fp8", 32, 4096, 2, 2, gpus=4, options="--fp8 hybrid"),
)  # fmt: skip


def measure_rows(
    rows: Sequence[GpuRow], steps: int, scratch: Path, profiles: Path | None
) -> Iterator[dict[str, Any]]:
    """Train each row and yield its record, including the limit of the GPU.

    If ``profiles`` is a directory, the last two of the ``steps`` are profiled and not counted.

    Raises:
        ConfigError: There are too few steps to count any.
        JobError: The training program failed.
    """
    last_step = steps if profiles is None else steps - 2
    if last_step < WARM_UP + 2:
        raise ConfigError(
            f"{steps} steps are too few: the first {WARM_UP} are not counted, nor are two profiled "
            "ones, and the time of two steps is averaged",
            hint=f"--steps {steps + WARM_UP + 2 - last_step}",
        )
    for row in rows:
        data = write_tokens(scratch, 48 << 20, resolve_row_arguments(row).vocab_size)
        limit = measure_limit_in_subprocess(row.tokens)
        start = time.time()
        extra_arguments = "" if profiles is None else profile_arguments(steps, profiles / row.name)
        events = train_row(row, steps, data, scratch / row.name, extra_arguments)
        record = {**asdict(row), **summarize_events(row, events, start, last_step)}
        if profiles is not None:
            record["profile"] = read_profile_summary(scratch / row.name / "output")
        record["matmul_limit_tflops"] = round(limit, 1)
        record["share_of_matmul_limit"] = round(record["tflops_per_gpu"] / limit, 4)
        yield record


def write_tokens(directory: Path, count: int, vocabulary: int) -> Path:
    """Write an indexed data set of ``count`` random tokens unless it exists. Return its prefix."""
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


def profile_arguments(steps: int, directory: Path) -> str:
    """Return arguments that profile the last two of ``steps``."""
    return f"""--profile --profile-dir {directory.absolute()} --profile-step-start {steps - 1}
    --profile-step-end {steps + 1}"""


def read_profile_summary(output: Path) -> list[str]:
    """Return the lines of a run's output that summarize its profile."""
    lines = output.read_text(errors="replace").splitlines()
    begin = next((i for i, text in enumerate(lines) if "of kernels per step" in text), len(lines))
    return [text for text in lines[begin : begin + 24] if " ms" in text]


def train_row(
    row: GpuRow, steps: int, data: Path, directory: Path, extra_arguments: str
) -> list[Event]:
    """Train ``row`` with ``extra_arguments`` in addition. Return the events of rank 0."""
    files = ["--data-path", str(data), "--data-cache-path", str(directory.parent / "cache")]
    return run_training_program(
        [*build_arguments(row, steps), *extra_arguments.split(), *files], row.gpus, directory
    )


def build_arguments(row: GpuRow, steps: int) -> list[str]:
    """Return the arguments of the training program, without those of the data."""
    batch = row.micro_batch * row.accumulated * row.replicas
    size = f"""--num-layers {row.layers} --seq-length {row.sequence}
    --micro-batch-size {row.micro_batch} --global-batch-size {batch} --train-iters {steps}"""
    return f"{MODEL} {row.tie} {row.model} {size} {row.options} {row.overlap}".split()


def run_training_program(arguments: Sequence[str], gpus: int, directory: Path) -> list[Event]:
    """Run the training program with one process per GPU in the new ``directory``.

    Returns the events of rank 0.

    Raises:
        JobError: The training program failed.
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


def summarize_events(
    row: GpuRow, events: Sequence[Event], start: float, last_step: int
) -> dict[str, Any]:
    """Return the median step time, throughput and memory of a row, from the warm-up to step
    ``last_step``.
    """
    progress = [event for event in events if event.event == "progress"]
    step_seconds = [e.get("step_seconds") for e in progress if WARM_UP < e.get("step") <= last_step]
    median_seconds = statistics.median(step_seconds)
    tokens = row.tokens * row.accumulated * row.replicas / row.gpus
    model = resolve_row_arguments(row)
    flops = flops_per_token(model, model.vocab_size) * tokens / median_seconds
    device = next(event.get("device") for event in events if event.event == "started")
    peak = Cuda().peak_tflops(device)
    return {
        "device": device,
        "step_seconds": median_seconds,
        "step_seconds_of_all": step_seconds,
        "tokens_per_second_per_gpu": round(tokens / median_seconds),
        "tflops_per_gpu": round(flops / 1e12, 1),
        "mfu": round(flops / 1e12 / peak, 4) if peak else 0.0,
        "memory_gib": max(event.get("memory_gib") for event in progress),
        "seconds_to_first_step": round(progress[0].time - start, 1),
        "first_loss": progress[0].get("loss"),
        "last_loss": progress[-1].get("loss"),
        "grad_norm": progress[0].get("grad_norm"),
    }


def resolve_row_arguments(row: GpuRow) -> argparse.Namespace:
    """Return the row's resolved arguments."""
    return derive_arguments(parse_arguments([*build_arguments(row, 1), "--mock-data"]), row.gpus)


def query_gpus() -> dict[str, Any]:
    """Return the versions of CUDA and cuDNN and the GPUs' driver, power limit and clocks."""
    import torch

    cudnn: Any = torch.backends.cudnn
    libraries = {"cuda": torch.version.cuda, "cudnn": cudnn.version()}
    query = [
        "nvidia-smi",
        f"--query-gpu={','.join(NVIDIA_SMI_FIELDS.values())}",
        "--format=csv,noheader",
    ]
    try:
        output = subprocess.run(
            query, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        output = ""
    return {**libraries, **parse_nvidia_smi(output)}


def parse_nvidia_smi(lines: str) -> dict[str, str]:
    """Parse the output of nvidia-smi for :data:`NVIDIA_SMI_FIELDS`, one line per GPU.

    Each distinct value is listed once. Values in brackets, such as "[N/A]", are left out.
    """
    gpus = [[value.strip() for value in line.split(",")] for line in lines.splitlines()]
    complete = [values for values in gpus if len(values) == len(NVIDIA_SMI_FIELDS)]
    facts = {}
    for index, name in enumerate(NVIDIA_SMI_FIELDS):
        values = dict.fromkeys(values[index] for values in complete)
        facts[name] = ", ".join(value for value in values if not value.startswith("["))
    return {name: text for name, text in facts.items() if text}


def measure_limit_in_subprocess(tokens: int) -> float:
    """Run :func:`measure_matmul_limit` in a subprocess, so that no GPU memory stays allocated."""
    return float(run_program([__file__, "--matmul-limit", str(tokens)]))


def run_program(arguments: Sequence[str]) -> str:
    """Run a Python program and return what it prints.

    Raises:
        JobError: It failed.
    """
    process = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise JobError(
            f"{Path(arguments[0]).name} ended with {process.returncode}:\n{process.stderr[-3000:]}"
        )
    return process.stdout


def measure_matmul_limit(tokens: int, seconds: float = 6.0) -> float:
    """Return the TFLOP/s of the layers' matrix multiplications, forward and backward, on ``tokens``
    tokens.

    They are repeated for ``seconds``, because a GPU at its power limit is slower than in a short
    run.
    """
    import torch

    shapes = ((HIDDEN, (HEADS + 2 * KV_HEADS) * HIDDEN // HEADS), (HIDDEN, HIDDEN),
              (HIDDEN, 2 * FFN_HIDDEN), (FFN_HIDDEN, HIDDEN))  # fmt: skip
    tensor_options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    operands = [
        (
            torch.randn(tokens, in_features, **tensor_options),
            torch.randn(out_features, in_features, **tensor_options) * 0.02,
            torch.randn(tokens, out_features, **tensor_options),
        )
        for in_features, out_features in shapes
    ]

    def multiply_all() -> None:
        for activations, weight, gradient in operands:
            activations @ weight.t()
            gradient @ weight
            gradient.t() @ activations

    def time_rounds(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.monotonic()
        for _ in range(count):
            multiply_all()
        torch.cuda.synchronize()
        return (time.monotonic() - begin) / count

    count = max(1, int(seconds / time_rounds(20)))
    time_rounds(count // 2)
    flops = sum(6 * tokens * in_features * out_features for in_features, out_features in shapes)
    return flops / time_rounds(count // 2) / 1e12


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", help="comma-separated names of rows (default: all that fit this machine)"
    )
    parser.add_argument(
        "--steps", type=int, default=12, help="training steps per row (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--profiles", type=Path, help="directory for a profiler trace of each row")
    parser.add_argument("--matmul-limit", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.matmul_limit:
        print(measure_matmul_limit(options.matmul_limit))
        return 0
    rows = select_rows(options.rows)
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        for record in measure_rows(rows, options.steps, Path(scratch), options.profiles):
            records.append(record)
            print("\n".join([format_record(record), *record.get("profile", ())]), flush=True)
            if options.output:
                machine_facts = {
                    **machine.describe_machine("torch", "triton", "megatron-core"),
                    **query_gpus(),
                }
                options.output.write_text(
                    json.dumps({**machine_facts, "rows": records}, indent=1) + "\n"
                )
    return 0


def select_rows(names: str | None) -> list[GpuRow]:
    """Return the rows to run.

    Raises:
        ConfigError: A row does not exist or requires more GPUs than this machine has.
    """
    import torch

    rows = {row.name: row for row in ROWS}
    gpus = torch.cuda.device_count()
    if names is None:
        return [row for row in ROWS if row.gpus <= gpus]
    for name in names.split(","):
        if name not in rows:
            raise ConfigError(f"--rows: no such row: {name!r}", hint=f"rows: {', '.join(rows)}")
        if rows[name].gpus > gpus:
            raise ConfigError(f"--rows: {name} requires {rows[name].gpus} GPUs, found {gpus}")
    return [rows[name] for name in names.split(",")]


def format_record(record: dict[str, Any]) -> str:
    """Format a record as a table line."""
    speed, mfu = record["tokens_per_second_per_gpu"], 100 * record["mfu"]
    share, limit = 100 * record["share_of_matmul_limit"], record["matmul_limit_tflops"]
    return (
        f"{record['name']:>15} | {record['step_seconds']:.3f} s/step | {speed:,} tok/s/GPU | "
        f"{record['tflops_per_gpu']:.0f} TFLOP/s | MFU {mfu:.1f} % | {share:.0f} % of {limit:.0f} "
        f"| {record['memory_gib']:.1f} GiB | {record['seconds_to_first_step']:.0f} s to step 1 | "
        f"loss {record['first_loss']:.3f} .. {record['last_loss']:.3f}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
