#!/usr/bin/env python3
r"""Compare ways to reduce gradients by training under calibrated traffic on hosts with slow links.

    tools/comm/training_bed.py --rate 250mbit --queue 128kb --tails 1.5,3 --output FILE -- \\
        --models gpt2,bert --arms ring,tree,transpose --steps 300 --report page.html

The hosts are network namespaces of this machine (tests/bed: needs root), with two networks. On the
first one each host is behind a token bucket with a queue of --queue bytes. `flagscale bench
traffic` calibrates its bursts there to each tail, the p99/p50 of its probe. `flagscale bench
training` trains under the traffic of each tail on the first network, and, as a control, under the
last one's traffic on the second network. Arguments after `--` are those of training.

With a queue that drops many packets no traffic has a tail of 3. --calibrate-queue sets another
queue for the calibration.
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


def run_on_bed(options: argparse.Namespace, training_arguments: Sequence[str]) -> int:
    """Calibrate each tail, then train, and return training's exit code."""
    from bed.lab import Bed  # type: ignore[import-not-found]

    with (
        tempfile.TemporaryDirectory() as directory,
        Bed.open(Path(directory) / "bed", options.hosts, fabric=True) as bed,
    ):

        def bottleneck(queue: str) -> None:
            for host in bed.hosts:
                host.limit_switch_rate(options.rate, queue)

        bottleneck(options.calibrate_queue or options.queue)
        environment = {**os.environ, **bed.environment(PYTHONPATH=str(PROJECT))}

        def run(*words: str) -> int:
            arguments = [sys.executable, "-m", "flagscale.cli", "bench", *words]
            return subprocess.run(arguments, env=environment, check=False).returncode

        environment_files = [str(path.absolute()) for path in options.replay]
        for tail in options.tails if not environment_files else ():
            path = Path(directory) / f"{tail:g}.json"
            arguments = ["--hosts", *bed.names, "--rate", options.rate, "--tail", f"{tail:g}"]
            arguments += ["--within", f"{options.within:g}", "--seconds", "1", "--plain"]
            if run("traffic", *arguments, "--environment", str(path)):
                print(f"note: a tail of {tail:g} was not reached", file=sys.stderr)
            if path.is_file():
                environment_files.append(str(path))
        bottleneck(options.queue)
        arguments = ["-r", str(options.hosts), "--hosts", *bed.names, "--device", "cpu"]
        arguments += ["--env", "GLOO_SOCKET_IFNAME=eth0", "--env", "FSCCL_SOCKET_IFNAME=eth0"]
        if environment_files:
            control_addresses = [f"{host.name}={host.fabric_address}" for host in bed.hosts]
            arguments += ["--environment", *environment_files, "--apart", *control_addresses]
        if options.output:
            arguments += ["--json", str(options.output.absolute())]
        return run("training", *arguments, *training_arguments)


def main(argv: Sequence[str] | None = None) -> int:
    command_line = list(sys.argv[1:] if argv is None else argv)
    separator = command_line.index("--") if "--" in command_line else len(command_line)
    parser = argparse.ArgumentParser(prog="tools/comm/training_bed.py")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="250mbit", help="rate of each link, in tc's notation")
    parser.add_argument(
        "--queue", default="1mb", help="size of the queue before each host, in tc's notation"
    )
    parser.add_argument("--calibrate-queue", help="queue during the calibration (--queue)")
    parser.add_argument(
        "--replay", type=Path, nargs="+", default=[], help="files of calibrated traffic"
    )
    parser.add_argument("--within", type=float, default=300.0, help="seconds to calibrate a tail")
    parse_tails = lambda text: [float(word) for word in text.split(",") if word]  # noqa: E731
    parser.add_argument("--tails", type=parse_tails, default="1.5,3")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    return run_on_bed(parser.parse_args(command_line[:separator]), command_line[separator + 1 :])


if __name__ == "__main__":
    sys.exit(main())
