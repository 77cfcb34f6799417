#!/usr/bin/env python3
"""What sharing a pipeline with a CPU costs the GPU that is its first stage.

Two ranks of this machine train layers of Llama-3-8B's sizes: the GPU twelve of them, CPU cores one.
Of the GPU's step the time in which it waits for the CPU is left out. What else it spends in the
exchange - copies to and from the host's memory, each waited for here, starting messages - is set
against its own passes and the completing of its gradients, which it does without a CPU too.

    python tools/bench/mixed_stage.py --output docs/results/mixed-stage-h200.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "third_party" / "Megatron-LM"))

from flagscale.bench import machine
from flagscale.errors import JobError
from flagscale.guard import guard

PROJECT = Path(__file__).resolve().parents[2]
PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"
WARM_UP = 2
CALLS = ("begin", "recv_forward", "recv_backward", "send_forward", "send_backward",
         "send_forward_recv_backward", "send_backward_recv_forward", "finish")  # fmt: skip
"""Of the exchange, by the schedule."""
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
    parser.add_argument("--steps", type=int, default=2, help="that count, %(default)s")
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
        name: sum(step[name] for step in steps["steps"]) / options.steps for name in steps["of"]
    }
    alone = mean["passes"] + mean["gradients"]
    exchange = mean["exchanging"] - mean["waiting"]
    overhead = exchange / alone
    return {"device": steps["device"], **mean, "exchange": exchange, "overhead": overhead}


class Clock:
    """Adds up under names what functions take until the device has done its work."""

    def __init__(self, wait_for_device: Callable[[], None], spent: defaultdict[str, float]) -> None:
        self._wait_for_device = wait_for_device
        self._spent = spent

    def times(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **options: Any) -> Any:
            self._wait_for_device()
            begin = time.perf_counter()
            result = inner(*args, **options)
            self._wait_for_device()
            self._spent[name] += time.perf_counter() - begin
            return result

        return outer


def timed(arguments: Sequence[str], found: Path) -> int:
    """The training program, its first stage's parts timed."""
    sys.argv[0] = str(PROGRAM)
    if os.environ["FLAGSCALE_DEVICE"] == "cpu":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import torch
    from megatron.core.pipeline_parallel import schedules

    from flagscale.train import train_gpt
    from flagscale.train.meshes import exchange, gradients
    from flagscale.train.step import Stepper

    on_device = os.environ["FLAGSCALE_DEVICE"] != "cpu"
    spent: defaultdict[str, float] = defaultdict(float)
    steps: list[dict[str, float]] = []

    clocked = Clock(torch.cuda.synchronize if on_device else lambda: None, spent).times

    class Waited:
        """A work whose wait is the time in which the other stage computes."""

        def __init__(self, work: Any) -> None:
            self._work = work
            self.wait = clocked("waiting", work.wait)

    coming_wait = exchange._Coming.wait

    def wait(coming: exchange._Coming) -> torch.Tensor:
        coming.works = [Waited(work) for work in coming.works]
        return coming_wait(coming)

    run = clocked("step", Stepper._run)

    def step(*args: Any, **options: Any) -> Any:
        spent.clear()
        result = run(*args, **options)
        steps.append(dict(spent))
        return result

    for name in CALLS:
        setattr(exchange.Exchange, name, clocked("exchanging", getattr(exchange.Exchange, name)))
    exchange._Coming.wait = wait  # type: ignore[method-assign, assignment]
    gradients.Finalize.__call__ = clocked("gradients", gradients.Finalize.__call__)  # type: ignore[method-assign]
    Stepper._run = step  # type: ignore[method-assign]
    schedules.forward_step = clocked("passes", schedules.forward_step)
    schedules.backward_step = clocked("passes", schedules.backward_step)
    code = train_gpt.main(arguments)
    device = torch.cuda.get_device_name() if on_device else "the CPU"
    names = ("step", "exchanging", "waiting", "passes", "gradients")
    found.write_text(json.dumps({"of": names, "device": device, "steps": steps[WARM_UP:]}))
    return code


if __name__ == "__main__":
    sys.exit(guard(main))
