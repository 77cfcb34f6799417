"""Measure a step of fine-tuning on conversations beside one of pretraining on as many tokens.

The same model takes, in turn, sequences of running text and sequences into which conversations of
unlike length are packed, which are kept apart and of which the answers alone are learned. Told are
the median steps, their ratio, and how well the sequences are filled.

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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.bench import machine
from flagscale.cli_errors import guard
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
TEXT = f"--data-path {QUICKSTART / 'stdlib_text_document'} --split 1"
ANSWER = (5.5, 1.0)
"""Letters of an answer: the mean and the deviation of their logarithm. A token has about three."""
WARM_UP = 3


def write_talks(path: Path, count: int) -> Path:
    """Conversations about the quickstart's corpus, of a question and an answer each."""
    generator = random.Random(0)
    corpus = "\n".join(
        json.loads(line)["text"] for line in (QUICKSTART / "corpus.jsonl").open(encoding="utf-8")
    )

    def piece(letters: int) -> str:
        begin = generator.randrange(len(corpus) - letters)
        return corpus[begin : begin + letters]

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            longest = min(1200, max(20, round(generator.lognormvariate(*ANSWER))))
            said = [("user", piece(generator.randint(20, 200))), ("assistant", piece(longest))]
            messages = [{"role": role, "content": text} for role, text in said]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def steps(words: Sequence[str], device: str, directory: Path) -> tuple[list[float], str]:
    """Seconds of each step that counts, and what the program printed.

    Raises:
        JobError: it fails.
    """
    directory.mkdir()
    paths = [str(PROJECT), str(PROJECT / "third_party" / "Megatron-LM")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment[STATUS_DIR_VARIABLE] = str(directory / "status")
    cache = ["--data-cache-path", str(directory.parent / "cache"), "--device", device]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *MODEL.split(), *words, *cache], env=environment,
        cwd=directory, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise JobError(f"training ended with {done.returncode}:\n{done.stdout[-3000:]}")
    events = read_events(directory / "status" / "rank_0.jsonl")[0]
    told = [event for event in events if event.event == "progress"]
    return [e.get("step_seconds") for e in told if e.get("step") > WARM_UP], done.stdout


def measured(device: str, rounds: int, count: int, root: Path) -> dict[str, Any]:
    """Both kinds of training in turn."""
    talks = write_talks(root / "talks.jsonl", 2000)
    tuning = ["--sft", "--data-path", str(talks), "--chat-template", "chatml"]
    kinds = {"pretraining": TEXT.split(), "fine-tuning": tuning}
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    filled = ""
    for turn in range(rounds):
        for kind, words in kinds.items():
            more = [*words, "--train-iters", str(count)]
            seconds, output = steps(more, device, root / f"{kind}-{turn}")
            found[kind] += seconds
            if kind == "fine-tuning":
                filled = next((text for text in output.splitlines() if "conversations" in text), "")
    medians = {kind: statistics.median(seconds) for kind, seconds in found.items()}
    return {
        "model": " ".join(MODEL.split()[: MODEL.split().index("--tokenizer-type")]),
        "tokens_a_step": SEQUENCE * BATCH,
        "packing": filled,
        "step_seconds": {kind: round(median, 4) for kind, median in medians.items()},
        "step_seconds_of_all": found,
        "ratio": round(medians["fine-tuning"] / medians["pretraining"], 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="a kind of chip, %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of both, %(default)s")
    parser.add_argument("--steps", type=int, default=13, help="of each run, %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    if options.steps <= WARM_UP:
        raise ConfigError(f"--steps: {options.steps}: the first {WARM_UP} are not counted")
    before = machine.facts("flagscale", "torch")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        found = {**before, **measured(options.device, options.rounds, options.steps, root)}
    shown = {key: value for key, value in found.items() if key != "step_seconds_of_all"}
    print(json.dumps(shown, indent=1))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
