"""Arguments that may differ between hosts, all of them unlike at once: the ranks end with equal
weights, those of a run with like arguments, and stop together with a checkpoint.

Two ranks of the training program stand for two hosts.
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

WORKER = Path(__file__).with_name("unlike_worker.py")
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
# Kernels draw dropout each in their own way: weights are equal between ranks, not between runs.
DROPOUT = ["--attention-dropout", "0.1", "--optimizer", "adam", "--lr", "1e-2"]
TP2, PP2 = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
TP2 += ["--sequence-parallel"]
EVEN = "--global-batch-size 12 --train-iters 8 --hidden-dropout 0 --optimizer adam --lr 1e-2"
AUTO = (
    f"{EVEN} --enable-hetero --hetero-mode dp --hetero-micro-batch-sizes 2 1 "
    "--hetero-num-microbatches auto --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather"
)

UNLIKE: dict[str, tuple[str, str]] = {
    "attention_backend": ("", "--attention-backend local"),
    "tokenizer_path": ("--tokenizer-path {0}/tokenizer", "--tokenizer-path {0}/elsewhere"),
    "data_cache_path": ("--data-cache-path {0}/cache", "--data-cache-path {0}/mounted"),
    "num_workers": ("--num-workers 0", "--num-workers 2"),
    "manual_gc": ("", "--manual-gc"),
    "manual_gc_interval": ("--manual-gc-interval 100", "--manual-gc-interval 2"),
    "peak_tflops": ("--peak-tflops 1", "--peak-tflops 100"),
    "loss_spike_factor": ("--loss-spike-factor 2", "--loss-spike-factor 0"),
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
"""What each of two hosts is given."""
REFUSED = {"lr": ("", "--lr 0.4")}
"""What no host may be given for itself, to see that it shows."""


@dataclass(frozen=True)
class Case:
    """A run of two ranks. ``own`` are the arguments in which rank 1 differs."""

    name: str
    layout: list[str] = field(default_factory=list)
    own: tuple[str, ...] = ()
    stop: bool = False
    slow: bool = False
    directory: str = ""

    def argv(self, rank: int, root: Path) -> list[str]:
        every = {**UNLIKE, **REFUSED}.items()
        own = [values[rank if name in self.own else 0] for name, values in every]
        place = f"{{0}}/{self.directory or self.name}"
        directory = f"--save {place}/save --load {place}/save --tensorboard-dir {place}/board"
        words = " ".join([TINY, "--data-path {0}/text_text_document", directory, *own])
        stop = ["--train-iters", "100000", "--eval-iters", "0"] if self.stop else []
        return [*words.format(root).split(), *self.layout, *stop]


EVERY = tuple(UNLIKE)
NO_KERNEL = tuple(name for name in UNLIKE if name != "attention_backend")
LAYOUTS = {"dp2": [], "tp2": TP2, "pp2": PP2}
CASES = (
    *(Case(name, layout) for name, layout in LAYOUTS.items()),
    *(Case(f"{name}-unlike", layout, EVERY) for name, layout in LAYOUTS.items()),
    Case("dp2-one-kernel", own=NO_KERNEL),
    Case("dp2-corrupt", own=tuple(REFUSED)),
    Case("tp2-dropout", [*TP2, *DROPOUT], EVERY),
    Case("stopped", DROPOUT, EVERY, stop=True),
    Case("even", EVEN.split()),
    Case("shared", [*AUTO.split(), "--exit-interval", "6"], slow=True),
    Case("shared-on", AUTO.split(), directory="shared"),
)


@dataclass(frozen=True)
class Results:
    root: Path
    output: str
    errors: str

    def weights(self, name: str, rank: int) -> dict[str, Any]:
        """By name; whether the rank ended well is looked at first."""
        own = self.root / name / str(rank)
        assert (own / "code").read_text() == "0", self.errors[-4000:]
        with np.load(own / "weights.npz") as found:
            return dict(found)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All cases, trained once for all tests."""
    root = tmp_path_factory.mktemp("unlike")
    make_data(root)
    cases = []
    for case in CASES:
        (root / case.name).mkdir()
        argv = [case.argv(rank, root) for rank in (0, 1)]
        kind = {"stop": case.stop, "slow": case.slow}
        cases.append({"directory": str(root / case.name), "argv": argv, **kind})
    (root / "cases.json").write_text(json.dumps(cases))
    path = f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}"
    done = subprocess.run(
        [sys.executable, str(WORKER), str(root / "cases.json")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return Results(root, done.stdout, done.stderr)


def make_data(root: Path) -> None:
    """A data set; its tokenizer at two places; a cache that has two names."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from flagscale.train.data.preprocess import Job, run
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
    run(Job((source,), str(root / "text"), spec, append_eod=True))
    (root / "cache").mkdir()
    (root / "mounted").symlink_to(root / "cache")


def test_every_argument_that_may_differ_is_trained_unlike() -> None:
    assert set(UNLIKE) == set(per_host_allowlist.ARGUMENTS)
    assert all(first != second for first, second in UNLIKE.values())


@pytest.mark.parametrize("name", ["dp2", "dp2-unlike", "dp2-one-kernel", "stopped"])
def test_data_parallel_ranks_end_with_equal_weights(name: str, results: Results) -> None:
    first, second = (results.weights(name, rank) for rank in (0, 1))
    assert first
    assert first.keys() == second.keys()
    assert [key for key in first if not np.array_equal(first[key], second[key])] == []


@pytest.mark.parametrize("name", ["tp2", "tp2-unlike", "tp2-dropout"])
def test_tensor_parallel_ranks_end_with_equal_copies(name: str, results: Results) -> None:
    """Weights that are not split: of the norms."""
    first, second = (results.weights(name, rank) for rank in (0, 1))
    copies = [key for key in first if not key.startswith("shard:")]
    assert 0 < len(copies) < len(first)
    assert [key for key in copies if not np.array_equal(first[key], second[key])] == []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_unlike_arguments_train_what_like_ones_do(name: str, rank: int, results: Results) -> None:
    """Up to how another kernel rounds, about 1e-7 of a weight of 0.1 in fp32. With SGD: Adam would
    make a full step of a gradient that is nothing but rounding."""
    like, unlike = (results.weights(f"{name}{kind}", rank) for kind in ("", "-unlike"))
    for key in like:
        np.testing.assert_allclose(unlike[key], like[key], rtol=0, atol=1e-6, err_msg=key)


def test_without_another_kernel_every_bit_is_equal(results: Results) -> None:
    like, unlike = (results.weights(name, 0) for name in ("dp2", "dp2-one-kernel"))
    assert [key for key in like if not np.array_equal(like[key], unlike[key])] == []


def test_an_argument_that_is_not_on_the_list_shows(results: Results) -> None:
    assert not REFUSED.keys() & per_host_allowlist.ARGUMENTS.keys()
    first, second = (results.weights("dp2-corrupt", rank) for rank in (0, 1))
    assert [key for key in first if np.array_equal(first[key], second[key])] == []


def test_a_stop_saves_a_checkpoint_on_unlike_hosts(results: Results) -> None:
    events = [
        read_events(results.root / "stopped" / "status" / f"rank_{rank}.jsonl")[0]
        for rank in (0, 1)
    ]
    ends = [event for found in events for event in found if event.event == "finished"]
    assert [event.get("reason") for event in ends] == ["signal", "signal"]
    assert ends[0].get("step") == ends[1].get("step") >= 3
    (saved,) = (event for event in events[0] if event.event == "checkpoint")
    assert saved.get("step") == ends[0].get("step")
    assert Path(saved.get("path")).is_dir()


def test_micro_batches_by_speed_are_measured_fixed_and_kept(results: Results) -> None:
    """Of 12 sequences rank 1, whose clock runs ten times as fast, is given fewer after step 4; the
    run that goes on is given as many. All take the steps of ranks that share evenly."""
    losses = [
        [event.get("loss") for event in read_events(path)[0] if event.event == "progress"]
        for name in ("even", "shared", "shared-on")
        for path in [results.root / name / "status" / "rank_0.jsonl"]
    ]
    assert [len(found) for found in losses] == [8, 6, 2]
    assert [*losses[1], *losses[2]] == pytest.approx(losses[0], abs=1e-5)
    found = [line for line in results.output.splitlines() if line.startswith("micro-batches are")]
    assert [line.partition(":")[0] for line in found] == [
        "micro-batches are shared out by measured times",
        "micro-batches are shared out as the checkpoint has it",
    ]
    counts = [re.findall(r"replica .{5} takes ([0-9]+) of", line) for line in found]
    assert counts[0] == counts[1]
    assert sum(map(int, counts[0])) == 12
    assert int(counts[0][1]) < 6
