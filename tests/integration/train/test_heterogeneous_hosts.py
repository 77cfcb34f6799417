"""Training with all arguments different that may differ between hosts (``per_host_allowlist``).

All ranks must end with the same weights as in a run with equal arguments, and must stop together
with a checkpoint. Two ranks of the training program simulate two hosts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flagscale.config import per_host_allowlist
from flagscale.status import read_events

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]

WORKER = Path(__file__).with_name("heterogeneous_worker.py")
ROOT = WORKER.parents[3]

TINY = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64
--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 0.5 --swiglu --disable-bias-linear
--make-vocab-size-divisible-by 16 --normalization RMSNorm --position-embedding-type rope
--qk-layernorm --log-interval 1 --device cpu --lr-decay-style constant --hidden-dropout 0.1
--attention-dropout 0 --eval-iters 1 --eval-interval 2 --train-iters 4 --init-method-std 0.1
--optimizer sgd --split 8,1,1 --untie-embeddings-and-output-weights
--tokenizer-type HuggingFaceTokenizer
"""
# Attention kernels draw dropout differently. Weights are thus equal between ranks but not between
# runs.
DROPOUT = ["--attention-dropout", "0.1", "--optimizer", "adam", "--lr", "1e-2"]
TP2, PP2 = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
TP2 += ["--sequence-parallel"]
EVEN_COUNTS = "--global-batch-size 12 --train-iters 8 --hidden-dropout 0 --optimizer adam --lr 1e-2"
AUTO_COUNTS = (
    f"{EVEN_COUNTS} --enable-hetero --hetero-mode dp --hetero-micro-batch-sizes 2 1 "
    "--hetero-num-microbatches auto --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather"
)

HOST_ARGUMENTS: dict[str, tuple[str, str]] = {
    "attention_backend": ("", "--attention-backend local"),
    "tokenizer_path": ("--tokenizer-path {0}/tokenizer", "--tokenizer-path {0}/elsewhere"),
    "data_cache_path": ("--data-cache-path {0}/cache", "--data-cache-path {0}/mounted"),
    "num_workers": ("--num-workers 0", "--num-workers 2"),
    "manual_gc": ("", "--manual-gc"),
    "manual_gc_interval": ("--manual-gc-interval 100", "--manual-gc-interval 2"),
    "peak_tflops": ("--peak-tflops 1", "--peak-tflops 100"),
    "loss_spike_factor": ("--loss-spike-factor 2", "--loss-spike-factor 0"),
    "straggler_threshold": ("--straggler-threshold 1.05", "--straggler-threshold 1.5"),
    "log_throughput": ("", "--log-throughput"),
    "log_memory_to_tensorboard": ("--log-memory-to-tensorboard", ""),
    "log_learning_rate_to_tensorboard": ("", "--no-log-learning-rate-to-tensorboard"),
    "log_validation_ppl_to_tensorboard": ("--log-validation-ppl-to-tensorboard", ""),
    "tensorboard_queue_size": ("--tensorboard-queue-size 1", "--tensorboard-queue-size 9"),
    "comm": ("--comm socket_ifname=lo", ""),
    "distributed_timeout_minutes": (
        "--distributed-timeout-minutes 2",
        "--distributed-timeout-minutes 3",
    ),
}
"""Command-line arguments of rank 0 and of rank 1 for each argument that may differ."""
REJECTED_ARGUMENTS = {"lr": ("", "--lr 0.4")}
"""Argument that must be equal on all hosts, as a negative control."""


@dataclass(frozen=True)
class TwoHostCase:
    """Run of two ranks.

    Attributes:
        name: name of the case.
        layout: command-line arguments of both ranks.
        differing: names of the arguments of :data:`HOST_ARGUMENTS` that differ on rank 1.
        stop: whether rank 1 receives SIGTERM in step 3.
        slow: whether timings of rank 1 are multiplied by ten.
        directory: name of the case whose directory is used, to resume it; empty for a new one.
    """

    name: str
    layout: list[str] = field(default_factory=list)
    differing: tuple[str, ...] = ()
    stop: bool = False
    slow: bool = False
    directory: str = ""

    def argv(self, rank: int, root: Path) -> list[str]:
        all_arguments = {**HOST_ARGUMENTS, **REJECTED_ARGUMENTS}.items()
        host_values = [
            values[rank if name in self.differing else 0] for name, values in all_arguments
        ]
        run_directory = f"{{0}}/{self.directory or self.name}"
        directory_arguments = (
            f"--save {run_directory}/save --load {run_directory}/save "
            f"--tensorboard-dir {run_directory}/board"
        )
        arguments = " ".join(
            [TINY, "--data-path {0}/text_text_document", directory_arguments, *host_values]
        )
        stop_arguments = ["--train-iters", "100000", "--eval-iters", "0"] if self.stop else []
        return [*arguments.format(root).split(), *self.layout, *stop_arguments]


ALL_ARGUMENTS = tuple(HOST_ARGUMENTS)
WITH_EQUAL_KERNEL = tuple(name for name in HOST_ARGUMENTS if name != "attention_backend")
LAYOUTS = {"dp2": [], "tp2": TP2, "pp2": PP2}
CASES = (
    *(TwoHostCase(name, layout) for name, layout in LAYOUTS.items()),
    *(TwoHostCase(f"{name}-different", layout, ALL_ARGUMENTS) for name, layout in LAYOUTS.items()),
    TwoHostCase("dp2-different-equal-kernel", differing=WITH_EQUAL_KERNEL),
    TwoHostCase("dp2-different-lr", differing=tuple(REJECTED_ARGUMENTS)),
    TwoHostCase("tp2-dropout", [*TP2, *DROPOUT], ALL_ARGUMENTS),
    TwoHostCase("stopped", DROPOUT, ALL_ARGUMENTS, stop=True),
    TwoHostCase("even-counts", EVEN_COUNTS.split()),
    TwoHostCase("auto-counts", [*AUTO_COUNTS.split(), "--exit-interval", "6"], slow=True),
    TwoHostCase("auto-counts-resumed", AUTO_COUNTS.split(), directory="auto-counts"),
)


@dataclass(frozen=True)
class Results:
    """Results of all cases, in a directory per case and rank below ``root``."""

    root: Path
    output: str
    errors: str

    def weights(self, name: str, rank: int) -> dict[str, Any]:
        """Return the weights by name, after checking that the rank succeeded."""
        rank_directory = self.root / name / str(rank)
        assert (rank_directory / "exit_code").read_text() == "0", self.errors[-4000:]
        with np.load(rank_directory / "weights.npz") as arrays:
            return dict(arrays)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Train all cases once for all tests."""
    root = tmp_path_factory.mktemp("heterogeneous")
    create_data(root)
    cases = []
    for case in CASES:
        (root / case.name).mkdir()
        argv = [case.argv(rank, root) for rank in (0, 1)]
        directory = str(root / case.name)
        cases.append({"directory": directory, "argv": argv, "stop": case.stop, "slow": case.slow})
    (root / "cases.json").write_text(json.dumps(cases))
    python_path = f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}"
    process = subprocess.run(
        [sys.executable, str(WORKER), str(root / "cases.json")],
        env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return Results(root, process.stdout, process.stderr)


def create_data(root: Path) -> None:
    """Create a dataset, two copies of its tokenizer, and a cache with two names."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from flagscale.train.data.preprocess import PreprocessJob, preprocess
    from flagscale.train.data.tokenizers import TokenizerSpec

    words = ["</s>", *(f"w{number}" for number in range(40))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name in ("tokenizer", "elsewhere"):
        (root / name).mkdir()
        tokenizer.save(str(root / name / "tokenizer.json"))
    texts = [" ".join(words[1 + (7 * i + j * j) % 40] for j in range(30)) for i in range(80)]
    source = root / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spec = TokenizerSpec("HuggingFaceTokenizer", str(root / "tokenizer"))
    preprocess(PreprocessJob((source,), str(root / "text"), spec, append_eod=True))
    (root / "cache").mkdir()
    (root / "mounted").symlink_to(root / "cache")


def test_all_arguments_of_the_allowlist_are_covered() -> None:
    assert set(HOST_ARGUMENTS) == set(per_host_allowlist.ARGUMENTS)
    assert all(first != second for first, second in HOST_ARGUMENTS.values())


@pytest.mark.parametrize("name", ["dp2", "dp2-different", "dp2-different-equal-kernel", "stopped"])
def test_data_parallel_ranks_end_with_equal_weights(name: str, results: Results) -> None:
    first, second = (results.weights(name, rank) for rank in (0, 1))
    assert first
    assert first.keys() == second.keys()
    assert [key for key in first if not np.array_equal(first[key], second[key])] == []


@pytest.mark.parametrize("name", ["tp2", "tp2-different", "tp2-dropout"])
def test_tensor_parallel_ranks_end_with_equal_replicated_weights(
    name: str, results: Results
) -> None:
    """Replicated weights are those that are not split, such as norms."""
    first, second = (results.weights(name, rank) for rank in (0, 1))
    replicated = [key for key in first if not key.startswith("shard:")]
    assert 0 < len(replicated) < len(first)
    assert [key for key in replicated if not np.array_equal(first[key], second[key])] == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_equal_those_of_a_run_with_equal_arguments(
    name: str, rank: int, results: Results
) -> None:
    """Equal up to the rounding of another kernel, about 1e-7 of a weight of 0.1 in fp32.

    With SGD, because Adam would take a full step for a gradient that is only rounding noise.
    """
    equal, different = (results.weights(f"{name}{suffix}", rank) for suffix in ("", "-different"))
    for key in equal:
        np.testing.assert_allclose(different[key], equal[key], rtol=0, atol=1e-6, err_msg=key)


def test_weights_are_bitwise_equal_with_the_same_attention_kernel(results: Results) -> None:
    equal, different = (results.weights(name, 0) for name in ("dp2", "dp2-different-equal-kernel"))
    assert [key for key in equal if not np.array_equal(equal[key], different[key])] == []


def test_difference_in_another_argument_changes_all_weights(results: Results) -> None:
    assert not REJECTED_ARGUMENTS.keys() & per_host_allowlist.ARGUMENTS.keys()
    first, second = (results.weights("dp2-different-lr", rank) for rank in (0, 1))
    assert [key for key in first if np.array_equal(first[key], second[key])] == []


def test_stop_saves_a_checkpoint_on_heterogeneous_hosts(results: Results) -> None:
    events = [
        read_events(results.root / "stopped" / "status" / f"rank_{rank}.jsonl")[0]
        for rank in (0, 1)
    ]
    finished_events = [
        event for rank_events in events for event in rank_events if event.event == "finished"
    ]
    assert [event.get("reason") for event in finished_events] == ["signal", "signal"]
    assert finished_events[0].get("step") == finished_events[1].get("step") >= 3
    (checkpoint,) = (event for event in events[0] if event.event == "checkpoint")
    assert checkpoint.get("step") == finished_events[0].get("step")
    assert Path(checkpoint.get("path")).is_dir()


def test_micro_batch_counts_are_measured_and_saved_in_checkpoints(results: Results) -> None:
    """Rank 1, whose timings are multiplied by ten, gets fewer of 12 sequences after step 4.

    The resumed run keeps the counts. All losses equal those of a run with even counts.
    """
    losses = [
        [event.get("loss") for event in read_events(path)[0] if event.event == "progress"]
        for name in ("even-counts", "auto-counts", "auto-counts-resumed")
        for path in [results.root / name / "status" / "rank_0.jsonl"]
    ]
    assert [len(run_losses) for run_losses in losses] == [8, 6, 2]
    assert [*losses[1], *losses[2]] == pytest.approx(losses[0], abs=1e-5)
    lines = [line for line in results.output.splitlines() if line.startswith("micro-batch counts")]
    assert [line.partition(":")[0] for line in lines] == [
        "micro-batch counts are set by measured times",
        "micro-batch counts are taken from the checkpoint",
    ]
    counts = [re.findall(r"replica \(cpu\): ([0-9]+) micro-batch", line) for line in lines]
    assert counts[0] == counts[1]
    assert sum(map(int, counts[0])) == 12
    assert int(counts[0][1]) < 6
