#!/usr/bin/env python3
"""How much of what stages send each other hides behind what they compute.

Two ranks of this machine play the two stages of Llama-3-8B in megatron.core's 1F1B schedule, over
the exchange that meshes train with. What they send is of the model's size (S = 4,096, bf16: 32 MiB
a micro-batch in each direction); instead of computing they sleep for as long as 16 layers take
one H200, as a device computes without the host. A step is timed with messages asked for when they
are wanted, asked for ahead, in the eager schedule (hetero_eager_1f1b) too, and with ones of a few
bytes, by turns; and a message on its own. Of what a step's messages take alone, that for which the
step is not longer is hidden.

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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "third_party" / "Megatron-LM"))

from flagscale.bench import machine
from flagscale.cli_errors import guard

FORWARD, BACKWARD = 0.055, 0.110
"""Seconds that 16 layers of Llama-3-8B take one H200 for 4,096 tokens at 600 TFLOP/s:
2 x 4e9 weights x 4,096 tokens, and twice that."""
FEW = 8
"""Tokens of a message whose time is next to nothing."""
KINDS = ("wanted", "ahead", "eager")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--backend", nargs="+", default=["gloo", "fsccl"], help="%(default)s")
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch, %(default)s")
    parser.add_argument("--hidden", type=int, default=4096, help="size of a token, %(default)s")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step, %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="of each kind, %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    from torch.multiprocessing.spawn import spawn

    # Memory that has been freed is used again, as a device's is, and not cleared anew.
    os.environ.update(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_=str(2**33))
    facts = machine.facts("torch", "megatron-core")
    found = {}
    for backend in options.backend:
        with tempfile.TemporaryDirectory() as directory:
            spawn(rank_main, (options, backend, directory), nprocs=2)  # type: ignore[no-untyped-call]
            found[backend] = json.loads((Path(directory) / "found.json").read_text())
        print(text(backend, found[backend]), flush=True)
    if options.output:
        sizes = {k: v for k, v in vars(options).items() if k not in ("output", "backend")}
        computing = {"forward_seconds": FORWARD, "backward_seconds": BACKWARD}
        result = {**facts, **sizes, **computing, "backends": found}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def rank_main(rank: int, options: argparse.Namespace, backend: str, directory: str) -> None:
    """One stage."""
    os.environ.update(FLAGSCALE_DEVICE="cpu", TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    import torch.distributed as dist

    from flagscale.comm import registry

    chosen = registry.usable(backend, "cpu")
    with chosen.creating():
        dist.init_process_group(
            chosen.torch_backend("cpu"), init_method=f"file://{directory}/store", rank=rank,
            world_size=2,
        )  # fmt: skip
    pipeline = Pipeline(rank, options)
    pipeline.step("few bytes")
    pipeline.step("ahead")
    pipeline.step("eager")
    steps: dict[str, list[float]] = {}
    for _ in range(options.steps):
        for kind in ("few bytes", *KINDS):
            steps.setdefault(kind, []).append(pipeline.step(kind))
    message = pipeline.message()
    if rank == 0:
        found = summary(steps, message, options.micro_batches)
        Path(directory, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


class Pipeline:
    """One stage of two, with a model that sleeps."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        import torch
        from megatron.core import parallel_state
        from megatron.core.transformer.transformer_config import TransformerConfig

        from flagscale.accelerators.device import Device
        from flagscale.config.arguments.meshes import Mesh, Meshes
        from flagscale.train.meshes import groups
        from flagscale.train.meshes.exchange import Exchange

        self._options = options
        two = (Mesh(layers=(16,)), Mesh(layers=(16,)))
        plain, eager = (Meshes(two, sequences=1, eager=eager) for eager in (False, True))
        made = groups.make(plain, plain.stages[rank], minutes=2, on_host=False)
        config = TransformerConfig(
            num_layers=32, hidden_size=options.hidden, num_attention_heads=32,
            pipeline_model_parallel_size=2, pipeline_dtype=torch.bfloat16, bf16=True,
            params_dtype=torch.bfloat16,
        )  # fmt: skip
        config.finalize_model_grads_func = None
        tensor_parallel = parallel_state.get_tensor_model_parallel_group()

        def exchange(meshes: Meshes, tokens: int) -> Exchange:
            return Exchange(
                config, meshes, meshes.stages[rank], made.boundaries, tensor_parallel,
                Device.of(torch.device("cpu")), sequence=tokens,
            )  # fmt: skip

        whole = exchange(plain, options.tokens)
        self._exchanges = {
            "few bytes": exchange(plain, FEW),
            "wanted": whole,
            "ahead": whole,
            "eager": exchange(eager, options.tokens),
        }
        self._models = {n: model(config, rank, n) for n in (FEW, options.tokens)}

    def step(self, kind: str) -> float:
        """Seconds that a step takes both."""
        import torch.distributed as dist
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        from flagscale.train.meshes.gradients import collection

        tokens = FEW if kind == "few bytes" else self._options.tokens
        exchange, count = self._exchanges[kind], self._options.micro_batches
        dist.barrier()
        begin = time.perf_counter()
        if kind != "wanted":
            exchange.begin(count, forward_only=False)
        get_forward_backward_func(pp_size=2, vp_size=None)(
            forward_step_func=lambda _, model: (model(), lambda loss: (loss, {})),
            data_iterator=None,
            model=[self._models[tokens]],
            num_microbatches=count,
            seq_length=tokens,
            micro_batch_size=1,
            p2p_communicator=exchange,
            pg_collection=collection(),
        )
        exchange.finish()
        dist.barrier()
        return time.perf_counter() - begin

    def message(self) -> float:
        """Median seconds that one message takes alone, there and back by turns."""
        import torch
        import torch.distributed as dist

        tensor = torch.zeros(self._options.tokens, 1, self._options.hidden, dtype=torch.bfloat16)
        taken = []
        for _ in range(12):
            dist.barrier()
            begin = time.perf_counter()
            for sender in (0, 1):
                if dist.get_rank() == sender:
                    dist.send(tensor, 1 - sender)
                else:
                    dist.recv(tensor, sender)
            taken.append((time.perf_counter() - begin) / 2)
        return statistics.median(taken[2:])


def model(config: Any, rank: int, tokens: int) -> Any:
    """A stage that sleeps for its passes. What they give costs nothing to make, so that nothing but
    the exchange is left: memory that is used again, not written."""
    import torch

    shape = (tokens, 1, config.hidden_size)
    given = torch.zeros(shape, dtype=torch.bfloat16)

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, weight: Any) -> Any:
            time.sleep(FORWARD)
            return hidden.new_zeros(()) if rank == 1 else hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            time.sleep(BACKWARD)
            return torch.empty_like(given) if rank == 1 else None, torch.zeros(())

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
            hidden = given if rank == 0 else self.input_tensor
            return Sleep.apply(hidden, self.weight)  # type: ignore[no-untyped-call]

    return Stage()


def summary(steps: dict[str, list[float]], message: float, count: int) -> dict[str, Any]:
    """``hidden``: of what the messages of a step take one after the other, the share for which
    the step is not longer."""
    medians = {kind: statistics.median(taken) for kind, taken in steps.items()}
    alone = 2 * count * message
    hidden = {kind: 1 - (medians[kind] - medians["few bytes"]) / alone for kind in KINDS}
    return {"message_seconds": message, "step_seconds": medians, "hidden": hidden, "steps": steps}


def text(backend: str, found: dict[str, Any]) -> str:
    step, hidden = found["step_seconds"], found["hidden"]
    lines = [f"{kind:7} {step[kind]:.3f} s, {hidden[kind]:.0%} hidden" for kind in KINDS]
    alone = f"a message takes {1e3 * found['message_seconds']:.1f} ms"
    return "\n  ".join([f"{backend}: {alone}, a step {step['few bytes']:.3f} s without", *lines])


if __name__ == "__main__":
    sys.exit(guard(main))
