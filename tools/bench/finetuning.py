"""Benchmark a fine-tuning step on conversations against a pretraining step of as many tokens.

The same model trains alternately on sequences of plain text and on packed sequences of
conversations of different lengths. Attention does not cross conversations, and the loss covers only
the answers. Reported are the median step times, their ratio, and how full the sequences are.

    python tools/bench/finetuning.py --output docs/results/finetuning-cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flagscale.bench import machine
from flagscale.cli_errors import run_command
from flagscale.errors import ConfigError, JobError
from flagscale.status import STATUS_DIR_VARIABLE, read_events

PROJECT = Path(__file__).resolve().parents[2]
PROGRAM = PROJECT / "flagscale" / "train" / "train_gpt.py"
QUICKSTART = PROJECT / "data" / "quickstart"
SEQUENCE, BATCH = 512, 4
MODEL = f"""
--num-layers 4 --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8
--num-query-groups 4 --seq-length {SEQUENCE} --micro-batch-size 2 --global-batch-size {BATCH}
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --num-workers 1
--eval-iters 0 --lr 3e-4 --lr-decay-style constant --clip-grad 1.0 --log-interval 1
--tokenizer-type HuggingFaceTokenizer --tokenizer-path {QUICKSTART / "tokenizer"}
"""
PRETRAINING_ARGUMENTS = f"--data-path {QUICKSTART / 'stdlib_text_document'} --split 1"
ANSWER_LENGTH_DISTRIBUTION = (5.5, 1.0)
"""Log-normal distribution of the length of an answer in characters: mean and standard deviation of
the logarithm. A token has about three characters.
"""
WARMUP_STEPS = 3


def write_conversations(path: Path, count: int) -> Path:
    """Write conversations of one question and one answer each, with text of the quickstart's
    corpus.
    """
    generator = random.Random(0)
    corpus = "\n".join(
        json.loads(line)["text"] for line in (QUICKSTART / "corpus.jsonl").open(encoding="utf-8")
    )

    def excerpt(letters: int) -> str:
        begin = generator.randrange(len(corpus) - letters)
        return corpus[begin : begin + letters]

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            answer_length = min(
                1200, max(20, round(generator.lognormvariate(*ANSWER_LENGTH_DISTRIBUTION)))
            )
            turns = [
                ("user", excerpt(generator.randint(20, 200))),
                ("assistant", excerpt(answer_length)),
            ]
            messages = [{"role": role, "content": text} for role, text in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def run_training(arguments: Sequence[str], device: str, directory: Path) -> tuple[list[float], str]:
    """Run one training. Return the seconds of each counted step and the program's output.

    Raises:
        JobError: The training program failed.
    """
    directory.mkdir()
    paths = [str(PROJECT), str(PROJECT / "third_party" / "Megatron-LM")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment[STATUS_DIR_VARIABLE] = str(directory / "status")
    common_arguments = ["--data-cache-path", str(directory.parent / "cache"), "--device", device]
    process = subprocess.run(
        [sys.executable, str(PROGRAM), *MODEL.split(), *arguments, *common_arguments],
        env=environment,
        cwd=directory,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if process.returncode:
        raise JobError(f"training ended with {process.returncode}:\n{process.stdout[-3000:]}")
    events = read_events(directory / "status" / "rank_0.jsonl")[0]
    progress = [event for event in events if event.event == "progress"]
    return [e.get("step_seconds") for e in progress if e.get("step") > WARMUP_STEPS], process.stdout


def compare_step_times(device: str, rounds: int, steps: int, root: Path) -> dict[str, Any]:
    """Run pretraining and fine-tuning alternately and compare their median step times."""
    conversations = write_conversations(root / "talks.jsonl", 2000)
    finetuning_arguments = ["--sft", "--data-path", str(conversations), "--chat-template", "chatml"]
    arguments_by_kind = {
        "pretraining": PRETRAINING_ARGUMENTS.split(),
        "fine-tuning": finetuning_arguments,
    }
    step_seconds: dict[str, list[float]] = {kind: [] for kind in arguments_by_kind}
    packing = ""
    for round_number in range(rounds):
        for kind, kind_arguments in arguments_by_kind.items():
            arguments = [*kind_arguments, "--train-iters", str(steps)]
            seconds, output = run_training(arguments, device, root / f"{kind}-{round_number}")
            step_seconds[kind] += seconds
            if kind == "fine-tuning":
                packing = next(
                    (text for text in output.splitlines() if "conversations" in text), ""
                )
    medians = {kind: statistics.median(seconds) for kind, seconds in step_seconds.items()}
    return {
        "model": " ".join(MODEL.split()[: MODEL.split().index("--tokenizer-type")]),
        "tokens_a_step": SEQUENCE * BATCH,
        "packing": packing,
        "step_seconds": {kind: round(median, 4) for kind, median in medians.items()},
        "step_seconds_of_all": step_seconds,
        "ratio": round(medians["fine-tuning"] / medians["pretraining"], 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="device type (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=13, help="training steps per run (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    if options.steps <= WARMUP_STEPS:
        raise ConfigError(f"--steps: {options.steps}: the first {WARMUP_STEPS} are not counted")
    machine_facts = machine.describe_machine("flagscale", "torch")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        record = {
            **machine_facts,
            **compare_step_times(options.device, options.rounds, options.steps, root),
        }
    summary = {key: value for key, value in record.items() if key != "step_seconds_of_all"}
    print(json.dumps(summary, indent=1))
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
