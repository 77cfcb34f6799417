#!/usr/bin/env python3
"""Benchmark the cost of sharing a pipeline with a CPU for the GPU that is its first stage.

Two ranks of this machine train layers of Llama-3-8B's sizes: twelve on the GPU, one on CPU cores.
The measurement adds no synchronization within a step. Events on the GPU's stream mark where its
passes and the finalization of its gradients begin and end. The time between two of them consists
of the communication overhead (copies from and to host memory, starting messages) and of waiting
for the CPU stage. The wait, which ends when the message has arrived, is not counted.

    python tools/bench/mixed_stage.py --output docs/results/mixed-stage-h100.json
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flagscale.free_port import free_port

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "third_party" / "Megatron-LM"))

from flagscale.bench import machine
from flagscale.cli_errors import run_command
from flagscale.errors import JobError

PROJECT = Path(__file__).resolve().parents[2]
MEGATRON = PROJECT / "third_party" / "Megatron-LM"
PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"
WARMUP_STEPS = 2
MIN_WAIT_SECONDS = 100e-6
"""Shortest wait that is counted. With a shorter one the message had arrived before."""
MODEL = """
--num-layers 13 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8
--ffn-hidden-size 14336 --seq-length 2048 --micro-batch-size 1 --global-batch-size 3 --bf16
--vocab-size 1000 --make-vocab-size-divisible-by 64 --mock-data --tokenizer-type NullTokenizer
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --eval-iters 0
--num-workers 0 --lr 1e-5 --lr-decay-style constant --log-interval 1 --distributed-backend fsccl
--enable-hetero --hetero-process-meshes 1 1 1 1 1  1 1 1 1 1 --hetero-pipeline-layer-split 12 1
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=4, help="counted steps (default: %(default)s)")
    parser.add_argument(
        "--device", default="cuda", help="device of the first stage (default: %(default)s)"
    )
    parser.add_argument("--model", default="", help="arguments appended to those of the model")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--timed", type=Path, help=argparse.SUPPRESS)
    options, training_arguments = parser.parse_known_args(argv)
    if options.timed:
        return run_timed_stage(training_arguments, options.timed)
    if training_arguments:
        parser.error(f"unrecognized arguments: {' '.join(training_arguments)}")
    machine_facts = machine.describe_machine("torch", "megatron-core")
    with tempfile.TemporaryDirectory() as directory:
        result = measure_first_stage(options, Path(directory))
    print(
        f"a step's passes and gradients take {1e3 * result['passes']:.1f} and "
        f"{1e3 * result['gradients']:.1f} ms of {result['device']}, the exchange "
        f"{1e3 * result['exchange']:.1f} ms, {result['overhead']:.1%}"
    )
    if options.output:
        options.output.write_text(json.dumps({**machine_facts, **result}, indent=1) + "\n")
    return 0


def measure_first_stage(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train, and return the first stage's mean seconds per counted step.

    Raises:
        JobError: A rank failed.
    """
    port = free_port()
    arguments = [*MODEL.split(), "--train-iters", str(options.steps + WARMUP_STEPS)]
    arguments += options.model.split()
    result_file = directory / "result.json"
    processes: list[subprocess.Popen[bytes]] = []
    for rank, device in enumerate((options.device, "cpu")):
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(PROJECT), str(MEGATRON), os.environ.get("PYTHONPATH", "")]
            ),
            "FLAGSCALE_DEVICE": device,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, __file__, "--timed", str(result_file)] if rank == 0 else []
        command = command or [sys.executable, str(PROGRAM)]
        with (directory / f"output_{rank}").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [*command, *arguments], env=variables, stdout=output, stderr=output
                )
            )
    while (codes := [process.poll() for process in processes]).count(None):
        if any(codes):  # the peer would wait for the failed rank
            for process in processes:
                process.kill()
        time.sleep(0.2)
    if any(codes):
        tails = [(directory / f"output_{r}").read_text(errors="replace")[-2000:] for r in (0, 1)]
        raise JobError(f"training ended with {codes}:\n" + "\n".join(tails))
    steps = json.loads(result_file.read_text())
    mean_seconds = {
        name: statistics.fmean(step[name] for step in steps["steps"]) for name in steps["steps"][0]
    }
    overhead = mean_seconds["exchange"] / (mean_seconds["passes"] + mean_seconds["gradients"])
    return {"device": steps["device"], **mean_seconds, "overhead": overhead}


class StageTimer:
    """Timer of a stage: records device work and message arrivals of each step."""

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device
        self.steps: list[dict[str, float]] = []

    def wrap_step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            self._spans: list[tuple[str, Any, Any]] = []
            self._arrivals: list[float] = []
            self._host_seconds = 0.0
            self._synchronize_device()
            self._first = self._record_mark()
            self._synchronize_device()
            begin = self._begin = time.perf_counter()
            result = function(*args, **options)
            self._synchronize_device()
            self.steps.append({"step": time.perf_counter() - begin, **self._summarize_step()})
            return result

        return wrapper

    def wrap_device_work(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that launches device work of the category ``name``."""

        def wrapper(*args: Any, **options: Any) -> Any:
            begin = self._record_mark()
            result = function(*args, **options)
            self._spans.append((name, begin, self._record_mark()))
            return result

        return wrapper

    def wrap_host_work(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a communication function that runs before or after all device work of a step."""

        def wrapper(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **options)
            self._host_seconds += time.perf_counter() - begin
            return result

        return wrapper

    def wrap_receive(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap the wait for a message, after which its copy to the device is launched."""

        def wrapper(receive: Any) -> Any:
            begin = time.perf_counter()
            for work in receive.works:
                work.wait()
            receive.works = ()  # each can be waited for only once
            arrival = time.perf_counter()
            if arrival - begin > MIN_WAIT_SECONDS:
                self._arrivals.append(arrival - self._begin)
            return function(receive)

        return wrapper

    def _summarize_step(self) -> dict[str, float]:
        """Return the seconds of the finished step by category."""
        seconds = dict.fromkeys(("passes", "gradients", "exchange", "waiting"), 0.0)
        seconds["exchange"] = self._host_seconds
        previous_end: float | None = None
        for name, begin_mark, end_mark in self._spans:
            begin, end = self._elapsed_seconds(begin_mark), self._elapsed_seconds(end_mark)
            seconds[name] += end - begin
            if previous_end is not None:
                arrivals = [arrival for arrival in self._arrivals if previous_end < arrival < begin]
                waiting = max(arrivals, default=previous_end) - previous_end
                seconds["waiting"] += waiting
                seconds["exchange"] += begin - previous_end - waiting
            previous_end = end
        return seconds

    def _record_mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _elapsed_seconds(self, mark: Any) -> float:
        """Return the seconds between the beginning of the step and a mark."""
        if not self._on_device:
            return float(mark - self._begin)
        return float(self._first.elapsed_time(mark)) / 1e3

    def _synchronize_device(self) -> None:
        if self._on_device:
            import torch

            torch.cuda.synchronize()


def run_timed_stage(arguments: Sequence[str], result_file: Path) -> int:
    """Run the training program of the first stage with timers installed."""
    sys.argv[0] = str(PROGRAM)
    on_device = os.environ["FLAGSCALE_DEVICE"] != "cpu"
    if not on_device:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch
    from megatron.core.pipeline_parallel import schedules

    from flagscale.train import train_gpt
    from flagscale.train.meshes import finalize_grads, p2p_communicator
    from flagscale.train.step import Stepper

    timer = StageTimer(on_device)
    communicator: Any = p2p_communicator.MeshP2PCommunicator
    for name in ("begin_step", "finish_step"):
        setattr(communicator, name, timer.wrap_host_work(getattr(communicator, name)))
    receive: Any = p2p_communicator._PendingReceive
    receive.wait = timer.wrap_receive(receive.wait)
    finalizer: Any = finalize_grads.MeshGradientFinalizer
    finalizer.__call__ = timer.wrap_device_work("gradients", finalizer.__call__)
    stepper: Any = Stepper
    stepper._run_schedule = timer.wrap_step(stepper._run_schedule)
    schedules.forward_step = timer.wrap_device_work("passes", schedules.forward_step)
    schedules.backward_step = timer.wrap_device_work("passes", schedules.backward_step)
    code = train_gpt.main(arguments)
    device = torch.cuda.get_device_name() if on_device else "the CPU"
    counted = timer.steps[WARMUP_STEPS:]
    result_file.write_text(json.dumps({"device": device, "steps": counted}))
    return code


if __name__ == "__main__":
    sys.exit(run_command(main))
