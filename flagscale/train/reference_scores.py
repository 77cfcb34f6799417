"""Log-probabilities of answers under the reference model of preference training.

The reference model is ``pretrained_checkpoint``, with which training starts. It scores all pairs
once, before the first step, so that training holds one model only. The scores of a file are kept
next to its tokens (:mod:`flagscale.train.data.chat.token_cache`), in a file named by a hash of the
weights and of everything else that they depend on. Later attempts, resumed runs and other runs with
the same weights and data read them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray

from flagscale.config.arguments.layout import sequences_per_sample
from flagscale.config.arguments.rules.resume_effects import FUNCTION
from flagscale.errors import CheckpointError, DataError, JobError
from flagscale.train.checkpoint.collective_errors import (
    describe_error,
    run_on_rank_0,
    run_while_polling,
)
from flagscale.train.checkpoint.formats.base import StoredModel, detect_format
from flagscale.train.checkpoint.formats.lazy_tensors import iter_bytes
from flagscale.train.data.chat.conversation_sets import ConversationSets, sequence_settings
from flagscale.train.data.chat.packed_preferences import (
    REFERENCE_KEY,
    PackedPreferences,
    collate_pairs,
)
from flagscale.train.data.chat.token_cache import TokenizedSamples
from flagscale.train.data.datasets import get_rank_shard
from flagscale.train.data.samplers import MicroBatchSampler
from flagscale.train.device import Device
from flagscale.train.forward_step import LossResult
from flagscale.train.models.base import BATCH_KEYS, DOCUMENT_NUMBERS_KEY, get_model_spec
from flagscale.train.models.document_mask import DocumentMaskBuilder
from flagscale.train.preference_loss import (
    SEQUENCE_NUMBERS_KEY,
    PairForwardStep,
    PairSums,
    PairTensors,
)
from flagscale.train.report import TrainingReporter
from flagscale.train.state import TrainState
from flagscale.train.step import gathered_parameters

Scores = NDArray[np.float64]
"""Log-probabilities in nats of chosen and rejected answers, [pairs, 2]; NaN for pairs that are left
out because they are too long."""

_VERSION = "1"
_SCORES_REPORT_KEY = "scores"
_NUMERICS = (
    *("bf16", "fp16", "fp8", "fp8_recipe", "attention_softmax_in_fp32", "enable_autocast"),
    *("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    *("moe_expert_capacity_factor", "moe_token_drop_policy", "moe_router_dtype"),
    *("moe_router_force_load_balancing", "apply_query_key_layer_scaling"),
)
"""Arguments that change the numbers that a model computes, apart from :data:`FUNCTION`."""
_EMBEDDING = "embedding.word_embeddings.weight"
_HASHING_THREADS = 8
_ACTIVITY = "scoring the reference"
_SECONDS_BETWEEN_REPORTS = 30


def provide_reference(
    args: argparse.Namespace,
    config: TransformerConfig,
    state: TrainState,
    device: Device,
    conversation_sets: ConversationSets,
    vocabulary: int,
    reporter: TrainingReporter,
    load_reference_model: Callable[[], None],
) -> bool:
    """Give each pair the scores of the reference model. Collective: all ranks call it.

    Args:
        args: resolved arguments of this rank.
        config: the model's configuration.
        state: training state, without a loaded checkpoint. Its weights are overwritten if files
            have to be scored.
        device: device of this rank.
        conversation_sets: the datasets of pairs.
        vocabulary: size of the padded vocabulary.
        reporter: gets progress and messages.
        load_reference_model: loads the weights of the reference model into ``state``.

    Returns:
        Whether the weights of the reference model have been loaded.

    Raises:
        CheckpointError: the reference model cannot be read.
        DataError: scores cannot be written.
        JobError: a score is not finite.
    """
    reporter.write_progress(0, _ACTIVITY)
    name = f"reference-{_compute_key(args, vocabulary)}.npy"
    scores_by_path: dict[Path, Scores] = {}
    is_loaded = False
    for samples in conversation_sets.files:
        path = samples.directory / name
        dataset = _build_dataset(args, samples)
        if dataset is None:
            continue  # all its pairs are too long, so no dataset has one
        scores = run_on_rank_0(partial(read_scores, path, dataset))
        if scores is None:
            if not is_loaded:
                load_reference_model()
                is_loaded = True
            scores = _score_pairs(args, config, state, device, dataset, reporter)
            _write_scores(path, scores)
        else:
            reporter.log(f"scores of the reference model for {samples.path.name}: {path}")
        scores_by_path[samples.path] = scores
    for packed in conversation_sets.list_datasets():
        assert isinstance(packed, PackedPreferences)
        packed.set_reference(scores_by_path)
    return is_loaded


def _build_dataset(args: argparse.Namespace, samples: TokenizedSamples) -> PackedPreferences | None:
    """Build the dataset of all pairs of a file; None if all are left out."""
    indices = np.arange(PackedPreferences.count_samples(samples))
    settings = sequence_settings(args)
    if settings.long_conversations == "refuse":  # the datasets of the run have refused theirs
        settings = replace(settings, long_conversations="drop")
    try:
        return PackedPreferences("the reference", [(samples, indices)], settings)
    except DataError:
        return None


def _compute_key(args: argparse.Namespace, vocabulary: int) -> str:
    """Compute a hash of what scores depend on, except for the tokens. Collective."""
    error, identity = "", None

    def identify_model() -> tuple[str, int] | None:
        if dist.get_rank():
            return None
        path = Path(args.pretrained_checkpoint)
        model = detect_format(path).read(path)
        return hash_weights(model), model.tensors[_EMBEDDING].shape[0]

    try:
        identity = run_while_polling(identify_model)
    except CheckpointError as problem:
        error = problem.message
    except (OSError, RuntimeError) as problem:
        error = f"{args.pretrained_checkpoint} cannot be read: {describe_error(problem)}"

    def raise_or_return() -> tuple[str, int] | None:
        if error:
            raise CheckpointError(error)
        return identity

    identity = run_on_rank_0(raise_or_return)
    assert identity is not None
    digest, rows = identity
    # Rows that pad the vocabulary are drawn by the seed, and take part in the softmax.
    padding = (vocabulary, args.seed) if vocabulary > rows else None
    settings = {name: vars(args)[name] for name in (*FUNCTION, *_NUMERICS)}
    limits = (args.seq_length, args.sft_too_long)
    text = repr((_VERSION, digest, padding, limits, sorted(settings.items())))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def hash_weights(model: StoredModel) -> str:
    """Compute a hash of a model's weights, equal in every format and division into files."""

    def hash_tensor(name: str) -> bytes:
        tensor = model.tensors[name]
        digest = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for block in iter_bytes(tensor):
            digest.update(block)
        return digest.digest()

    total = hashlib.blake2b()
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        for tensor_digest in pool.map(hash_tensor, sorted(model.tensors)):
            total.update(tensor_digest)
    return total.hexdigest()


def read_scores(path: Path, dataset: PackedPreferences) -> Scores | None:
    """Read the scores of a file of pairs.

    Args:
        path: file of scores.
        dataset: dataset of all pairs of the file.

    Returns:
        None if there are no scores, or if they are damaged, which is reported.
    """
    try:
        scores: Scores = np.load(path)
    except FileNotFoundError:
        return None
    except (ValueError, EOFError):
        scores = np.empty(0)
    count = int(dataset.used_pairs.max()) + 1
    is_whole = scores.ndim == 2 and scores.shape[1] == 2 and len(scores) >= count
    if not is_whole or not np.isfinite(scores[dataset.used_pairs]).all():
        print(f"warning: {path}: damaged; the reference model scores the pairs anew", flush=True)
        return None
    return scores


def _write_scores(path: Path, scores: Scores) -> None:
    """Write scores atomically. Collective: rank 0 writes, because it has read the weights."""

    def write() -> str:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            with temporary.open("wb") as file:
                np.save(file, scores)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            return describe_error(error)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return ""

    if problem := run_on_rank_0(write):
        raise DataError(
            f"{path}: the scores of the reference model cannot be written: {problem}",
            hint="set data_cache_path to a directory that all hosts can write",
        )


@torch.no_grad()
def _score_pairs(
    args: argparse.Namespace,
    config: TransformerConfig,
    state: TrainState,
    device: Device,
    dataset: PackedPreferences,
    reporter: TrainingReporter,
) -> Scores:
    """Compute the scores of all pairs of a dataset with the current weights. Collective."""
    (path,) = dataset.paths
    pair_count = int(dataset.used_pairs.max()) + 1
    # Sums of scores, and how often each pair was scored: the last step may repeat pairs.
    totals = torch.zeros(pair_count, 3, dtype=torch.float64, device=device.torch_device)
    forward_step = PairForwardStep(
        get_model_spec(args),
        device,
        mask_builder=DocumentMaskBuilder(config, device),
        finish=_report_scores,
    )
    batches = [_iter_batches(args, dataset) for _ in state.chunks]
    step_count = -(-len(dataset) // args.global_batch_size)
    last_report = begin = time.monotonic()
    for chunk in state.chunks:
        chunk.eval()
    with gathered_parameters(args, state.chunks):
        for step in range(step_count):
            reports = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches if len(batches) > 1 else batches[0],
                model=state.chunks,
                num_microbatches=args.num_microbatches,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size * sequences_per_sample(vars(args)),
                forward_only=True,
            )
            for report in reports:
                _add_scores(totals, dataset, *report[_SCORES_REPORT_KEY])
            if time.monotonic() - last_report > _SECONDS_BETWEEN_REPORTS:
                last_report = time.monotonic()
                reporter.log(f"{path.name}: {step + 1:,} of {step_count:,} steps are scored")
    for chunk in state.chunks:
        chunk.train()
    # Tensor- and context-parallel ranks have the same pairs, which cancels in the quotient.
    dist.all_reduce(totals)
    sums, counts = totals[:, :2], totals[:, 2:]
    scores: Scores = torch.where(counts > 0, sums / counts, torch.nan).cpu().numpy()
    if not np.isfinite(scores[dataset.used_pairs]).all():
        raise JobError(
            f"{path}: the reference model {args.pretrained_checkpoint} gives an answer a "
            "log-probability that is not finite",
            hint="look at its precision (bf16, fp16) and at its weights",
        )
    reporter.log(
        f"the reference model scored {len(dataset.used_pairs):,} pairs of {path.name} in "
        f"{time.monotonic() - begin:.1f} s; later starts read the scores"
    )
    return scores


def _iter_batches(
    args: argparse.Namespace, dataset: PackedPreferences
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the micro-batches of this rank, without end."""
    sampler = MicroBatchSampler(len(dataset), get_rank_shard(args), order="wrapped")
    keys = (*BATCH_KEYS, DOCUMENT_NUMBERS_KEY, REFERENCE_KEY)
    for indices in sampler:
        batch = collate_pairs([dataset[index] for index in indices], keys=keys)
        yield {**batch, SEQUENCE_NUMBERS_KEY: torch.tensor(indices)}


def _report_scores(sums: PairSums, pair_tensors: PairTensors) -> LossResult:
    """Return the log-probabilities as the report of a micro-batch, without a loss."""
    numbers = pair_tensors[SEQUENCE_NUMBERS_KEY]
    report: dict[str, Any] = {_SCORES_REPORT_KEY: (numbers, sums.logps.detach())}
    count = torch.ones((), dtype=torch.int, device=sums.logps.device)
    return sums.logps.sum().float(), count, report


def _add_scores(
    totals: torch.Tensor, dataset: PackedPreferences, numbers: torch.Tensor, logps: torch.Tensor
) -> None:
    """Add the log-probabilities of the samples ``numbers`` to the totals of their pairs."""
    for sample, index in enumerate(numbers.tolist()):
        pairs = torch.from_numpy(dataset.pairs_of(index)).to(totals.device)
        totals[pairs, :2] += logps[:, sample, : len(pairs)].T
        totals[pairs, 2] += 1
