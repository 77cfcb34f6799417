"""Train, save and load a tiny model in forked ranks, and write the results of each case.

usage: checkpoint_worker.py PLAN.json RESULTS.json

PLAN is a list of stages {"world": ranks, "backend": name, "cases": [...]}, run one after the other;
cases of a stage share their ranks. A case {"id", "function", "argv", ...} names a function below.
The process imports torch and megatron.core once and forks the ranks.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[3] / "tools" / "bench"))

from foreign_cases import start_and_compare  # noqa: F401 - a case, found by its name
from support.forked_ranks import (
    Record,
    import_training,
    reset_megatron_state,
    run_forked_ranks,
)
from support.unsharded import unsharded_parameters

RESULTS: dict[str, Any] = {}


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    os.environ["FLAGSCALE_DEVICE"] = "cpu"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    import_training()
    for stage in plan:
        rank_function = partial(run_rank, stage["cases"], stage["backend"])
        RESULTS.update(run_forked_ranks(stage["world"], rank_function))
        Path(sys.argv[2]).write_text(json.dumps(RESULTS))


def run_rank(cases: list[dict[str, Any]], backend: str) -> Iterator[Record]:
    """Run each case on this rank; return the results of all ranks."""
    import torch.distributed as dist

    from flagscale.errors import FlagscaleError
    from flagscale.train import distributed
    from flagscale.train.device import choose_device

    rank = distributed.RankIdentity.from_environment()
    device = choose_device("cpu", rank.local_rank)
    distributed.init_default_group(rank, device, backend=backend, timeout_minutes=3)
    for case in cases:
        try:
            results = globals()[case["function"]](Run(case, rank, device))
        except FlagscaleError as error:
            results = {"error": str(error), "kind": type(error).__name__}
        reset_megatron_state()
        results_by_rank: list[Any] = [None] * rank.world_size
        dist.all_gather_object(results_by_rank, results)
        yield case["id"], {**results_by_rank[0], "ranks": results_by_rank}


def fill_weights_with_nan(modules: list[Any]) -> None:
    """Set weights to NaN, so that a weight that is not loaded shows."""
    from flagscale.train.layers.lora import is_adapter

    for module in modules:
        for name, parameter in module.named_parameters():
            if not is_adapter(name):
                parameter.data.fill_(float("nan"))


class Run:
    """A tiny training run on this rank, built from the components of the trainer."""

    def __init__(self, case: dict[str, Any], rank: Any, device: Any) -> None:
        from flagscale.config.arguments.derive import derive_arguments, rank_arguments
        from flagscale.config.arguments.spec.command_line import parse_arguments
        from flagscale.train import distributed
        from flagscale.train.build import build_state, padded_vocabulary_size
        from flagscale.train.checkpoint import Checkpointer
        from flagscale.train.checkpoint.formats.pretrained import overwrites_all_weights
        from flagscale.train.data.tokenizers import build_tokenizer
        from flagscale.train.models.config import build_transformer_config

        self.case = case
        self.rank = rank.rank
        args = derive_arguments(parse_arguments(case["argv"]), rank.world_size)
        self.args = rank_arguments(args, rank.rank)
        self.groups = distributed.init_model_parallel(self.args)
        self.tokenizer = build_tokenizer(self.args)
        self.config = build_transformer_config(self.args, device)
        vocabulary = padded_vocabulary_size(self.args, self.tokenizer)
        initializes_weights = not overwrites_all_weights(self.args)
        self.state = build_state(
            self.args, self.config, vocabulary, device, initialize_all=initializes_weights
        )
        if not initializes_weights:
            with unsharded_parameters(self.args, self.state.chunks):
                fill_weights_with_nan(self.state.modules())
        self.device = device
        self.warnings: list[str] = []
        self.checkpointer = Checkpointer(self.args, warn=self.warnings.append)
        self.report: str | None = None
        self.stepper: Any = None
        self.data: Any = None

    def load(self) -> None:
        from flagscale.train.step import gathered_parameters

        with gathered_parameters(self.args, self.state.chunks):
            report = self.checkpointer.load(self.state)
        self.report = None if report is None else str(report)

    def train(self, steps: int) -> dict[str, list[float]]:
        """Train; return losses and gradient norms of the steps."""
        from flagscale.train.data.datasets import build_data_iterators
        from flagscale.train.deferred_metrics import DeferredMetrics
        from flagscale.train.step import Stepper

        if self.stepper is None:
            model_chunks = len(self.state.chunks)
            self.data = build_data_iterators(
                self.args, self.tokenizer, self.state.progress, model_chunks=model_chunks
            )
            self.stepper = Stepper(
                self.args, self.config, self.state, self.device, groups=self.groups
            )
        metrics = DeferredMetrics()
        for _ in range(steps):
            metrics.add(*self.stepper.train(self.data.train, stop_flags=(False, False)))
        completed_metrics = list(metrics.pop_completed(keep_newest=0))
        return {
            "loss": [item.loss for item in completed_metrics],
            "norm": [item.grad_norm for item in completed_metrics],
        }

    def save(self, *, required: bool = False) -> None:
        from flagscale.train.step import gathered_parameters

        with gathered_parameters(self.args, self.state.chunks):
            self.checkpointer.save(self.state, required=required)

    def build_result(self, **fields: Any) -> dict[str, Any]:
        saved = [item.iteration for item in self.checkpointer.poll()]
        names: list[str] = []
        if self.args.save and Path(self.args.save).is_dir():
            names = list_checkpoints(self.args.save)
        progress = self.state.progress.state_dict()
        return {
            "report": self.report,
            "warnings": self.warnings,
            "saved": saved,
            "names": names,
            "progress": progress,
            **fields,
        }


def list_checkpoints(directory: str) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


# --- cases ----------------------------------------------------------------------------------


def train_and_save(run: Run) -> dict[str, Any]:
    """Load (with ``load``), train ``steps``, save (with ``save``)."""
    if run.args.load:
        run.load()
    metrics_by_name = run.train(run.case["steps"])
    if run.args.save:
        run.save()
    run.checkpointer.close()
    return run.build_result(**metrics_by_name)


def save_and_go_on(run: Run) -> dict[str, Any]:
    """Train ``steps``, save, and train ``steps_after`` (default: the same number) without
    interruption."""
    with RouterMargins() as margins:
        first = run.train(run.case["steps"])
        run.save(required=True)
        state_sizes = count_state_elements(run) if run.args.use_distributed_optimizer else {}
        second = run.train(run.case.get("steps_after", run.case["steps"]))
    metrics_by_name = {name: first[name] + second[name] for name in first}
    return run.build_result(**metrics_by_name, router_margin=margins.minimum, **state_sizes)


def restore_from_memory(run: Run) -> dict[str, Any]:
    """Train, copy the state to memory, and go on; then restore it in a new state and go on.

    Each rank is a host of its own, and rank 1 has lost its memory when the state is restored.
    """
    from flagscale.memory_regions import create_regions
    from flagscale.train.distributed import RankIdentity
    from flagscale.train.memory_checkpoint.copies import MemoryCheckpoints
    from flagscale.train.step import gathered_parameters

    ranks = int(os.environ["WORLD_SIZE"])
    rank = RankIdentity(run.rank, 0, ranks, local_world_size=1)
    os.environ.update(create_regions(1))
    steps = run.case["steps"]
    copies = MemoryCheckpoints(run.args, rank, run.warnings.append)
    assert copies.find(run.state) is None
    for _ in range(steps):
        run.train(1)
        with gathered_parameters(run.args, run.state.chunks):
            copies.save(run.state)
    copies.close()
    expected = run.train(steps)

    reset_megatron_state()
    restarted = Run(run.case, rank, run.device)
    if run.rank == 1:
        os.environ.update(create_regions(1))
    copies = MemoryCheckpoints(restarted.args, rank, restarted.warnings.append)
    found = copies.find(restarted.state)
    report = copies.restore(restarted.state, found) if found is not None else None
    restored = restarted.train(steps)
    return run.build_result(expected=expected, restored=restored, found=found, memory_report=report)


def count_state_elements(run: Run) -> dict[str, int]:
    """Return the elements of weights and optimizer state that this rank saves, and the model's."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    from flagscale.train.checkpoint.writing import separate_storages
    from flagscale.train.step import gathered_parameters

    with gathered_parameters(run.args, run.state.chunks):
        state_dict = run.checkpointer._build_state_dict(run.state)
    state_dict, _ = save_preprocess(state_dict, False)
    separate_storages(state_dict)
    sizes = {"optimizer": 0, "model": 0}
    for name, part in state_dict.items():
        key = name.rstrip(
            "0123456789"
        )  # there are several models in a pipeline with virtual stages
        for tensor in nested_values(part) if key in sizes else ():
            data = tensor.data if isinstance(tensor, ShardedBase) else None
            if hasattr(data, "untyped_storage"):
                sizes[key] += data.untyped_storage().nbytes() // data.itemsize
    weights = sum(p.numel() for module in run.state.modules() for p in module.parameters())
    return {"state_size": sizes["optimizer"], "weights_size": sizes["model"], "weights": weights}


class RouterMargins:
    """Context manager that records how clearly routers choose experts.

    Attributes:
        minimum: smallest difference between the logits of the last expert that a token is sent to
            and of the next one; infinite without experts.
    """

    def __init__(self) -> None:
        from megatron.core.transformer.moe.router import TopKRouter

        self.minimum = float("inf")
        self._router_class = TopKRouter
        self._routing = TopKRouter.routing

    def __enter__(self) -> RouterMargins:
        def routing(router: Any, logits: Any, *args: Any, **options: Any) -> Any:
            highest = logits.detach().flatten(0, -2).topk(router.topk + 1).values
            margin = float((highest[:, -2] - highest[:, -1]).min())
            self.minimum = min(self.minimum, margin)
            return self._routing(router, logits, *args, **options)

        self._router_class.routing = routing
        return self

    def __exit__(self, *_: object) -> None:
        self._router_class.routing = self._routing


def train_frozen(run: Run) -> dict[str, Any]:
    """Train ``steps`` with frozen parameters.

    The reference trains all parameters, but sets the gradients of those that match the patterns
    ``masked`` to zero.
    """
    import torch

    from flagscale.config.arguments.rules.freezing import select_frozen
    from flagscale.train.models.initialize import iter_parameter_names

    parameters = {
        names[0]: parameter
        for module in run.state.modules()
        for names, parameter in iter_parameter_names(module, run.config)
    }
    patterns = run.case.get("masked") or run.args.freeze_parameters
    frozen = select_frozen({"freeze_parameters": patterns}, parameters)
    before = {name: parameters[name].detach().clone() for name in frozen}
    run.train(0)
    finalize = run.config.finalize_model_grads_func

    def finalize_and_mask(*args: Any, **options: Any) -> None:
        finalize(*args, **options)
        for name in frozen:
            parameters[name].main_grad.zero_()

    if run.case.get("masked"):
        run.config.finalize_model_grads_func = finalize_and_mask
    metrics = run.train(run.case["steps"])
    with unsharded_parameters(run.args, run.state.chunks):
        barrier()
    members = getattr(run.state.optimizer, "chained_optimizers", [run.state.optimizer])
    states = [s for m in members if m.optimizer is not None for s in m.optimizer.state.values()]
    buffers = [b for c in run.state.chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
    return run.build_result(
        **metrics,
        frozen=len(frozen),
        changed=[n for n in frozen if not torch.equal(before[n], parameters[n])],
        trained_size=sum(p.numel() for n, p in parameters.items() if n not in frozen),
        state_size=sum(state["exp_avg"].numel() for state in states),
        gradient_size=sum(buffer.grad_data.numel() for buffer in buffers),
        weights={
            name: [float(p.double().sum()), float(p.double().abs().sum())]
            for name, p in parameters.items()
        },
    )


def switch_and_go_on(run: Run) -> dict[str, Any]:
    """Train ``steps``, give optimizer and schedule the hyperparameters of ``switched_argv``, and
    train ``steps_after``. No checkpoint is involved."""
    from flagscale.config.arguments.derive import derive_arguments
    from flagscale.config.arguments.spec.command_line import parse_arguments
    from flagscale.train.optim.setup import build_scheduler

    first = run.train(run.case["steps"])
    args = derive_arguments(parse_arguments(run.case["switched_argv"]), 1)
    for group in run.state.optimizer.param_groups:
        group["max_lr"], group["min_lr"] = args.lr, args.min_lr
        if not group["default_config"] and args.decoupled_lr is not None:
            group["max_lr"] = args.decoupled_lr
            if args.decoupled_min_lr is not None:
                group["min_lr"] = args.decoupled_min_lr
        if "betas" in group:
            group["betas"], group["eps"] = (args.adam_beta1, args.adam_beta2), args.adam_eps
        if "lion_betas" in group:
            group["lion_betas"] = (args.lion_beta1, args.lion_beta2)
        else:
            group["momentum"] = args.sgd_momentum
    position = run.state.scheduler.num_steps
    run.state.scheduler = build_scheduler(args, run.state.optimizer)
    run.state.scheduler.step(position)
    second = run.train(run.case["steps_after"])
    return run.build_result(**{name: first[name] + second[name] for name in first})


def evaluate(run: Run) -> dict[str, Any]:
    """Load and evaluate the training data of one step."""
    from flagscale.train.data.datasets import build_data_iterators
    from flagscale.train.step import Stepper

    run.load()
    data_args = argparse.Namespace(**{**vars(run.args), "skip_train": False})
    data = build_data_iterators(data_args, run.tokenizer, run.state.progress, model_chunks=1)
    stepper = Stepper(run.args, run.config, run.state, run.device, groups=run.groups)
    return run.build_result(loss=[stepper.evaluate(data.train, 1).loss])


def save_each_step(run: Run) -> dict[str, Any]:
    """Train ``steps`` and save after each; poll as the training loop does."""
    polled: list[int] = []
    if run.args.load:
        run.load()
    for _ in range(run.case["steps"]):
        run.train(1)
        run.save()
        polled += [item.iteration for item in run.checkpointer.poll()]
    run.checkpointer.close()
    polled += [item.iteration for item in run.checkpointer.poll()]
    return run.build_result(polled=polled)


def load_only(run: Run) -> dict[str, Any]:
    """Load; return the next random numbers and a checksum of the weights."""
    import numpy as np
    import torch

    run.load()
    next_random_numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    weight_sum = sum(
        float(p.double().abs().sum()) for m in run.state.modules() for p in m.parameters()
    )
    return run.build_result(next_random_numbers=next_random_numbers, weight_sum=weight_sum)


def draw_and_save(run: Run) -> dict[str, Any]:
    """Draw random numbers, save before the first step, return the next random numbers."""
    import numpy as np
    import torch

    for _ in range(3 + run.rank):
        random.random(), np.random.rand(), torch.rand(())
    run.save()
    run.checkpointer.close()
    next_random_numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return run.build_result(next_random_numbers=next_random_numbers)


def fail_in_the_middle(run: Run) -> dict[str, Any]:
    """Save; let the next save fail on some ranks; check that training continues and saves again."""
    run.train(1)
    run.save(required=True)
    run.train(1)
    with WriteFailure(run):
        run.save()
        while run.checkpointer._pending_save is not None:
            run.checkpointer.poll()
    names_during_failure = list_checkpoints(run.args.save)
    barrier()
    metrics_after_failure = run.train(1)
    run.save()
    run.checkpointer.close()
    return run.build_result(names_during_failure=names_during_failure, **metrics_after_failure)


def fail_at_the_end(run: Run) -> dict[str, Any]:
    """Let the last save fail, the first one with ``alone``: closing raises on every rank."""
    run.train(1)
    if not run.case.get("alone"):
        run.save(required=True)
        run.train(1)
    with WriteFailure(run):
        run.save()
        try:
            run.checkpointer.close()
        except Exception as error:  # noqa: BLE001 - the test checks its type
            return run.build_result(error=str(error), kind=type(error).__name__)
    return run.build_result(error=None)


class WriteFailure:
    """Context manager that makes writing fail on the ranks of ``trouble_ranks``.

    It fills the disk (``fill``) or limits the size of files.
    """

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
    """Kill the background writer process on one rank."""
    import multiprocessing

    from flagscale.train.checkpoint import writing

    run.train(1)
    run.save()
    original = writing.write_buckets
    # Only the forked process calls it; it sleeps until it is killed.
    writing.write_buckets = lambda *_: signal.pause() if run.rank == 1 else original(*_)
    run.train(1)
    run.save()
    writing.write_buckets = original
    polled_before = [item.iteration for item in run.checkpointer.poll()]
    if run.rank == 1:
        for child in multiprocessing.active_children():
            child.kill()
    run.checkpointer._finish_pending_save()
    run.train(1)
    run.save()
    run.checkpointer.close()
    return run.build_result(polled_before=polled_before)


def lose_the_storage(run: Run) -> dict[str, Any]:
    """Save in object storage on a disk (file://); replace it by a file during the second save, once
    the checkpoint is marked as incomplete.
    """
    from flagscale.checkpoints import PARTIAL_MARK

    root = Path(run.args.save.removeprefix("file://"))
    run.train(1)
    run.save(required=True)
    run.train(1)
    run.save()
    barrier()
    if run.rank == 0:
        while not (root / "iter_0000002" / PARTIAL_MARK).exists():
            time.sleep(0.01)
        root.rename(root.with_name("moved"))
        root.write_text("")
    barrier()
    while run.checkpointer._pending_save is not None:
        run.checkpointer.poll()
    barrier()
    if run.rank == 0:
        root.unlink()
        root.with_name("moved").rename(root)
    barrier()
    staged = list_checkpoints(run.args.save_staging_dir)
    run.train(1)
    run.save()
    run.checkpointer.close()
    return run.build_result(staged=staged)


def change_faults(faults: dict[str, float]) -> dict[str, int]:
    """Replace the faults of the proxy in front of the S3 server; return its counts."""
    from s3_lab import set_faults

    return set_faults(os.environ["AWS_ENDPOINT_URL"], faults)


def set_faults(run: Run) -> dict[str, Any]:
    """Replace the faults of the storage; return how often each has occurred."""
    counts = change_faults(run.case["faults"]) if run.rank == 0 else {}
    barrier()
    return {"counts": counts}


def load_single_chunks(run: Run) -> dict[str, Any]:
    """Load; do not read what is between chunks, although a tiny model has little of it."""
    from flagscale.train.checkpoint import range_reader

    range_reader._MAX_GAP_BYTES = 0
    return load_only(run)


def deny_an_upload(run: Run) -> dict[str, Any]:
    """Save three times; the storage denies access during the second save."""
    from flagscale.checkpoints import StoredCheckpoints, open_checkpoints

    for step in range(3):
        run.train(1)
        barrier()
        if run.rank == 0:
            change_faults({"denied": 1} if step == 1 else {})
        barrier()
        run.save()
        while run.checkpointer._pending_save is not None:
            run.checkpointer.poll()
    run.checkpointer.close()
    checkpoints = open_checkpoints(run.args.save)
    assert isinstance(checkpoints, StoredCheckpoints)
    latest = checkpoints.find_latest()
    assert latest is not None
    stored_bytes = sum(checkpoints.files(latest.path.name).values())
    return run.build_result(latest=latest.iteration, stored_bytes=stored_bytes)


def damage_stored_tensors(run: Run) -> dict[str, Any]:
    """Change bits of the stored tensors of ``checkpoint``, and copy the staging directory
    to ``copy`` with the manifest of another save.
    """
    if run.rank == 0:
        root = Path(run.args.save.removeprefix("file://"))
        for path in (root / run.case["checkpoint"]).glob("*.distcp"):
            content = bytearray(path.read_bytes())
            middle = len(content) // 2
            content[middle : middle + 64] = bytes(64)
            path.write_bytes(content)
        copy = Path(run.case["copy"])
        shutil.copytree(run.args.save_staging_dir, copy)
        copy.chmod(0o700)
        manifest = copy / run.case["checkpoint"] / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"save_id": "', '"save_id": "0'))
    barrier()
    return {}


def kill_the_uploader(run: Run) -> dict[str, Any]:
    """Kill the process that uploads, on one rank: during the second save, and after the third."""

    def signal_uploader(*numbers: signal.Signals) -> None:
        if run.rank == 1:
            for number in numbers:
                os.kill(run.checkpointer._uploads._process._process.pid, number)

    run.train(1)
    run.save(required=True)
    run.train(1)
    signal_uploader(signal.SIGSTOP)  # so that it has not uploaded before it is killed
    run.save()
    run.checkpointer._continue_pending_save(run.checkpointer._pending_save)
    signal_uploader(signal.SIGKILL)
    run.checkpointer._finish_pending_save()
    run.train(1)
    run.save()
    run.checkpointer._finish_pending_save()
    signal_uploader(signal.SIGKILL)
    run.train(1)
    run.save()
    run.checkpointer.close()
    return run.build_result()


def damage(run: Run) -> dict[str, Any]:
    """Apply ``edits`` to files.

    ``[path, size]`` truncates a file, ``[path, None]`` deletes it, ``[path, text]`` writes it.
    """
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
