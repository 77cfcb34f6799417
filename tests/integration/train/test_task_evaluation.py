"""Evaluation on tasks of lm-evaluation-harness, during training and of a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.chat_files import write_tokenizer
from support.eval_tasks import write_tasks
from support.waiting import PATIENCE_SECONDS
from support.warm_programs import ROOT, start_warm_program

from flagscale.status import STATUS_DIR_VARIABLE, list_status_files, read_events

pytestmark = [pytest.mark.integration, pytest.mark.torch, pytest.mark.lm_eval]

TRAIN = ROOT / "flagscale" / "train" / "train_gpt.py"
EVALUATE = ROOT / "flagscale" / "train" / "evaluation" / "command.py"
HF_SCORES = Path(__file__).with_name("hf_scores.py")
ARGUMENTS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2
--group-query-attention --ffn-hidden-size 64 --seq-length 64 --micro-batch-size 2
--global-batch-size 4 --make-vocab-size-divisible-by 16 --normalization RMSNorm --swiglu
--disable-bias-linear --position-embedding-type rope --init-method-std 0.2 --hidden-dropout 0.1
--eval-iters 1 --num-workers 0 --log-interval 1 --device cpu --lr 1e-2 --train-iters 4
--lr-decay-style constant --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-path tok
"""


def run_program(directory: Path, program: Path, words: Sequence[str], ranks: int = 1) -> str:
    """Run a program to its end, and return its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'third_party' / 'Megatron-LM'}",
        STATUS_DIR_VARIABLE: str(directory / "status"),
    }
    process = start_warm_program(
        program, words, ranks=ranks, environment=environment, cwd=directory
    )
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    return output


def read_reported(directory: Path, event_type: str, field: str) -> dict[int, Any]:
    """Return a field of the events of a type by step."""
    return {
        event.get("step"): event.get(field)
        for path in list_status_files(directory / "status")
        for event in read_events(path)[0]
        if event.event == event_type
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with evaluations on tasks, and return the directory."""
    directory = tmp_path_factory.mktemp("trained")
    write_tokenizer(directory / "tok")
    tasks = map(str, write_tasks(directory / "tasks"))
    words = "--eval-tasks-interval 2 --save ck --save-best --best-metric texts/bits_per_byte"
    words += " --export-huggingface hf"
    # Data and tensor parallelism: rank 0 is asked for nothing that other ranks do not compute.
    layout = "--tensor-model-parallel-size 2"
    run_program(
        directory,
        TRAIN,
        [*f"{ARGUMENTS} {words} {layout}".split(), "--eval-tasks", *tasks],
        ranks=2,
    )
    return directory


def test_scores_equal_those_of_the_exported_model(trained: Path) -> None:
    tasks = [str(trained / "tasks" / f"{name}.yaml") for name in ("choice", "texts", "copy")]
    output = run_program(trained, HF_SCORES, ["hf/iter_0000004", "64", *tasks])
    reference = json.loads(output.splitlines()[-1])
    assert 0 < reference["copy/chrf"] < 100
    scores = read_reported(trained, "tasks", "scores")
    assert sorted(scores) == [2, 4]
    assert scores[4] == pytest.approx(reference, rel=1e-4)
    assert scores[2] != scores[4]
    # In one process, from the checkpoint that two processes have saved.
    words = ["ck", "--tokenizer-path", "tok", "--seq-length", "64", "--device", "cpu"]
    words += ["--output", "scores.json", "--tasks", *tasks]
    output = run_program(trained, EVALUATE, words)
    assert json.loads((trained / "scores.json").read_text())["values"] == pytest.approx(
        reference, rel=1e-4
    )
    assert "texts/bits_per_byte" in output


def test_best_checkpoint_is_chosen_by_a_score(trained: Path) -> None:
    scores = read_reported(trained, "tasks", "scores")
    best = min(scores, key=lambda step: scores[step]["texts/bits_per_byte"])
    assert (trained / "ck" / "best").resolve().name == f"iter_{best:07d}"
    marked = read_reported(trained, "checkpoint", "best_value")
    assert marked[best] == scores[best]["texts/bits_per_byte"]


def test_evaluation_does_not_change_training(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "tok").symlink_to(trained / "tok")
    layout = "--tensor-model-parallel-size 2"
    run_program(tmp_path, TRAIN, f"{ARGUMENTS} {layout}".split(), ranks=2)
    for quantity in ("loss", "grad_norm"):
        expected = read_reported(tmp_path, "progress", quantity)
        assert len(expected) == 4
        assert read_reported(trained, "progress", quantity) == expected


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        pytest.param(
            {"dataset_path": "no/such_data"},
            (),
            "task.yaml cannot be loaded: ",
            id="needs-download",
        ),
        pytest.param(
            {"generation_kwargs": {"until": ["e"], "max_gen_toks": 64}},
            (),
            "copy generates up to 64 tokens (max_gen_toks), but seq_length is 64",
            id="too-long",
        ),
        pytest.param(
            {}, ("--save", "ck", "--save-best", "--best-metric", "copy/acc"),
            "copy/acc is not a metric of eval_tasks",
            id="unknown-metric",
        ),
    ],
)  # fmt: skip
def test_task_that_cannot_be_evaluated_is_refused_before_training(
    change: dict[str, Any], options: Sequence[str], message: str, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tok")
    task = json.loads(write_tasks(tmp_path / "tasks")[2].read_text())
    (tmp_path / "tasks" / "task.yaml").write_text(json.dumps({**task, **change}))
    words = [*ARGUMENTS.split(), "--eval-tasks", "tasks/task.yaml", *options]
    with pytest.raises(AssertionError) as error:
        run_program(tmp_path, TRAIN, words)
    assert message in str(error.value)
    assert "Traceback" not in str(error.value)
    assert read_reported(tmp_path, "progress", "loss") == {}
