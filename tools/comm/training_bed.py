#!/usr/bin/env python3
r"""Train under calibrated tails on hosts with slow cables, and compare the arms.

    tools/comm/training_bed.py --rate 250mbit --queue 128kb --tails 1.5,3 --output FILE -- \\
        --models gpt2,bert --arms ring,tree,transpose --steps 300 --report page.html

The hosts are namespaces of this machine (tests/bed: needs root), with a second network that is
not measured. A token bucket with a queue of --queue bytes stands before each on the first
network. `flagscale bench traffic` calibrates each tail there, and `flagscale bench training`
trains under all of them, and under the last one's traffic on the second network. Arguments after
`--` are those of training. With a queue that drops many packets no traffic has a tail of 3:
--calibrate-queue sets another queue for the calibration.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT / "tests"))


def on_bed(options: argparse.Namespace, more: Sequence[str]) -> int:
    """Calibrate each tail, then train, and return training's exit code."""
    from bed.lab import Bed  # type: ignore[import-not-found]

    with (
        tempfile.TemporaryDirectory() as directory,
        Bed.open(Path(directory) / "bed", options.hosts, fabric=True) as bed,
    ):

        def bottleneck(queue: str) -> None:
            for host in bed.hosts:
                host.bottleneck(options.rate, queue)

        bottleneck(options.calibrate_queue or options.queue)
        environment = {**os.environ, **bed.environment(PYTHONPATH=str(PROJECT))}

        def run(*words: str) -> int:
            line = [sys.executable, "-m", "flagscale.cli", "bench", *words]
            return subprocess.run(line, env=environment, check=False).returncode

        kept = [str(path.absolute()) for path in options.replay]
        for tail in options.tails if not kept else ():
            path = Path(directory) / f"{tail:g}.json"
            line = ["--hosts", *bed.names, "--rate", options.rate, "--tail", f"{tail:g}"]
            line += ["--within", f"{options.within:g}", "--seconds", "1", "--plain"]
            if run("traffic", *line, "--environment", str(path)):
                print(f"note: a tail of {tail:g} was not reached", file=sys.stderr)
            if path.is_file():
                kept.append(str(path))
        bottleneck(options.queue)
        line = ["-r", str(options.hosts), "--hosts", *bed.names, "--device", "cpu"]
        line += ["--env", "GLOO_SOCKET_IFNAME=eth0", "--env", "FSCCL_SOCKET_IFNAME=eth0"]
        if kept:
            apart = [f"{host.name}={host.fabric_address}" for host in bed.hosts]
            line += ["--environment", *kept, "--apart", *apart]
        if options.output:
            line += ["--json", str(options.output.absolute())]
        return run("training", *line, *more)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    place = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="tools/comm/training_bed.py")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="250mbit", help="of each cable, as tc spells it")
    parser.add_argument("--queue", default="1mb", help="before each host, as tc spells it")
    parser.add_argument("--calibrate-queue", help="while tails are found (--queue)")
    parser.add_argument("--replay", type=Path, nargs="+", default=[], help="kept traffic")
    parser.add_argument("--within", type=float, default=300.0, help="seconds to calibrate a tail")
    tails = lambda text: [float(word) for word in text.split(",") if word]  # noqa: E731
    parser.add_argument("--tails", type=tails, default="1.5,3")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    return on_bed(parser.parse_args(words[:place]), words[place + 1 :])


if __name__ == "__main__":
    sys.exit(main())
