#!/usr/bin/env python3
"""What sharing a pipeline with a CPU costs the GPU that is its first stage.

Two ranks of this machine train layers of Llama-3-8B's sizes: the GPU twelve of them, CPU cores one.
Nothing is waited for that training does not wait for: marks on the GPU's stream say when its passes
and the completing of its gradients begin and end. Between two of them lies what the exchange costs
it - copies from the host's memory, starting messages and copies to it - and the time in which it
waits for the CPU, which is left out: up to the moment in which the message is there.

    python tools/bench/mixed_stage.py --output docs/results/mixed-stage-h100.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "third_party" / "Megatron-LM"))

from flagscale.bench import machine
from flagscale.cli_errors import guard
from flagscale.errors import JobError

PROJECT = Path(__file__).resolve().parents[2]
PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"
WARM_UP = 2
BLOCKED = 100e-6
"""Seconds. A message that was waited for less had come before."""
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
    parser.add_argument("--steps", type=int, default=4, help="that count, %(default)s")
    parser.add_argument("--device", default="cuda", help="of the first stage, %(default)s")
    parser.add_argument("--model", default="", help="arguments that come after the model's own")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--timed", type=Path, help=argparse.SUPPRESS)
    options, training = parser.parse_known_args(argv)
    if options.timed:
        return timed(training, options.timed)
    if training:
        parser.error(f"unknown: {' '.join(training)}")
    facts = machine.facts("torch", "megatron-core")
    with tempfile.TemporaryDirectory() as directory:
        found = measure(options, Path(directory))
    print(
        f"a step's passes and gradients take {1e3 * found['passes']:.1f} and "
        f"{1e3 * found['gradients']:.1f} ms of {found['device']}, the exchange "
        f"{1e3 * found['exchange']:.1f} ms, {found['overhead']:.1%}"
    )
    if options.output:
        options.output.write_text(json.dumps({**facts, **found}, indent=1) + "\n")
    return 0


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train; the first stage's seconds of a step, means over the steps that count."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    arguments = [*MODEL.split(), "--train-iters", str(options.steps + WARM_UP)]
    arguments += options.model.split()
    found = directory / "found.json"
    processes: list[subprocess.Popen[bytes]] = []
    for rank, device in enumerate((options.device, "cpu")):
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")]),
            "FLAGSCALE_DEVICE": device,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, __file__, "--timed", str(found)] if rank == 0 else []
        command = command or [sys.executable, str(PROGRAM)]
        with (directory / f"output_{rank}").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [*command, *arguments], env=variables, stdout=output, stderr=output
                )
            )
    while (codes := [process.poll() for process in processes]).count(None):
        if any(codes):  # the other one waits for it
            for process in processes:
                process.kill()
        time.sleep(0.2)
    if any(codes):
        tails = [(directory / f"output_{r}").read_text(errors="replace")[-2000:] for r in (0, 1)]
        raise JobError(f"training ended with {codes}:\n" + "\n".join(tails))
    steps = json.loads(found.read_text())
    mean = {
        name: statistics.fmean(step[name] for step in steps["steps"]) for name in steps["steps"][0]
    }
    overhead = mean["exchange"] / (mean["passes"] + mean["gradients"])
    return {"device": steps["device"], **mean, "overhead": overhead}


class Stage:
    """Takes down when a stage's work begins and ends on its device, and when messages come."""

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device
        self.steps: list[dict[str, float]] = []

    def step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **options: Any) -> Any:
            self._spans: list[tuple[str, Any, Any]] = []
            self._came: list[float] = []
            self._on_host = 0.0
            self._wait_for_device()
            self._first = self._mark()
            self._wait_for_device()
            begin = self._begin = time.perf_counter()
            result = inner(*args, **options)
            self._wait_for_device()
            self.steps.append({"step": time.perf_counter() - begin, **self._found()})
            return result

        return outer

    def work(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A function that gives the device work."""

        def outer(*args: Any, **options: Any) -> Any:
            begin = self._mark()
            result = inner(*args, **options)
            self._spans.append((name, begin, self._mark()))
            return result

        return outer

    def on_host(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the exchange before or after all work of a step."""

        def outer(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*args, **options)
            self._on_host += time.perf_counter() - begin
            return result

        return outer

    def wait(self, inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """That of a message that is coming, after which the device is given its copy."""

        def outer(coming: Any) -> Any:
            begin = time.perf_counter()
            for work in coming.works:
                work.wait()
            coming.works = ()  # each can be waited for once
            came = time.perf_counter()
            if came - begin > BLOCKED:
                self._came.append(came - self._begin)
            return inner(coming)

        return outer

    def _found(self) -> dict[str, float]:
        """Seconds of the step that are over, by what they were for."""
        found = dict.fromkeys(("passes", "gradients", "exchange", "waiting"), 0.0)
        found["exchange"] = self._on_host
        ended: float | None = None
        for name, begin_mark, end_mark in self._spans:
            begin, end = self._seconds(begin_mark), self._seconds(end_mark)
            found[name] += end - begin
            if ended is not None:
                awaited = [came for came in self._came if ended < came < begin]
                waiting = max(awaited, default=ended) - ended
                found["waiting"] += waiting
                found["exchange"] += begin - ended - waiting
            ended = end
        return found

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        """Of a mark, after the step's beginning."""
        if not self._on_device:
            return float(mark - self._begin)
        return float(self._first.elapsed_time(mark)) / 1e3

    def _wait_for_device(self) -> None:
        if self._on_device:
            import torch

            torch.cuda.synchronize()


def timed(arguments: Sequence[str], found: Path) -> int:
    """The training program, its first stage's parts timed."""
    sys.argv[0] = str(PROGRAM)
    on_device = os.environ["FLAGSCALE_DEVICE"] != "cpu"
    if not on_device:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch
    from megatron.core.pipeline_parallel import schedules

    from flagscale.train import train_gpt
    from flagscale.train.meshes import exchange, gradients
    from flagscale.train.step import Stepper

    stage = Stage(on_device)
    for name in ("begin", "finish"):
        setattr(exchange.Exchange, name, stage.on_host(getattr(exchange.Exchange, name)))
    exchange._Coming.wait = stage.wait(exchange._Coming.wait)  # type: ignore[method-assign, assignment]
    gradients.Finalize.__call__ = stage.work("gradients", gradients.Finalize.__call__)  # type: ignore[method-assign]
    Stepper._run = stage.step(Stepper._run)  # type: ignore[method-assign]
    schedules.forward_step = stage.work("passes", schedules.forward_step)
    schedules.backward_step = stage.work("passes", schedules.backward_step)
    code = train_gpt.main(arguments)
    device = torch.cuda.get_device_name() if on_device else "the CPU"
    counted = stage.steps[WARM_UP:]
    found.write_text(json.dumps({"device": device, "steps": counted}))
    return code


if __name__ == "__main__":
    sys.exit(guard(main))
