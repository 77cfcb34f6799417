"""Training of one model by a GPU and CPU ranks, compared with training by the GPU alone.

Needs the adapted megatron.core first in PYTHONPATH: the published one trains on CUDA only.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from support.gpu_programs import MODEL, train_ranks

ADAPTED = importlib.util.find_spec("megatron.core.device") is not None

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not ADAPTED, reason="needs the adapted megatron.core"),
]

STEPS = 8
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
"""Device of each rank and arguments, by name. Cases without a backend in their arguments use fsccl.
"""


def train_steps(
    directory: Path, kinds: tuple[str, ...], arguments: str
) -> list[tuple[float, float]]:
    """Train with one rank per entry of ``kinds``; return loss and gradient norm of each step."""
    # Only the last rank of a pipeline has the loss.
    events = [e for e in train_ranks(directory, kinds, arguments) if e.get("loss") is not None]
    by_step = {event.get("step"): (event.get("loss"), event.get("grad_norm")) for event in events}
    return [by_step[step] for step in range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """Train on the GPU alone, from the weights that heterogeneous devices start from."""
    directory = tmp_path_factory.mktemp("alone") / "run"
    return train_steps(directory, ("cuda",), f"{WHOLE} --use-cpu-initialization")


@pytest.mark.parametrize("name", CASES)
def test_mixed_training_matches_gpu(
    name: str, tmp_path: Path, alone: list[tuple[float, float]]
) -> None:
    kinds, arguments = CASES[name]
    if kinds.count("cuda") > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    steps = train_steps(tmp_path / name, kinds, arguments)
    for step, (mixed, whole) in enumerate(zip(steps, alone, strict=True), start=1):
        assert mixed == pytest.approx(whole, rel=2e-4), step
