"""Programs that tests on GPUs start: training of a small model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from flagscale.free_port import free_port
from flagscale.status import STATUS_DIR_VARIABLE, Event, read_events

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "flagscale" / "train" / "train_gpt.py"
MODEL = """
--num-layers 4 --hidden-size 256 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 688
--seq-length 256 --micro-batch-size 1 --global-batch-size 8 --train-iters 20 --lr 1e-3
--vocab-size 1000 --make-vocab-size-divisible-by 64 --mock-data --normalization RMSNorm --swiglu
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --eval-iters 1 --num-workers 0 --lr-decay-style constant
"""
TIMEOUT_SECONDS = 100
"""Timeout of a run, including compilation."""


def make_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a training process, with these variables changed."""
    project_paths = [str(ROOT), str(ROOT / "third_party" / "Megatron-LM")]
    path = os.pathsep.join([*project_paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "NCCL_NVLS_ENABLE": "0", **changes}


def train_ranks(
    directory: Path, kinds: tuple[str, ...], arguments: str, **variables: str
) -> list[Event]:
    """Train with one rank per entry of ``kinds`` and return the progress events of all ranks.

    ``kinds`` are device kinds such as ``cuda``, ``arguments`` those of train_gpt.py, and
    ``variables`` further environment variables. The backend is fsccl unless ``arguments`` name one.
    """
    directory.mkdir()
    port = free_port()
    ranks = []
    for rank, kind in enumerate(kinds):
        rank_environment = make_environment(
            RANK=str(rank), LOCAL_RANK=str(kinds[:rank].count(kind)), WORLD_SIZE=str(len(kinds)),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), FLAGSCALE_DEVICE=kind,
            OMP_NUM_THREADS="4", PYTHONFAULTHANDLER="1",
            **{STATUS_DIR_VARIABLE: str(directory / "status")}, **variables,
        )  # fmt: skip
        output = directory / f"output.{rank}"
        with output.open("wb") as out:
            command = [sys.executable, str(PROGRAM), *arguments.split()]
            if len(kinds) > 1 and "--distributed-backend" not in command:
                command += ["--distributed-backend", "fsccl"]
            process = subprocess.Popen(
                command,
                env=rank_environment,
                cwd=directory,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        ranks.append((process, output))
    try:
        exit_codes = [process.wait(TIMEOUT_SECONDS) for process, _ in ranks]
    except subprocess.TimeoutExpired:
        for process, _ in ranks:
            process.send_signal(signal.SIGABRT)  # each prints its stacks
        exit_codes = [process.wait(10) for process, _ in ranks]
    finally:
        for process, _ in ranks:
            if process.poll() is None:
                process.kill()
    logs = "\n".join(output.read_text(errors="replace")[-3000:] for _, output in ranks)
    assert not any(exit_codes), logs
    progress_events: list[Event] = []
    for rank in range(len(kinds)):
        events, _file_position = read_events(directory / "status" / f"rank_{rank}.jsonl")
        progress_events += [event for event in events if event.event == "progress"]
    return progress_events
