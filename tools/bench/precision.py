"""Train one model in bf16 and in 8-bit precisions on the same text, and compare what they learn.

The data is an indexed data set, as tools/data/preprocess.py writes it. All runs start from the
same weights and see the same samples. Written are the loss curves, and a plot of them.

    python tools/bench/precision.py --data corpus_text_document --vocabulary 8192 \\
        --output docs/results/fp8-curve-h200.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu import program

from flagscale.bench import machine
from flagscale.guard import guard

MODEL = """
--num-layers 12 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16
--num-query-groups 8 --seq-length 1024 --micro-batch-size 32 --global-batch-size 32
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--tokenizer-type NullTokenizer --split 98,2,0 --eval-iters 20 --num-workers 2
--lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 100 --weight-decay 0.1
--adam-beta2 0.95 --clip-grad 1.0 --bf16 --use-distributed-optimizer --log-interval 10
"""
PRECISIONS = {
    "bf16": "",
    "fp8 tensorwise": "--fp8 hybrid",
    "fp8 rowwise": "--fp8 hybrid --fp8-recipe rowwise",
    "fp8 e4m3": "--fp8 e4m3",
    "fp8 tensorwise, first and last layer bf16": "--fp8 hybrid --first-last-layers-bf16",
}


def curve(name: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Train in one precision: training loss by step, and the validation loss at the end."""
    words = f"""{MODEL} --train-iters {options.steps} --vocab-size {options.vocabulary}
    --seed {options.seed} {PRECISIONS[name]}"""
    files = ["--data-path", str(options.data.absolute()), "--data-cache-path", str(scratch / "c")]
    events = program([*words.split(), *files], 1, scratch / name.replace(" ", "-").replace(",", ""))
    progress = [event for event in events if event.event == "progress"]
    validation = [event for event in events if event.event == "evaluation"]
    return {
        "precision": name,
        "steps": [event.get("step") for event in progress],
        "loss": [event.get("loss") for event in progress],
        "validation_loss": validation[-1].get("loss"),
        "step_seconds": statistics.median(event.get("step_seconds") for event in progress[2:]),
        "last_100_steps": statistics.mean(event.get("loss") for event in progress[-10:]),
    }


def plot(curves: Sequence[dict[str, Any]], path: Path) -> None:
    """The curves, and below them how far each is from the first."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), gridspec_kw={"height_ratios": [3, 2]}
    )
    for found in curves:
        top.plot(found["steps"], found["loss"], label=found["precision"], linewidth=1)
        away = [100 * (a / b - 1) for a, b in zip(found["loss"], curves[0]["loss"], strict=True)]
        bottom.plot(found["steps"], away, linewidth=1)
    top.set_ylabel("training loss (nats)")
    top.legend()
    bottom.set_ylabel(f"% from {curves[0]['precision']}")
    bottom.set_xlabel("step")
    bottom.set_ylim(-2, 2)
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="prefix of .bin and .idx")
    parser.add_argument("--vocabulary", type=int, required=True, help="tokens of its tokenizer")
    parser.add_argument("--steps", type=int, default=1000, help="%(default)s")
    parser.add_argument("--seed", type=int, default=1234, help="%(default)s")
    parser.add_argument("--precisions", default=";".join(PRECISIONS), help="%(default)s")
    parser.add_argument("--output", type=Path, required=True, help="JSON; the plot goes beside it")
    options = parser.parse_args(argv)
    curves = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.precisions.split(";"):
            curves.append(curve(name, options, Path(scratch)))
            first, last = curves[0], curves[-1]
            more = 100 * (last["validation_loss"] / first["validation_loss"] - 1)
            print(
                f"{name:>15}: validation loss {last['validation_loss']:.4f} ({more:+.2f} %), last "
                f"100 steps {last['last_100_steps']:.4f}, {last['step_seconds']:.3f} s/step",
                flush=True,
            )
            facts = machine.facts("torch", "triton", "megatron-core")
            options.output.write_text(json.dumps({**facts, "curves": curves}, indent=1) + "\n")
            plot(curves, options.output.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
