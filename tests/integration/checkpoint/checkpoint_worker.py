"""Trains, saves and loads a tiny model in forked ranks and writes down what happened.

usage: checkpoint_worker.py PLAN.json RESULTS.json

PLAN is a list of stages {"world": ranks, "backend": name, "cases": [...]}, run one after the other;
cases of a stage share their ranks. A case {"id", "do", "argv", ...} names a function below. The
process imports torch and megatron.core once and forks the ranks.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from foreign_cases import start_and_compare  # noqa: F401 - a case, found by its name
from support.forked_ranks import Record, forget_layout, run_world

RESULTS: dict[str, Any] = {}


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    os.environ["FLAGSCALE_DEVICE"] = "cpu"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # So that the forked ranks need not.
    import flagscale.train.build
    import flagscale.train.checkpoint
    import flagscale.train.data.datasets
    import flagscale.train.step  # noqa: F401

    for stage in plan:
        life = partial(run_rank, stage["cases"], stage["backend"])
        RESULTS.update(run_world(stage["world"], life))
        Path(sys.argv[2]).write_text(json.dumps(RESULTS))


def run_rank(cases: list[dict[str, Any]], backend: str) -> Iterator[Record]:
    """The life of a rank: each case in turn, with what every rank found."""
    import torch.distributed as dist

    from flagscale.errors import FlagscaleError
    from flagscale.train import distributed
    from flagscale.train.device import choose

    rank = distributed.Rank.from_environment()
    device = choose("cpu", rank.local_rank)
    distributed.join(rank, device, backend=backend, timeout_minutes=1)
    for case in cases:
        try:
            found = globals()[case["do"]](Run(case, rank, device))
        except FlagscaleError as error:
            found = {"error": str(error), "kind": type(error).__name__}
        forget_layout()
        everyone: list[Any] = [None] * rank.world_size
        dist.all_gather_object(everyone, found)
        yield case["id"], {**everyone[0], "ranks": everyone}


def spoil(modules: list[Any]) -> None:
    """Make weights that were not drawn such that it shows where they stay."""
    from flagscale.train.layers.lora import is_adapter

    for module in modules:
        for name, parameter in module.named_parameters():
            if not is_adapter(name):
                parameter.data.fill_(float("nan"))


class Run:
    """A tiny training run on this rank, of the parts that training itself is made of."""

    def __init__(self, case: dict[str, Any], rank: Any, device: Any) -> None:
        from flagscale.config.arguments.parser import parse_arguments
        from flagscale.config.arguments.resolve import of_rank, resolve
        from flagscale.train import distributed
        from flagscale.train.build import build_state, model_vocabulary
        from flagscale.train.checkpoint import Checkpointer
        from flagscale.train.checkpoint.formats.pretrained import brings_every_weight
        from flagscale.train.data.tokenizers import build_tokenizer
        from flagscale.train.models.config import transformer_config

        self.case = case
        self.rank = rank.rank
        args = resolve(parse_arguments(case["argv"]), rank.world_size)
        self.args = of_rank(args, rank.rank)
        self.groups = distributed.lay_out(self.args)
        self.tokenizer = build_tokenizer(self.args)
        self.config = transformer_config(self.args, device)
        vocabulary = model_vocabulary(self.args, self.tokenizer)
        draw = not brings_every_weight(self.args)
        self.state = build_state(self.args, self.config, vocabulary, device, draw=draw)
        if not draw:
            spoil(self.state.modules())
        self.device = device
        self.warnings: list[str] = []
        self.checkpointer = Checkpointer(self.args, warn=self.warnings.append)
        self.report: str | None = None
        self.stepper: Any = None
        self.data: Any = None

    def load(self) -> None:
        from flagscale.train.step import gathered

        with gathered(self.args, self.state.chunks):
            report = self.checkpointer.load(self.state)
        self.report = None if report is None else str(report)

    def train(self, steps: int) -> dict[str, list[float]]:
        """Losses and gradient norms of the next steps."""
        from flagscale.train.data.datasets import build_data_iterators
        from flagscale.train.readings import Readings
        from flagscale.train.step import Stepper

        if self.stepper is None:
            chunks = len(self.state.chunks)
            self.data = build_data_iterators(
                self.args, self.tokenizer, self.state.progress, chunks=chunks
            )
            self.stepper = Stepper(
                self.args, self.config, self.state, self.device, groups=self.groups
            )
        readings = Readings()
        for _ in range(steps):
            readings.add(*self.stepper.train(self.data.train, stop=(False, False)))
        found = list(readings.take(leave=0))
        return {
            "loss": [item.loss for item in found],
            "norm": [item.grad_norm for item in found],
        }

    def save(self, *, required: bool = False) -> None:
        from flagscale.train.step import gathered

        with gathered(self.args, self.state.chunks):
            self.checkpointer.save(self.state, required=required)

    def found(self, **more: Any) -> dict[str, Any]:
        saved = [item.iteration for item in self.checkpointer.poll()]
        names: list[str] = []
        if self.args.save and Path(self.args.save).is_dir():
            names = listed(self.args.save)
        progress = self.state.progress.state_dict()
        return {
            "report": self.report,
            "warnings": self.warnings,
            "saved": saved,
            "names": names,
            "progress": progress,
            **more,
        }


def listed(directory: str) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


# --- cases ----------------------------------------------------------------------------------


def train_and_save(run: Run) -> dict[str, Any]:
    """Load (with ``load``), train ``steps``, save (with ``save``)."""
    if run.args.load:
        run.load()
    numbers = run.train(run.case["steps"])
    if run.args.save:
        run.save()
    run.checkpointer.close()
    return run.found(**numbers)


def save_and_go_on(run: Run) -> dict[str, Any]:
    """Train ``steps``, save, and train as many more: an uninterrupted run."""
    first = run.train(run.case["steps"])
    run.save(required=True)
    second = run.train(run.case["steps"])
    return run.found(**{name: first[name] + second[name] for name in first})


def save_each_step(run: Run) -> dict[str, Any]:
    """Train ``steps``, saving after each; polls as the training loop does."""
    polled: list[int] = []
    if run.args.load:
        run.load()
    for _ in range(run.case["steps"]):
        run.train(1)
        run.save()
        polled += [item.iteration for item in run.checkpointer.poll()]
    run.checkpointer.close()
    polled += [item.iteration for item in run.checkpointer.poll()]
    return run.found(polled=polled)


def load_only(run: Run) -> dict[str, Any]:
    """Load; then say what the generators draw next and how the weights look."""
    import numpy as np
    import torch

    run.load()
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    total = sum(float(p.double().abs().sum()) for m in run.state.modules() for p in m.parameters())
    return run.found(drawn=drawn, total=total)


def draw_and_save(run: Run) -> dict[str, Any]:
    """Use the generators, save before any step, then say what they draw next."""
    import numpy as np
    import torch

    for _ in range(3 + run.rank):
        random.random(), np.random.rand(), torch.rand(())
    run.save()
    run.checkpointer.close()
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return run.found(drawn=drawn)


def fail_in_the_middle(run: Run) -> dict[str, Any]:
    """Save; let the next save fail on some ranks; see that training goes on and saves again."""
    run.train(1)
    run.save(required=True)
    run.train(1)
    with Trouble(run):
        run.save()
        while run.checkpointer._pending is not None:
            run.checkpointer.poll()
    during = listed(run.args.save)
    barrier()
    after = run.train(1)
    run.save()
    run.checkpointer.close()
    return run.found(during=during, **after)


def fail_at_the_end(run: Run) -> dict[str, Any]:
    """The last save fails, the first one where ``alone``: closing says so, on every rank."""
    run.train(1)
    if not run.case.get("alone"):
        run.save(required=True)
        run.train(1)
    with Trouble(run):
        run.save()
        try:
            run.checkpointer.close()
        except Exception as error:  # noqa: BLE001 - told to the test as it is
            return run.found(error=str(error), kind=type(error).__name__)
    return run.found(error=None)


class Trouble:
    """Makes writing fail on the ranks of ``trouble_ranks``: by a full disk (``fill``) or by a
    limit on the size of files."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def __enter__(self) -> None:
        if self._run.rank in self._run.case["trouble_ranks"]:
            if self._run.case.get("fill"):
                with self._filler().open("wb", buffering=0) as file, suppress(OSError):
                    while True:
                        file.write(b"\0" * 4096)
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, self._limits[1]))
        barrier()

    def __exit__(self, *_: object) -> None:
        barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
        self._filler().unlink(missing_ok=True)
        barrier()

    def _filler(self) -> Path:
        return Path(self._run.args.save).parent / "filler"


def kill_the_writer(run: Run) -> dict[str, Any]:
    """The process that writes in the background is killed on one rank."""
    import multiprocessing

    from flagscale.train.checkpoint import writing

    run.train(1)
    run.save()
    original = writing.write
    # Only the forked process calls it; it sleeps until it is killed.
    writing.write = lambda *_: signal.pause() if run.rank == 1 else original(*_)
    run.train(1)
    run.save()
    writing.write = original
    polled_before = [item.iteration for item in run.checkpointer.poll()]
    if run.rank == 1:
        for child in multiprocessing.active_children():
            child.kill()
    run.checkpointer._settle()
    run.train(1)
    run.save()
    run.checkpointer.close()
    return run.found(polled_before=polled_before)


def damage(run: Run) -> dict[str, Any]:
    """Do to files what ``edits`` say: [path, size] cuts a file, [path, None] removes it,
    [path, text] writes it."""
    if run.rank == 0:
        for name, change in run.case["edits"]:
            path = Path(name)
            if change is None:
                path.unlink()
            elif isinstance(change, str):
                path.write_text(change)
            else:
                os.truncate(path, change)
    barrier()
    return {}


if __name__ == "__main__":
    main()
