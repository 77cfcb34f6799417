"""A GPU and CPU ranks train one model together, and learn what the GPU alone learns.

Needs the adapted megatron.core first in PYTHONPATH: the published one trains on CUDA only.
"""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_programs import MODEL, PROGRAM, environment

from flagscale.status import STATUS_DIR_VARIABLE, read_events

ADAPTED = importlib.util.find_spec("megatron.core.device") is not None

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not ADAPTED, reason="needs the adapted megatron.core"),
]

STEPS = 8
LIMIT = 100
"""Seconds, compiling included."""
WHOLE = f"{MODEL} --micro-batch-size 2 --train-iters {STEPS} --log-interval 1"
MESHES = f"{WHOLE} --enable-hetero --hetero-pipeline-layer-split 3 1 --hetero-process-meshes"
NCCL = "--distributed-backend nccl --use-cpu-initialization"
REPLICAS = f"{WHOLE} --enable-hetero --hetero-mode dp --hetero-micro-batch-sizes"

CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "meshes": (("cuda", "cpu", "cpu"), f"{MESHES} 1 1 1 1 1 1 1 1 2 1"),
    "meshes-through-hosts": (
        ("cuda", "cpu", "cpu"),
        f"{MESHES} 1 1 1 1 1 1 1 1 2 1 --hetero-use-cpu-communication",
    ),
    "meshes-distributed-optimizer": (
        ("cuda", "cpu"),
        f"{MESHES} 1 1 1 1 1 1 1 1 1 1 --use-distributed-optimizer",
    ),
    "meshes-over-nccl": (
        ("cuda", "cuda"),
        f"{MESHES} 1 1 1 1 1 1 1 1 1 1 {NCCL} --use-distributed-optimizer",
    ),
    "meshes-of-gpus-through-hosts": (
        ("cuda", "cuda"),
        f"{MESHES} 1 1 1 1 1 1 1 1 1 1 {NCCL} --hetero-use-cpu-communication",
    ),
    "meshes-of-two-gpus-and-a-cpu": (("cuda", "cuda", "cpu"), f"{MESHES} 2 1 1 1 1 1 1 1 1 1"),
    "replicas-over-nccl": (
        ("cuda", "cuda"),
        f"{REPLICAS} 1 2 1 1 --hetero-num-microbatches 1 3 1 2 {NCCL}",
    ),
    "replicas": (("cuda", "cpu"), f"{REPLICAS} 1 2 1 1 --hetero-num-microbatches 1 3 1 2"),
    "replicas-distributed-optimizer": (
        ("cuda", "cpu"),
        f"{REPLICAS} 1 2 1 1 --hetero-num-microbatches 1 3 1 2 --use-distributed-optimizer",
    ),
}
"""By name, the device of each rank and arguments. Where these name no backend, it is fsccl."""


def train(directory: Path, kinds: tuple[str, ...], arguments: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, trained by a rank on each of ``kinds``."""
    directory.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank, kind in enumerate(kinds):
        given = environment(
            RANK=str(rank), LOCAL_RANK=str(kinds[:rank].count(kind)), WORLD_SIZE=str(len(kinds)),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), FLAGSCALE_DEVICE=kind,
            OMP_NUM_THREADS="4", PYTHONFAULTHANDLER="1",
            **{STATUS_DIR_VARIABLE: str(directory / "status")},
        )  # fmt: skip
        output = directory / f"output.{rank}"
        with output.open("wb") as out:
            command = [sys.executable, str(PROGRAM), *arguments.split()]
            if len(kinds) > 1 and "--distributed-backend" not in command:
                command += ["--distributed-backend", "fsccl"]
            process = subprocess.Popen(
                command, env=given, cwd=directory, stdout=out, stderr=out, start_new_session=True
            )
        ranks.append((process, output))
    try:
        codes = [process.wait(LIMIT) for process, _ in ranks]
    except subprocess.TimeoutExpired:
        for process, _ in ranks:
            process.send_signal(signal.SIGABRT)  # each says where it is
        codes = [process.wait(10) for process, _ in ranks]
    finally:
        for process, _ in ranks:
            if process.poll() is None:
                process.kill()
    said = "\n".join(output.read_text(errors="replace")[-3000:] for _, output in ranks)
    assert not any(codes), said
    # A pipeline's last rank is the one that knows the loss.
    events = [
        event
        for rank in range(len(kinds))
        for event in read_events(directory / "status" / f"rank_{rank}.jsonl")[0]
        if event.event == "progress" and event.get("loss") is not None
    ]
    found = {event.get("step"): (event.get("loss"), event.get("grad_norm")) for event in events}
    return [found[step] for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """The GPU's own steps, from the weights that unlike devices start from."""
    directory = tmp_path_factory.mktemp("alone") / "run"
    return train(directory, ("cuda",), f"{WHOLE} --use-cpu-initialization")


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_and_cpus_learn_what_the_gpu_learns(
    name: str, tmp_path: Path, alone: list[tuple[float, float]]
) -> None:
    kinds, arguments = CASES[name]
    if kinds.count("cuda") > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    found = train(tmp_path / name, kinds, arguments)
    for step, (mixed, whole) in enumerate(zip(found, alone, strict=True), start=1):
        assert mixed == pytest.approx(whole, rel=2e-4), step
