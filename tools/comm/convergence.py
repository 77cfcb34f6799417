#!/usr/bin/env python3
"""Compare the convergence of training with bounded all_reduces under packet loss and with exact
ones.

A bounded all_reduce (FSCCL_TAIL=bounded) ends in bounded time, and leaves out data that are late.

    tools/comm/convergence.py --losses 0,1,5 --steps 600 --seeds 1,2 --output FILE

A small causal transformer is trained data-parallel on the bytes of Python's standard library, of
which every tenth file is held out for validation. There is one rank per host. The hosts are network
namespaces of this machine (tests/bed: needs root), connected by links of --rate. Exact all_reduces
run without packet loss, bounded ones with each percentage of --losses dropped at random. Runs of
one seed start with the same weights and read the same text.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "tests"))

SEQUENCE, BATCH, HIDDEN, LAYERS, HEADS = 128, 4, 128, 3, 4
"""Bytes of a sequence, sequences per rank and step, and the model's sizes."""
VALIDATION_BATCHES = 64


# -- a rank ----------------------------------------------------------------------------------------


def read_texts() -> list[Any]:
    """Return the bytes for training and for validation as integer tensors."""
    import torch

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 9) == validation)
             for validation in (False, True)]  # fmt: skip
    return [torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in texts]


def build_model() -> Any:
    """Return a transformer with about 0.7 million weights, in DistributedDataParallel."""
    import torch
    from torch import nn

    class CausalTransformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.byte_embedding = nn.Embedding(256, HIDDEN)
            self.position_embedding = nn.Embedding(SEQUENCE, HIDDEN)
            layer = nn.TransformerEncoderLayer(
                HIDDEN, HEADS, 4 * HIDDEN, 0.0, batch_first=True, norm_first=True
            )
            self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SEQUENCE))

        def forward(self, tokens: Any) -> Any:
            hidden = self.byte_embedding(tokens) + self.position_embedding.weight
            return self.head(self.norm(self.layers(hidden, mask=self.mask, is_causal=True)))

    return torch.nn.parallel.DistributedDataParallel(CausalTransformer())


def rank_main(settings: dict[str, Any]) -> None:
    """Train as one rank, and print the result as a line of JSON."""
    import torch
    import torch.distributed as dist

    import flagscale.comm.fsccl  # noqa: F401 - registers itself

    torch.set_num_threads(1)
    dist.init_process_group("fsccl", rank=settings["rank"], world_size=settings["ranks"])
    torch.manual_seed(settings["seed"])
    model, (training_text, validation_text) = build_model(), read_texts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["rate"], weight_decay=0.01)
    generator = torch.Generator().manual_seed(1000 * settings["seed"] + settings["rank"])

    def loss_on(text: Any, starts: Any) -> Any:
        tokens = torch.stack([text[start : start + SEQUENCE + 1] for start in starts])
        logits = model(tokens[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    losses = []
    for step in range(settings["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = (
                settings["rate"] * min(1.0, (step + 1) / 50) * (1 - step / settings["steps"])
            )
        starts = torch.randint(len(training_text) - SEQUENCE - 1, (BATCH,), generator=generator)
        loss = loss_on(training_text, starts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    validation_generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        last_start = len(validation_text) - SEQUENCE - 1
        shape = (VALIDATION_BATCHES, BATCH)
        starts = torch.randint(last_start, shape, generator=validation_generator)
        validation_loss = statistics.fmean(
            loss_on(validation_text, batch_starts).item() for batch_starts in starts
        )
    parameter_bits = torch.cat([w.detach().flatten() for w in model.parameters()]).view(torch.int32)
    bits_of_ranks = [torch.empty_like(parameter_bits) for _ in range(settings["ranks"])]
    dist.all_gather(bits_of_ranks, parameter_bits)
    world: Any = dist.group.WORLD
    counts = world._get_backend(torch.device("cpu")).tail_statistics()
    result = {"losses": losses, "validation": validation_loss, "counts": counts}
    result["replicas_equal"] = all(torch.equal(bits, parameter_bits) for bits in bits_of_ranks)
    print(json.dumps(result), flush=True)
    dist.destroy_process_group()


# -- all ranks -------------------------------------------------------------------------------------


def train(
    bed: Any, options: argparse.Namespace, seed: int, packet_loss: float | None
) -> dict[str, Any]:
    """Train on all hosts of the test bed, and return the combined result.

    Args:
        bed: hosts with one rank each.
        options: parsed command line.
        seed: seed of the weights and the text.
        packet_loss: percentage of packets to drop, with bounded all_reduces; None: exact
            all_reduces without loss.
    """
    for host in bed.hosts:
        host.heal()
        host.limit_switch_rate(options.rate, "1mb")
        if packet_loss:
            host.drop_percent(packet_loss)
    environment = {**os.environ, "MASTER_ADDR": bed[0].address, "MASTER_PORT": "29500"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    environment |= {"FSCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"FSCCL_TAIL": "exact" if packet_loss is None else "bounded"}
    settings = {"ranks": options.hosts, "seed": seed, "steps": options.steps, "rate": 2e-3}
    ranks = []
    with ExitStack() as stack:
        for number, host in enumerate(bed.hosts):
            enter = ["nsenter", "-t", str(host.pid), "-a", "--", sys.executable, __file__]
            command = [*enter, "--as-rank", json.dumps({**settings, "rank": number})]
            rank = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            stack.callback(rank.wait)
            stack.callback(rank.kill)
            ranks.append(rank)
        results = [json.loads(rank.communicate()[0]) for rank in ranks]
    return combine_results(results, seed, packet_loss)


def combine_results(
    results: list[dict[str, Any]], seed: int, packet_loss: float | None
) -> dict[str, Any]:
    """Combine the ranks' results of a training run: mean losses, and the counts of rank 0."""
    losses_by_step = zip(*(result["losses"] for result in results), strict=True)
    losses = [statistics.fmean(rank_losses) for rank_losses in losses_by_step]
    counts = results[0]["counts"]
    row: dict[str, Any] = {"seed": seed, "sums": "exact" if packet_loss is None else "bounded"}
    row["packets_dropped_percent"] = packet_loss or 0
    row["validation_loss"] = results[0]["validation"]
    row["replicas_equal"] = all(result["replicas_equal"] for result in results)
    if counts:
        row["excluded_percent"] = 100 * counts["excluded"] / max(counts["pieces"], 1)
        row["scaled_percent"] = 100 * counts["scaled"] / max(counts["pieces"], 1)
        row["lost_percent"] = 100 * counts["lost"] / max(counts["packets"], 1)
        row["exact"], row["repeated"] = counts["exact"], counts["repeated"]
    row["loss"] = [
        round(statistics.fmean(losses[i : i + 20]), 4) for i in range(0, len(losses), 20)
    ]
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/comm/convergence.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="rate of each link, in tc's notation")
    parse_losses = lambda text: [float(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument(
        "--losses", type=parse_losses, default="0,1,5", help="percentages of packets to drop"
    )
    parse_seeds = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--seeds", type=parse_seeds, default="1,2")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    parser.add_argument("--as-rank", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.as_rank is not None:
        rank_main(options.as_rank)
        return 0
    from bed.lab import Bed  # type: ignore[import-not-found]

    from flagscale.bench.machine import describe_machine

    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        Bed.open(Path(directory) / "bed", options.hosts) as bed,
    ):
        for seed in options.seeds:
            for loss in (None, *options.losses):
                rows.append(train(bed, options, seed, loss))
                exact_loss = next(r["validation_loss"] for r in rows if r["seed"] == seed)
                difference_percent = 100 * (rows[-1]["validation_loss"] / exact_loss - 1)
                rows[-1]["from_exact_percent"] = round(difference_percent, 3)
                summary = {name: value for name, value in rows[-1].items() if name != "loss"}
                print(json.dumps(summary), flush=True)
                if options.output:
                    result = {
                        **describe_machine("flagscale", "torch"),
                        "rate": options.rate,
                        "runs": rows,
                    }
                    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(math.isfinite(row["validation_loss"]) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
