"""Log-likelihoods and next tokens of token sequences, computed on all ranks of a layout.

Sequences are packed into rows of ``seq_length`` tokens, so that forward passes have the shapes of
training: nothing is compiled a second time for another length, and training continues with the
kernels that it had. Attention does not cross the sequences of a row. The rows are distributed over
the data-parallel replicas. Every rank passes equal sequences and receives all results.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.train.data.chat.packing import pack_best_fit
from flagscale.train.device import Device
from flagscale.train.models.base import get_model_spec
from flagscale.train.models.context_parallel import split_batch
from flagscale.train.models.document_mask import DocumentMaskBuilder
from flagscale.train.state import unwrap_model

_TOKENS_PER_SEQUENCE = 128
_MIN_SEQUENCES = 16
"""A micro-batch holds at most one sequence per so many tokens, but at least this many. Document
masks then have the size that they have in training on packed documents."""


class ScoredSequence(NamedTuple):
    """Tokens of which the last ``scored_count`` are scored, given all tokens before each."""

    tokens: Sequence[int]
    scored_count: int


class Score(NamedTuple):
    """Log-likelihood of a sequence's scored tokens in nats.

    ``is_greedy``: each of these tokens is the most likely one at its position.
    """

    log_likelihood: float
    is_greedy: bool


class _Request(NamedTuple):
    """Input tokens of a sequence, and the tokens to score at its last positions."""

    inputs: Sequence[int]
    targets: Sequence[int]


class SequenceScorer:
    """Scores token sequences with a model in any homogeneous parallel layout."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: TransformerConfig,
        chunks: Sequence[Any],
        device: Device,
        vocabulary: int,
    ) -> None:
        """Prepare forward passes of a model.

        Args:
            args: resolved arguments of this rank.
            config: the model's configuration.
            chunks: this rank's model chunks.
            device: device of this rank.
            vocabulary: number of tokens; logits beyond it are padding and have no probability.
        """
        self._args, self._chunks, self._vocabulary = args, chunks, vocabulary
        self._device, self._spec = device.torch_device, get_model_spec(args)
        self._mask_builder: DocumentMaskBuilder | None = None
        self._max_sequences = 1
        if can_separate_sequences(args):
            self._mask_builder = DocumentMaskBuilder(config, device)
            capacity = args.seq_length * args.micro_batch_size // _TOKENS_PER_SEQUENCE
            capacity = max(capacity, _MIN_SEQUENCES)
            # The padding at the end of a row counts as a sequence.
            self._max_sequences = max(1, capacity // args.micro_batch_size - 1)

    @property
    def max_length(self) -> int:
        """Largest number of input tokens of a sequence."""
        return int(self._args.seq_length)

    def score(self, sequences: Sequence[ScoredSequence]) -> list[Score]:
        """Return the score of each sequence. Collective.

        A sequence has at most :attr:`max_length` + 1 tokens, and the first one is not scored.
        """
        requests = [
            _Request(item.tokens[:-1], item.tokens[len(item.tokens) - item.scored_count :])
            for item in sequences
        ]
        return [
            Score(log_likelihood, mismatches == 0)
            for log_likelihood, mismatches, _ in self._run(requests)
        ]

    def predict_next(self, sequences: Sequence[Sequence[int]]) -> list[int]:
        """Return the most likely next token of each sequence. Collective.

        A sequence has 1 to :attr:`max_length` tokens.
        """
        return [int(token) for _, _, token in self._run([_Request(ids, [0]) for ids in sequences])]

    @torch.no_grad()
    def _run(self, requests: Sequence[_Request]) -> list[list[float]]:
        """Return three numbers per request: the sum of its targets' log-probabilities, the number
        of targets that are not the most likely token, and the sum of the most likely tokens.
        """
        results = torch.zeros(len(requests), 3, dtype=torch.float64, device=self._device)
        if not requests:
            return []
        batches = self._assign_rows(requests)
        iterators = [(self._build_batch(rows, requests) for rows in batches) for _ in self._chunks]
        modes = [chunk.training for chunk in self._chunks]
        for chunk in self._chunks:
            chunk.eval()
        data: Any = iterators if len(self._chunks) > 1 else iterators[0]
        get_forward_backward_func()(
            forward_step_func=partial(self._forward_step, results),
            data_iterator=data,
            model=list(self._chunks),
            num_microbatches=len(batches),
            seq_length=self._args.seq_length,
            micro_batch_size=self._args.micro_batch_size,
            forward_only=True,
            collect_non_loss_data=True,
        )
        for chunk, was_training in zip(self._chunks, modes, strict=True):
            chunk.train(was_training)
        dist.all_reduce(results)
        values: list[list[float]] = results.tolist()
        return values

    def _assign_rows(self, requests: Sequence[_Request]) -> list[list[list[int]]]:
        """Return this replica's micro-batches: the indices of the requests of each row.

        All replicas have equally many, because parallel layers of several replicas may communicate.
        """
        lengths = np.array([len(request.inputs) for request in requests], dtype=np.int64)
        longest_first = np.argsort(-lengths, kind="stable")
        rows = pack_best_fit(
            longest_first, lengths, self._args.seq_length, max_members=self._max_sequences
        )
        replicas = parallel_state.get_data_parallel_world_size()
        replica = parallel_state.get_data_parallel_rank()
        batch_size = self._args.micro_batch_size
        # The interleaved schedule requires a multiple of the number of stages.
        multiple = self._args.pipeline_model_parallel_size if len(self._chunks) > 1 else 1
        count = math.ceil(len(rows) / (batch_size * replicas * multiple)) * multiple
        rows += [[] for _ in range(count * replicas * batch_size - len(rows))]
        own_rows = rows[replica::replicas]
        begins = range(0, len(own_rows), batch_size)
        return [own_rows[begin : begin + batch_size] for begin in begins]

    def _build_batch(
        self, rows: Sequence[Sequence[int]], requests: Sequence[_Request]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors [b, s] of a micro-batch.

        At a position that is scored, ``targets`` is the token to score and ``requests`` the index
        of its request; elsewhere ``requests`` is -1.
        """
        shape = (len(rows), self._args.seq_length)
        batch = {
            "tokens": torch.zeros(shape, dtype=torch.int64),
            "position_ids": torch.zeros(shape, dtype=torch.int64),
            "targets": torch.zeros(shape, dtype=torch.int64),
            "requests": torch.full(shape, -1, dtype=torch.int64),
            "documents": torch.zeros(shape, dtype=torch.int64),
        }
        for row, members in enumerate(rows):
            end = 0
            for number, index in enumerate(members):
                inputs, targets = requests[index]
                begin, end = end, end + len(inputs)
                scored = slice(end - len(targets), end)
                batch["tokens"][row, begin:end] = torch.tensor(inputs)
                batch["position_ids"][row, begin:end] = torch.arange(len(inputs))
                batch["documents"][row, begin:end] = number
                batch["targets"][row, scored] = torch.tensor(targets)
                batch["requests"][row, scored] = index
            batch["position_ids"][row, end:] = torch.arange(shape[1] - end)
            batch["documents"][row, end:] = len(members)
        return batch

    def _forward_step(
        self, results: torch.Tensor, iterator: Iterator[Mapping[str, torch.Tensor]], model: Any
    ) -> Any:
        """Run the forward pass of one micro-batch, as pipeline schedules call it.

        Returns:
            The logits, and a function that adds what they say to ``results``.
        """
        inner_model: Any = unwrap_model(model)
        group = parallel_state.get_context_parallel_group()
        whole_batch = dict(next(iterator))
        documents = whole_batch.pop("documents")
        batch = dict(split_batch(whole_batch, group.rank(), group.size()))
        targets, requests = (batch.pop(key).to(self._device) for key in ("targets", "requests"))
        if self._mask_builder is not None:
            batch["attention_mask"] = self._mask_builder(documents)
        inputs = self._spec.inputs(
            {**batch, "labels": None},  # type: ignore[dict-item] # no labels: logits, not losses
            first=inner_model.pre_process,
            last=inner_model.post_process,
        )
        output = model(
            **{
                name: None if tensor is None else tensor.to(self._device)
                for name, tensor in inputs.items()
            }
        )
        return output, partial(_add_results, results, targets, requests, self._vocabulary)


def can_separate_sequences(args: argparse.Namespace) -> bool:
    """Return whether attention can be restricted to the sequences of a row."""
    if args.attention_backend == "fused":
        return False
    return not (args.window_size and args.attention_backend == "local")


def _add_results(
    results: torch.Tensor,
    targets: torch.Tensor,
    requests: torch.Tensor,
    vocabulary: int,
    logits: torch.Tensor,
    *,
    non_loss_data: bool = True,
) -> torch.Tensor:
    """Add the results of this rank's part of a micro-batch.

    Args:
        results: sums of :meth:`SequenceScorer._run`, [requests, 3]. Of the tensor-parallel ranks,
            which compute the same, only the first one adds to them.
        targets: tokens to score, [b, s].
        requests: request of each position, or -1, [b, s].
        vocabulary: number of tokens; logits beyond it are padding.
        logits: [b, s, vocabulary / tensor-parallel size].
    """
    del non_loss_data
    is_scored = requests >= 0
    if is_scored.any():
        targets = targets[is_scored]
        log_probabilities, likeliest = score_tokens(logits[is_scored], targets, vocabulary)
        mismatches = likeliest != targets
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            values = [log_probabilities.double(), mismatches.double(), likeliest.double()]
            results.index_add_(0, requests[is_scored], torch.stack(values, 1))
    return results.new_zeros(())


def score_tokens(
    logits: torch.Tensor, targets: torch.Tensor, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each target and the most likely token at its position.

    Args:
        logits: this rank's shard of the vocabulary, [positions, vocabulary / tensor-parallel size].
        targets: [positions].
        vocabulary: number of tokens; logits beyond it are padding.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    shard_size = logits.shape[-1]
    offset = group.rank() * shard_size
    logits = logits.float()
    if offset + shard_size > vocabulary:
        logits[:, max(vocabulary - offset, 0) :] = -torch.inf
    local_maximum, local_index = logits.max(-1)
    maximum = local_maximum.clone()
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    # Of equally likely tokens the first one, as argmax over the whole vocabulary.
    likeliest = torch.where(local_maximum == maximum, local_index + offset, vocabulary)
    dist.all_reduce(likeliest, dist.ReduceOp.MIN, group=group)
    is_local = (targets >= offset) & (targets < offset + shard_size)
    local_targets = (targets - offset).clamp(0, shard_size - 1)
    target_logits = logits.gather(-1, local_targets[:, None])[:, 0]
    sums = torch.stack(
        [(logits - maximum[:, None]).exp().sum(-1), target_logits.where(is_local, 0.0)]
    )
    dist.all_reduce(sums, group=group)
    return sums[1] - maximum - sums[0].log(), likeliest
