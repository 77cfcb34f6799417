r"""Train one model in bf16 and in 8-bit precisions on the same text, and compare the losses.

The data is an indexed data set as written by tools/data/preprocess.py. All runs of a seed start
from the same weights and see the same samples in the same order. A precision is therefore compared
with the first precision of the same seed. Several seeds show how much of a difference is noise:
their mean has Student's 95 % confidence interval. Seeds run one after another, each in all
precisions. The loss curves and their plot are written after each run. With --append, runs that the
output file already contains are skipped.

    python tools/bench/precision.py --data corpus_text_document --vocabulary 8192 \
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

from gpu import run_training_program

from flagscale.bench import machine
from flagscale.bench.statistics import Ratio, paired_ratio
from flagscale.cli_errors import run_command
from flagscale.errors import ConfigError
from flagscale.status import Event

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


SMOOTHING_WINDOW = 10
"""Number of recorded losses that are averaged into a plotted value, because the loss of a single
step is noisy.
"""

Curve = dict[str, Any]


def train_precision(name: str, seed: int, options: argparse.Namespace, scratch: Path) -> Curve:
    """Train in one precision. Return the training loss by step and the final validation loss."""
    arguments = f"""{MODEL} --train-iters {options.steps} --vocab-size {options.vocabulary}
    --seed {seed} {PRECISIONS[name]}"""
    data_arguments = [
        "--data-path",
        str(options.data.absolute()),
        "--data-cache-path",
        str(scratch / "c"),
    ]
    directory = scratch / f"{seed}-{name}".replace(" ", "-").replace(",", "")
    events = run_training_program([*arguments.split(), *data_arguments], 1, directory)
    return read_curve(name, seed, events)


def read_curve(name: str, seed: int, events: Sequence[Event]) -> Curve:
    """Return the losses and the speed of a run from its status events."""
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


def pair_with_reference(curves: Sequence[Curve], name: str) -> list[tuple[Curve, Curve]]:
    """Pair the curves of a precision with the first precision's curve of the same seed."""
    reference = {c["seed"]: c for c in curves if c["precision"] == curves[0]["precision"]}
    same_precision = (c for c in curves if c["precision"] == name)
    return [(c, reference[c["seed"]]) for c in same_precision if c["seed"] in reference]


def list_precisions(curves: Sequence[Curve]) -> list[str]:
    """Return the precisions in order of first appearance."""
    return list(dict.fromkeys(c["precision"] for c in curves))


def compare_precisions(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Compare the validation loss of each precision with that of the first precision.

    ``percent`` is the mean over the seeds of how far the loss is above the first precision's. The
    interval ``low`` to ``high`` is None for a single seed.
    """
    comparisons = []
    for name in list_precisions(curves)[1:]:
        pairs = pair_with_reference(curves, name)
        if pairs:
            losses = (
                [c["validation_loss"] for c in curves_of_precision]
                for curves_of_precision in zip(*pairs, strict=True)
            )
            ratio = paired_ratio(*losses)
            comparisons.append(
                {
                    "precision": name,
                    "seeds": [curve["seed"] for curve, _ in pairs],
                    "percent": round(to_percent(ratio.value), 3),
                    "low": round(to_percent(ratio.low), 3) if len(pairs) > 1 else None,
                    "high": round(to_percent(ratio.high), 3) if len(pairs) > 1 else None,
                }
            )
    return comparisons


def to_percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def smooth_losses(losses: Sequence[float]) -> list[float]:
    """Return the moving average over the last :data:`SMOOTHING_WINDOW` losses."""
    return [
        statistics.fmean(losses[max(0, i - SMOOTHING_WINDOW + 1) : i + 1])
        for i in range(len(losses))
    ]


def compare_at_each_step(pairs: Sequence[tuple[Curve, Curve]]) -> list[Ratio]:
    """Return the ratio to the first precision's smoothed loss at each recorded step, over the
    seeds.
    """
    smoothed_losses = [
        [smooth_losses(c["loss"]) for c in curves_of_precision]
        for curves_of_precision in zip(*pairs, strict=True)
    ]
    return [
        paired_ratio(*losses_at_step)
        for losses_at_step in zip(
            *(zip(*curves_of_precision, strict=True) for curves_of_precision in smoothed_losses),
            strict=True,
        )
    ]


def plot_curves(curves: Sequence[Curve], path: Path, max_percent: float = 2) -> None:
    """Plot the mean curves, and below them the ratios to the first precision with their 95 %
    intervals, up to ``max_percent`` above and below.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (loss_axes, ratio_axes) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), gridspec_kw={"height_ratios": [3, 2]}
    )
    for name in list_precisions(curves):
        pairs = pair_with_reference(curves, name)
        if not pairs:
            continue
        steps, losses = pairs[0][0]["steps"], [curve["loss"] for curve, _ in pairs]
        mean = [statistics.fmean(losses_at_step) for losses_at_step in zip(*losses, strict=True)]
        (line,) = loss_axes.plot(steps, mean, label=name, linewidth=1)
        ratios = compare_at_each_step(pairs)
        ratio_axes.plot(
            steps, [to_percent(r.value) for r in ratios], color=line.get_color(), linewidth=1
        )
        if len(pairs) > 1 and name != list_precisions(curves)[0]:
            low, high = ([to_percent(bound) for bound in bounds] for bounds in
                         zip(*((r.low, r.high) for r in ratios), strict=True))  # fmt: skip
            ratio_axes.fill_between(
                steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0
            )
    loss_axes.set_ylabel("training loss (nats)")
    loss_axes.legend()
    ratio_axes.set_ylabel(f"% from {list_precisions(curves)[0]}\n({SMOOTHING_WINDOW} records)")
    ratio_axes.set_xlabel("step")
    ratio_axes.set_ylim(-max_percent, max_percent)
    for axes in (loss_axes, ratio_axes):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def parse_runs(options: argparse.Namespace) -> list[tuple[int, str]]:
    """Return the seeds and precisions to run, in order.

    Raises:
        ConfigError: A precision does not exist, or a seed is not a number.
    """
    names = options.precisions.split(";")
    for name in names:
        if name not in PRECISIONS:
            valid_names = "; ".join(PRECISIONS)
            raise ConfigError(
                f"--precisions: there is no {name!r}", hint=f"there are: {valid_names}"
            )
    return [(seed, name) for seed in parse_seeds(options.seeds) for name in names]


def parse_seeds(text: str) -> list[int]:
    """Parse seeds such as 1,2,3.

    Raises:
        ConfigError: A seed is not a number.
    """
    seeds = text.split(",")
    if not all(seed.strip().isdigit() for seed in seeds):
        raise ConfigError(f"--seeds: expected numbers such as 1,2,3, found {text!r}")
    return [int(seed) for seed in seeds]


def read_earlier_curves(options: argparse.Namespace, setting: dict[str, Any]) -> list[Curve]:
    """Read the curves that the output file already contains, if --append is set.

    Raises:
        ConfigError: The file's curves have other settings than ``setting``.
    """
    if not options.append or not options.output.exists():
        return []
    record = json.loads(options.output.read_text())
    for name, value in setting.items():
        if record.get(name) != value:
            raise ConfigError(
                f"--append: {options.output} is of {name} {record.get(name)!r}, not {value!r}",
                hint="name another --output",
            )
    curves: list[Curve] = record["curves"]
    return curves


def write_results(
    path: Path, setting: dict[str, Any], curves: Sequence[Curve], max_percent: float = 2
) -> None:
    """Write the results so far. An interrupted run leaves the file complete.

    ``max_percent`` limits the plot, see :func:`plot_curves`.
    """
    machine_facts = machine.describe_machine("torch", "triton", "megatron-core")
    record = {
        **machine_facts,
        **setting,
        "compared": compare_precisions(curves),
        "curves": list(curves),
    }
    temporary_path = path.with_suffix(".part")
    temporary_path.write_text(json.dumps(record, indent=1) + "\n")
    temporary_path.replace(path)
    plot_curves(curves, path.with_suffix(".svg"), max_percent)


def describe_last_run(curves: Sequence[Curve]) -> Iterator[str]:
    """Describe the last run and the comparison of its precision."""
    last_curve = curves[-1]
    yield (
        f"{last_curve['precision']}, seed {last_curve['seed']}: "
        f"validation loss {last_curve['validation_loss']:.4f}, "
        f"last 100 steps {last_curve['last_100_steps']:.4f}, "
        f"{last_curve['step_seconds']:.3f} s/step"
    )
    for comparison in compare_precisions(curves):
        if comparison["precision"] == last_curve["precision"]:
            interval = "one seed"
            if comparison["low"] is not None:
                low, high, seeds = (comparison[key] for key in ("low", "high", "seeds"))
                interval = f"{low:+.2f} to {high:+.2f}, {len(seeds)} seeds"
            yield f"    {comparison['percent']:+.2f} % from {curves[0]['precision']} ({interval})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="prefix of the data set (.bin and .idx)"
    )
    parser.add_argument(
        "--vocabulary", type=int, required=True, help="vocabulary size of its tokenizer"
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="training steps per run (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds",
        default="1234",
        help="comma-separated seeds, such as 1,2,3 (default: %(default)s)",
    )
    parser.add_argument(
        "--precisions",
        default=";".join(PRECISIONS),
        help="semicolon-separated precisions; the first is the reference (default: %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON file; the plot is written next to it"
    )
    parser.add_argument(
        "--append", action="store_true", help="keep the runs that --output already contains"
    )
    options = parser.parse_args(argv)
    runs = parse_runs(options)
    setting = {
        "text": options.data.name,
        "vocabulary": options.vocabulary,
        "steps": options.steps,
    }
    curves = read_earlier_curves(options, setting)
    finished = {(c["seed"], c["precision"]) for c in curves}
    with tempfile.TemporaryDirectory() as scratch:
        for seed, name in runs:
            if (seed, name) not in finished:
                curves.append(train_precision(name, seed, options, Path(scratch)))
                write_results(options.output, setting, curves)
                print("\n".join(describe_last_run(curves)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
