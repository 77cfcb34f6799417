"""Benchmark attention with context parallelism on this machine's GPUs; write the results as JSON.

Compares the rate of causal attention, forward and backward, on one GPU with that of each
communication of context parallelism on all GPUs. A rate counts only the scores that causality asks
for. Each result is compared with that of one GPU.

    torchrun --standalone --nproc_per_node 2 tools/bench/context_parallel.py \\
        --output docs/results/context-parallel-2xh100.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.bench import machine
from flagscale.train.models.attention import SDPAttention
from flagscale.train.models.context_parallel import select_chunks

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Attention of Llama-3-8B."""
SECONDS = 3.0
"""Duration of a measurement. A GPU at its power limit is slower than in a short run."""


def build_attention(group: Any, communication: str) -> SDPAttention:
    """Return core attention over ``group`` with a communication of context parallelism."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        attention_dropout=0.0,
        context_parallel_size=group.size(),
        cp_comm_type=communication,
    )
    groups = SimpleNamespace(cp=group)
    return SDPAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)


def random_tensors(sequence: int) -> list[torch.Tensor]:
    """Return queries, keys, values, and a gradient of the output, equal on all ranks."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (
        (sequence, 1, HEADS, HEAD_DIM),
        (sequence, 1, KV_HEADS, HEAD_DIM),
        (sequence, 1, KV_HEADS, HEAD_DIM),
        (sequence, 1, HEADS * HEAD_DIM),
    )
    return [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in shapes
    ]


def run_pass(attention: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compute attention forward and backward. Return the output and the three gradients."""
    inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    output = attention(*inputs)
    output.backward(tensors[3])
    return [output.detach(), *(tensor.grad for tensor in inputs)]


def time_passes(run: Callable[[], object]) -> float:
    """Return the seconds of a pass."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.monotonic()
    run()
    torch.cuda.synchronize()
    rounds = torch.tensor([max(3, int(SECONDS / (time.monotonic() - begin)))], device="cuda")
    dist.broadcast(rounds, 0)
    count = int(rounds)
    begin = time.monotonic()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.monotonic() - begin) / count


def attention_flops(sequence: int) -> float:
    """Return the FLOP of a causal pass: two products forward and five backward."""
    return 7 * 2 * sequence**2 * HEADS * HEAD_DIM / 2


def measure_rows(sequence: int, compiled: bool) -> Iterator[dict[str, Any]]:
    """Yield the results of one GPU and of each communication, for a sequence length."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensors = random_tensors(sequence)
    single_rank_group = SimpleNamespace(size=lambda: 1)
    single = build_attention(single_rank_group, "all_gather")
    expected = run_pass(single, tensors)
    single_seconds = time_passes(partial(run_pass, single, tensors))
    rate = attention_flops(sequence) / single_seconds / 1e12
    yield {"communication": "one GPU", "seconds": single_seconds, "tflops_per_gpu": rate}
    own_tensors = [select_chunks(tensor, 0, rank, ranks) for tensor in tensors]
    own_expected = [select_chunks(tensor, 0, rank, ranks) for tensor in expected]
    cases = [("a2a", True), ("all_gather", True), ("all_gather", False)]
    for communication, cudnn in cases:
        attention: Any = build_attention(dist.group.WORLD, communication)
        if compiled:
            attention = torch.compile(attention, fullgraph=True, dynamic=False)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        results = run_pass(attention, own_tensors)
        error = max(
            ((a.float() - b.float()).norm() / b.float().norm()).item()
            for a, b in zip(results, own_expected, strict=True)
        )
        seconds = time_passes(partial(run_pass, attention, own_tensors))
        torch.backends.cuda.enable_cudnn_sdp(True)
        rank_rate = attention_flops(sequence) / ranks / seconds / 1e12
        yield {
            "communication": communication,
            "kernel": "cudnn" if cudnn else "flash",
            "seconds": seconds,
            "tflops_per_gpu": rank_rate,
            "share_of_one_gpu": rank_rate / rate,
            "relative_error": error,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--compiled", action="store_true", help="compile attention as layers are")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rows = []
    for sequence in options.sequences:
        for row in measure_rows(sequence, options.compiled):
            rows.append({"sequence": sequence, **row})
            if dist.get_rank() == 0:
                print(json.dumps(rows[-1]), flush=True)
    if options.output and dist.get_rank() == 0:
        facts = {
            **machine.describe_machine("torch"),
            "device": torch.cuda.get_device_name(),
            "ranks": dist.get_world_size(),
        }
        options.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
