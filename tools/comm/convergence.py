#!/usr/bin/env python3
"""Compare the convergence of a model trained by bounded all_reduces under packet loss with exact
ones.

    tools/comm/convergence.py --losses 0,1,5 --steps 600 --seeds 1,2 --output FILE

A small causal transformer on the bytes of real text (Python's standard library, with every tenth
file held out) is trained data-parallel over hosts that are namespaces of this machine
(tests/bed: needs root), one rank per host, behind cables of --rate. Exact all_reduces run
without loss, bounded ones with each share of all packets dropped at random. Runs of one seed
start with the same weights and read the same text.
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

LENGTH, BATCH, WIDTH, LAYERS, HEADS = 128, 4, 128, 3, 4
"""Bytes of a sequence, sequences of a rank's step, and the model's sizes."""
HELD_OUT = 64
"""Batches of the validation."""


# -- a rank ----------------------------------------------------------------------------------------


def texts() -> list[Any]:
    """Return the training and the held-out bytes as integer tensors."""
    import torch

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    parts = [b"".join(f.read_bytes() for i, f in enumerate(files) if (i % 10 == 9) == held)
             for held in (False, True)]  # fmt: skip
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts]


def model() -> Any:
    """Return a transformer with about 0.7 million weights."""
    import torch
    from torch import nn

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
            layer = nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True
            )
            self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

        def forward(self, found: Any) -> Any:
            hidden = self.words(found) + self.places.weight
            return self.head(self.norm(self.layers(hidden, mask=self.mask, is_causal=True)))

    return torch.nn.parallel.DistributedDataParallel(Causal())


def rank_main(order: dict[str, Any]) -> None:
    """Train, and print the result as a line of JSON."""
    import torch
    import torch.distributed as dist

    import flagscale.comm.fsccl  # noqa: F401 - registers itself

    torch.set_num_threads(1)
    dist.init_process_group("fsccl", rank=order["rank"], world_size=order["ranks"])
    torch.manual_seed(order["seed"])
    learner, (train, held) = model(), texts()
    optimizer = torch.optim.AdamW(learner.parameters(), lr=order["rate"], weight_decay=0.01)
    draw = torch.Generator().manual_seed(1000 * order["seed"] + order["rank"])

    def loss_on(text: Any, starts: Any) -> Any:
        found = torch.stack([text[at : at + LENGTH + 1] for at in starts])
        logits = learner(found[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), found[:, 1:].flatten())

    losses = []
    for step in range(order["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = order["rate"] * min(1.0, (step + 1) / 50) * (1 - step / order["steps"])
        loss = loss_on(train, torch.randint(len(train) - LENGTH - 1, (BATCH,), generator=draw))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    same = torch.Generator().manual_seed(0)
    with torch.no_grad():
        starts = torch.randint(len(held) - LENGTH - 1, (HELD_OUT, BATCH), generator=same)
        validation = statistics.fmean(loss_on(held, row).item() for row in starts)
    bits = torch.cat([w.detach().flatten() for w in learner.parameters()]).view(torch.int32)
    alike = [torch.empty_like(bits) for _ in range(order["ranks"])]
    dist.all_gather(alike, bits)
    world: Any = dist.group.WORLD
    counts = world._get_backend(torch.device("cpu")).tail_statistics()
    out = {"losses": losses, "validation": validation, "counts": counts}
    out["replicas_equal"] = all(torch.equal(one, bits) for one in alike)
    print(json.dumps(out), flush=True)
    dist.destroy_process_group()


# -- all of them -----------------------------------------------------------------------------------


def run(bed: Any, options: argparse.Namespace, seed: int, loss: float | None) -> dict[str, Any]:
    """Train with exact all_reduces (``loss`` None) or bounded ones, and return all ranks'
    results.
    """
    for host in bed.hosts:
        host.heal()
        host.bottleneck(options.rate, "1mb")
        if loss:
            host.lose(loss)
    environment = {**os.environ, "MASTER_ADDR": bed[0].address, "MASTER_PORT": "29500"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    environment |= {"FSCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    environment |= {"FSCCL_TAIL": "exact" if loss is None else "bounded"}
    order = {"ranks": options.hosts, "seed": seed, "steps": options.steps, "rate": 2e-3}
    ranks = []
    with ExitStack() as stack:
        for number, host in enumerate(bed.hosts):
            enter = ["nsenter", "-t", str(host.pid), "-a", "--", sys.executable, __file__]
            line = [*enter, "--as-rank", json.dumps({**order, "rank": number})]
            rank = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True)
            stack.callback(rank.wait)
            stack.callback(rank.kill)
            ranks.append(rank)
        found = [json.loads(rank.communicate()[0]) for rank in ranks]
    return summary(found, seed, loss)


def summary(found: list[dict[str, Any]], seed: int, loss: float | None) -> dict[str, Any]:
    """Return what all ranks of a training have in common, and the means of what differs."""
    each = [statistics.fmean(step) for step in zip(*(one["losses"] for one in found), strict=True)]
    counts = found[0]["counts"]
    row: dict[str, Any] = {"seed": seed, "sums": "exact" if loss is None else "bounded"}
    row["packets_dropped_percent"] = loss or 0
    row["validation_loss"] = found[0]["validation"]
    row["replicas_equal"] = all(one["replicas_equal"] for one in found)
    if counts:
        row["excluded_percent"] = 100 * counts["excluded"] / max(counts["pieces"], 1)
        row["scaled_percent"] = 100 * counts["scaled"] / max(counts["pieces"], 1)
        row["lost_percent"] = 100 * counts["lost"] / max(counts["packets"], 1)
        row["exact"], row["repeated"] = counts["exact"], counts["repeated"]
    row["loss"] = [round(statistics.fmean(each[i : i + 20]), 4) for i in range(0, len(each), 20)]
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/comm/convergence.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="of each cable, as tc spells it")
    losses = lambda text: [float(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--losses", type=losses, default="0,1,5", help="percent of packets")
    seeds = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--seeds", type=seeds, default="1,2")
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
                rows.append(run(bed, options, seed, loss))
                exact = next(r["validation_loss"] for r in rows if r["seed"] == seed)
                away = 100 * (rows[-1]["validation_loss"] / exact - 1)
                rows[-1]["from_exact_percent"] = round(away, 3)
                shown = {name: value for name, value in rows[-1].items() if name != "loss"}
                print(json.dumps(shown), flush=True)
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
