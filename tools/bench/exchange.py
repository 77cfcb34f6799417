#!/usr/bin/env python3
"""Benchmark how much of the communication between pipeline stages overlaps with computation.

Two ranks of this machine act as the two stages of Llama-3-8B in megatron.core's 1F1B schedule, over
the point-to-point communicator of the meshes. Messages have the model's size (S = 4,096, bf16:
32 MiB per micro-batch and direction). Instead of computing, the ranks sleep as long as 16 layers
take on one H200, because a device computes without the host.

Four kinds of steps are timed in turn: ``wanted`` posts each receive when its data is needed,
``ahead`` posts receives before, ``eager`` uses the eager schedule (hetero_eager_1f1b), and
``few bytes`` has messages of a few bytes, as a reference without communication time. A single
message is timed as well. ``hidden`` is the share of a step's message time that does not lengthen
the step.

    python tools/bench/exchange.py --output docs/results/mesh-exchange-cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "third_party" / "Megatron-LM"))

from flagscale.bench import machine
from flagscale.cli_errors import run_command

FORWARD_SECONDS, BACKWARD_SECONDS = 0.055, 0.110
"""Seconds of the passes of 16 layers of Llama-3-8B on one H200, at 600 TFLOP/s.

Forward: 2 x 4e9 weights x 4,096 tokens; backward: twice that.
"""
FEW_TOKENS = 8
"""Tokens of a message whose transfer time is negligible."""
KINDS = ("wanted", "ahead", "eager")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--backend",
        nargs="+",
        default=["gloo", "fsccl"],
        help="communication backends (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, help="tokens per micro-batch (default: %(default)s)"
    )
    parser.add_argument(
        "--hidden", type=int, default=4096, help="hidden size (default: %(default)s)"
    )
    parser.add_argument(
        "--micro-batches", type=int, default=8, help="micro-batches per step (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="measured steps of each kind (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    from torch.multiprocessing.spawn import spawn

    # Reuse freed memory, as a device's allocator does, instead of mapping and clearing it again.
    os.environ.update(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(2**33))
    machine_facts = machine.describe_machine("torch", "megatron-core")
    results = {}
    for backend in options.backend:
        with tempfile.TemporaryDirectory() as directory:
            spawn(rank_main, (options, backend, directory), nprocs=2)  # type: ignore[no-untyped-call]
            results[backend] = json.loads((Path(directory) / "result.json").read_text())
        print(format_result(backend, results[backend]), flush=True)
    if options.output:
        sizes = {k: v for k, v in vars(options).items() if k not in ("output", "backend")}
        compute_times = {"forward_seconds": FORWARD_SECONDS, "backward_seconds": BACKWARD_SECONDS}
        result = {**machine_facts, **sizes, **compute_times, "backends": results}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def rank_main(rank: int, options: argparse.Namespace, backend: str, directory: str) -> None:
    """Run one stage."""
    os.environ.update(FLAGSCALE_DEVICE="cpu", TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    import torch.distributed as dist

    from flagscale.comm import registry

    comm_backend = registry.get_usable_backend(backend, "cpu")
    with comm_backend.creation_context():
        dist.init_process_group(
            comm_backend.torch_backend("cpu"), init_method=f"file://{directory}/store", rank=rank,
            world_size=2,
        )  # fmt: skip
    stage = SleepingStage(rank, options)
    stage.time_step("few bytes")
    stage.time_step("ahead")
    stage.time_step("eager")
    steps: dict[str, list[float]] = {}
    for _ in range(options.steps):
        for kind in ("few bytes", *KINDS):
            steps.setdefault(kind, []).append(stage.time_step(kind))
    message = stage.time_message()
    if rank == 0:
        result = summarize_steps(steps, message, options.micro_batches)
        Path(directory, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


class SleepingStage:
    """One of two stages, with a model that sleeps."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        import torch
        from megatron.core import parallel_state
        from megatron.core.transformer.transformer_config import TransformerConfig

        from flagscale.accelerators.device import Device
        from flagscale.config.arguments.hetero.meshes import Mesh, Meshes
        from flagscale.train.meshes import groups
        from flagscale.train.meshes.p2p_communicator import MeshP2PCommunicator

        self._options = options
        two_meshes = (Mesh(layers=(16,)), Mesh(layers=(16,)))
        plain, eager = (Meshes(two_meshes, sequences=1, eager=eager) for eager in (False, True))
        mesh_groups = groups.create_mesh_groups(
            plain, plain.stages[rank], timeout_minutes=2, via_host_memory=False
        )
        config = TransformerConfig(
            num_layers=32, hidden_size=options.hidden, num_attention_heads=32,
            pipeline_model_parallel_size=2, pipeline_dtype=torch.bfloat16, bf16=True,
            params_dtype=torch.bfloat16,
        )  # fmt: skip
        config.finalize_model_grads_func = None
        tensor_parallel = parallel_state.get_tensor_model_parallel_group()

        def create_communicator(meshes: Meshes, tokens: int) -> MeshP2PCommunicator:
            return MeshP2PCommunicator(
                config, meshes, meshes.stages[rank], mesh_groups.stage_groups, tensor_parallel,
                Device.from_torch(torch.device("cpu")), sequence_length=tokens,
            )  # fmt: skip

        full_size = create_communicator(plain, options.tokens)
        self._communicators = {
            "few bytes": create_communicator(plain, FEW_TOKENS),
            "wanted": full_size,
            "ahead": full_size,
            "eager": create_communicator(eager, options.tokens),
        }
        self._models = {
            n: build_sleeping_model(config, rank, n) for n in (FEW_TOKENS, options.tokens)
        }

    def time_step(self, kind: str) -> float:
        """Return the seconds of one step of both stages."""
        import torch.distributed as dist
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        from flagscale.train.meshes.finalize_grads import build_group_collection

        tokens = FEW_TOKENS if kind == "few bytes" else self._options.tokens
        communicator, count = self._communicators[kind], self._options.micro_batches
        dist.barrier()
        begin = time.perf_counter()
        if kind != "wanted":
            communicator.begin_step(count, forward_only=False)
        get_forward_backward_func(pp_size=2, vp_size=None)(
            forward_step_func=lambda _, model: (model(), lambda loss: (loss, {})),
            data_iterator=None,
            model=[self._models[tokens]],
            num_microbatches=count,
            seq_length=tokens,
            micro_batch_size=1,
            p2p_communicator=communicator,
            pg_collection=build_group_collection(),
        )
        communicator.finish_step()
        dist.barrier()
        return time.perf_counter() - begin

    def time_message(self) -> float:
        """Return the median seconds of a single message, sent alternately in both directions."""
        import torch
        import torch.distributed as dist

        tensor = torch.zeros(self._options.tokens, 1, self._options.hidden, dtype=torch.bfloat16)
        seconds = []
        for _ in range(12):
            dist.barrier()
            begin = time.perf_counter()
            for sender in (0, 1):
                if dist.get_rank() == sender:
                    dist.send(tensor, 1 - sender)
                else:
                    dist.recv(tensor, sender)
            seconds.append((time.perf_counter() - begin) / 2)
        return statistics.median(seconds[2:])


def build_sleeping_model(config: Any, rank: int, tokens: int) -> Any:
    """Build a stage that sleeps for its passes.

    Its outputs reuse memory without writing to it, so that only the communication is measured.
    """
    import torch

    shape = (tokens, 1, config.hidden_size)
    buffer = torch.zeros(shape, dtype=torch.bfloat16)

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any) -> Any:
            time.sleep(FORWARD_SECONDS)
            return hidden.new_zeros(()) if rank == 1 else hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            time.sleep(BACKWARD_SECONDS)
            return torch.empty_like(buffer) if rank == 1 else None, torch.zeros(())

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.model_type = SimpleNamespace(name="encoder_or_decoder")
            self.input_tensor: Any = None
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def set_input_tensor(self, tensors: Any) -> None:
            self.input_tensor = tensors[0]

        def forward(self) -> Any:
            hidden = buffer if rank == 0 else self.input_tensor
            return Sleep.apply(hidden, self.weight)  # type: ignore[no-untyped-call]

    return Stage()


def summarize_steps(
    steps: dict[str, list[float]], message_seconds: float, micro_batches: int
) -> dict[str, Any]:
    """Summarize the step times.

    ``hidden`` is the share of a step's messages, timed one after another, that does not lengthen
    the step.
    """
    medians = {kind: statistics.median(seconds) for kind, seconds in steps.items()}
    total_message_seconds = 2 * micro_batches * message_seconds
    hidden = {
        kind: 1 - (medians[kind] - medians["few bytes"]) / total_message_seconds for kind in KINDS
    }
    return {
        "message_seconds": message_seconds,
        "step_seconds": medians,
        "hidden": hidden,
        "steps": steps,
    }


def format_result(backend: str, result: dict[str, Any]) -> str:
    step, hidden = result["step_seconds"], result["hidden"]
    lines = [f"{kind:7} {step[kind]:.3f} s, {hidden[kind]:.0%} hidden" for kind in KINDS]
    message_text = f"a message takes {1e3 * result['message_seconds']:.1f} ms"
    return "\n  ".join(
        [f"{backend}: {message_text}, a step {step['few bytes']:.3f} s without", *lines]
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
