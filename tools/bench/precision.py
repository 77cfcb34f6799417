"""Train one model in bf16 and in 8-bit precisions on the same text, and compare what they learn.

The data is an indexed data set, as tools/data/preprocess.py writes it. All runs of a seed start
from the same weights and see the same samples in the same order, so a precision is compared with
the first one of its own seed, and the seeds tell how much of the difference is chance: the mean
has Student's 95 % interval. Seeds are taken one after another, each in all precisions. The loss
curves and a plot of them are written after each run; with --append what a file has already is not
run again.

    python tools/bench/precision.py --data corpus_text_document --vocabulary 8192 \\
        --seeds 1,2,3 --output docs/results/fp8-curve-h200.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu import program

from flagscale.bench import machine
from flagscale.cli_errors import guard
from flagscale.errors import ConfigError
from flagscale.sample_statistics import Ratio, paired_ratio

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
    "fp8 e4m3 blockwise": "--fp8 e4m3 --fp8-recipe blockwise",
    "fp8 tensorwise, first and last layer bf16": "--fp8 hybrid --first-last-layers-bf16",
}


SMOOTHED = 10
"""Recorded losses that a plotted one is the mean of: single steps are as noisy as their text."""

Curve = dict[str, Any]


def train(name: str, seed: int, options: argparse.Namespace, scratch: Path) -> Curve:
    """Train in one precision: training loss by step, and the validation loss at the end."""
    words = f"""{MODEL} --train-iters {options.steps} --vocab-size {options.vocabulary}
    --seed {seed} {PRECISIONS[name]}"""
    files = ["--data-path", str(options.data.absolute()), "--data-cache-path", str(scratch / "c")]
    directory = scratch / f"{seed}-{name}".replace(" ", "-").replace(",", "")
    events = program([*words.split(), *files], 1, directory)
    progress = [event for event in events if event.event == "progress"]
    validation = [event for event in events if event.event == "evaluation"]
    return {
        "precision": name,
        "seed": seed,
        "device": next(event.get("device") for event in events if event.event == "started"),
        "steps": [event.get("step") for event in progress],
        "loss": [event.get("loss") for event in progress],
        "validation_loss": validation[-1].get("loss"),
        "step_seconds": statistics.median(event.get("step_seconds") for event in progress[2:]),
        "last_100_steps": statistics.mean(event.get("loss") for event in progress[-10:]),
    }


def paired(curves: Sequence[Curve], name: str) -> list[tuple[Curve, Curve]]:
    """The curves of a precision, each with that of the first precision and of its seed."""
    reference = {c["seed"]: c for c in curves if c["precision"] == curves[0]["precision"]}
    own = (c for c in curves if c["precision"] == name)
    return [(c, reference[c["seed"]]) for c in own if c["seed"] in reference]


def names_in(curves: Sequence[Curve]) -> list[str]:
    """Precisions, in the order in which they came."""
    return list(dict.fromkeys(c["precision"] for c in curves))


def compared(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Of each precision but the first by how many percent its validation loss is above that of the
    first, over the seeds; with one seed nothing is known of chance."""
    found = []
    for name in names_in(curves)[1:]:
        pairs = paired(curves, name)
        if pairs:
            losses = ([c["validation_loss"] for c in side] for side in zip(*pairs, strict=True))
            above = paired_ratio(*losses)
            found.append(
                {
                    "precision": name,
                    "seeds": [own["seed"] for own, _ in pairs],
                    "percent": round(percent(above.value), 3),
                    "low": round(percent(above.low), 3) if len(pairs) > 1 else None,
                    "high": round(percent(above.high), 3) if len(pairs) > 1 else None,
                }
            )
    return found


def percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def smooth(losses: Sequence[float]) -> list[float]:
    """The mean of each and of those before it."""
    return [statistics.fmean(losses[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(losses))]


def away(pairs: Sequence[tuple[Curve, Curve]]) -> list[Ratio]:
    """At each recorded step how far a precision's loss is from the first one's, over the seeds."""
    sides = [[smooth(c["loss"]) for c in side] for side in zip(*pairs, strict=True)]
    return [
        paired_ratio(*at) for at in zip(*(zip(*side, strict=True) for side in sides), strict=True)
    ]


def plot(curves: Sequence[Curve], path: Path) -> None:
    """The curves' means over the seeds, and below them how far each is from the first, with the
    95 % interval as a band."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), gridspec_kw={"height_ratios": [3, 2]}
    )
    for name in names_in(curves):
        pairs = paired(curves, name)
        if not pairs:
            continue
        steps, losses = pairs[0][0]["steps"], [own["loss"] for own, _ in pairs]
        mean = [statistics.fmean(at) for at in zip(*losses, strict=True)]
        (line,) = top.plot(steps, mean, label=name, linewidth=1)
        ratios = away(pairs)
        bottom.plot(steps, [percent(r.value) for r in ratios], color=line.get_color(), linewidth=1)
        if len(pairs) > 1 and name != names_in(curves)[0]:
            low, high = ([percent(end) for end in ends] for ends in
                         zip(*((r.low, r.high) for r in ratios), strict=True))  # fmt: skip
            bottom.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    top.set_ylabel("training loss (nats)")
    top.legend()
    bottom.set_ylabel(f"% from {names_in(curves)[0]}\n({SMOOTHED} records)")
    bottom.set_xlabel("step")
    bottom.set_ylim(-2, 2)
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def wanted(options: argparse.Namespace) -> list[tuple[int, str]]:
    """Seeds and precisions, in their order.

    Raises:
        ConfigError: there is no such precision, or a seed is no number.
    """
    names = options.precisions.split(";")
    for name in names:
        if name not in PRECISIONS:
            known = "; ".join(PRECISIONS)
            raise ConfigError(f"--precisions: there is no {name!r}", hint=f"there are: {known}")
    seeds = options.seeds.split(",")
    if not all(seed.strip().isdigit() for seed in seeds):
        raise ConfigError(f"--seeds: expected numbers such as 1,2,3, found {options.seeds!r}")
    return [(int(seed), name) for seed in seeds for name in names]


def kept(options: argparse.Namespace, setting: dict[str, Any]) -> list[Curve]:
    """The curves that are there already.

    Raises:
        ConfigError: they are of other steps, or of other text.
    """
    if not options.append or not options.output.exists():
        return []
    found = json.loads(options.output.read_text())
    for name, value in setting.items():
        if found.get(name) != value:
            raise ConfigError(
                f"--append: {options.output} is of {name} {found.get(name)!r}, not {value!r}",
                hint="name another --output",
            )
    curves: list[Curve] = found["curves"]
    return curves


def write(path: Path, setting: dict[str, Any], curves: Sequence[Curve]) -> None:
    """What is known so far; a run that is cut leaves the file whole."""
    facts = machine.facts("torch", "triton", "megatron-core")
    record = {**facts, **setting, "compared": compared(curves), "curves": list(curves)}
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)
    plot(curves, path.with_suffix(".svg"))


def lines(curves: Sequence[Curve]) -> Iterator[str]:
    """The last run, and what is known of its precision."""
    last = curves[-1]
    yield (
        f"{last['precision']}, seed {last['seed']}: validation loss {last['validation_loss']:.4f}, "
        f"last 100 steps {last['last_100_steps']:.4f}, {last['step_seconds']:.3f} s/step"
    )
    for found in compared(curves):
        if found["precision"] == last["precision"]:
            known = "one seed"
            if found["low"] is not None:
                known = f"{found['low']:+.2f} to {found['high']:+.2f}, {len(found['seeds'])} seeds"
            yield f"    {found['percent']:+.2f} % from {curves[0]['precision']} ({known})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="prefix of .bin and .idx")
    parser.add_argument("--vocabulary", type=int, required=True, help="tokens of its tokenizer")
    parser.add_argument("--steps", type=int, default=1000, help="%(default)s")
    parser.add_argument("--seeds", default="1234", help="such as 1,2,3; %(default)s")
    parser.add_argument(
        "--precisions",
        default=";".join(PRECISIONS),
        help="the first is what the others are compared with; %(default)s",
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON; the plot goes beside it")
    parser.add_argument("--append", action="store_true", help="go on with what --output has")
    options = parser.parse_args(argv)
    runs = wanted(options)
    setting = {
        "text": options.data.name,
        "vocabulary": options.vocabulary,
        "steps": options.steps,
    }
    curves = kept(options, setting)
    there = {(c["seed"], c["precision"]) for c in curves}
    with tempfile.TemporaryDirectory() as scratch:
        for seed, name in runs:
            if (seed, name) not in there:
                curves.append(train(name, seed, options, Path(scratch)))
                write(options.output, setting, curves)
                print("\n".join(lines(curves)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guard(main))
