"""Loss of preference training: direct preference optimization (DPO).

Rafailov et al., "Direct Preference Optimization", 2023; label smoothing as in Mitchell, "A note on
DPO with noisy preferences", 2023; Azar et al., "A General Theoretical Paradigm to Understand
Learning from Human Preferences", 2023 (IPO).

A sample has two sequences, of chosen and of rejected answers, in adjacent rows of a micro-batch. A
pair has the same document number in both (:mod:`flagscale.train.data.chat.packed_preferences`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.nn import functional

from flagscale.train.data.chat.packed_preferences import REFERENCE_KEY
from flagscale.train.device import Device
from flagscale.train.forward_step import (
    LOSS_REPORT_KEY,
    ForwardStep,
    LossResult,
    MicroBatchTensors,
    PreparedMicroBatch,
)
from flagscale.train.models.base import DOCUMENT_NUMBERS_KEY, ModelSpec
from flagscale.train.models.context_parallel import split_batch
from flagscale.train.models.document_mask import DocumentMaskBuilder

SEQUENCE_NUMBERS_KEY = "sequence_numbers"
"""Key of the tensor [samples] with the number of each sample in its dataset; optional."""
PAIR_KEYS = (REFERENCE_KEY, SEQUENCE_NUMBERS_KEY)
"""Keys of the tensors of a micro-batch that the model does not take."""
REWARDS_REPORT_KEY = "reward_sums"
"""Key of a micro-batch's rewards in its report, a tensor of shape [4]: the sums over its pairs of
the rewards of chosen and of rejected answers and of the accuracies, and the number of pairs."""
REWARD_NAMES = ("chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy")
"""Names of the reported means over pairs."""


class PreferenceLoss(NamedTuple):
    """Loss of a pair. ``kind`` is ``sigmoid`` or ``ipo``; see the arguments ``dpo_…``."""

    beta: float
    kind: str = "sigmoid"
    label_smoothing: float = 0.0

    def __call__(self, ratios: Tensor, token_counts: Tensor) -> Tensor:
        """Return the loss of each pair.

        Args:
            ratios: log-probabilities of the chosen and the rejected answers minus those under the
                reference model, [2, …].
            token_counts: number of tokens of the answers, [2, …].
        """
        if self.kind == "ipo":
            chosen, rejected = ratios / token_counts.clamp(min=1)
            distance: Tensor = chosen - rejected - 1 / (2 * self.beta)
            return distance.square()
        margin = self.beta * (ratios[0] - ratios[1])
        loss: Tensor = -functional.logsigmoid(margin)
        loss_if_interchanged: Tensor = -functional.logsigmoid(-margin)
        return (1 - self.label_smoothing) * loss + self.label_smoothing * loss_if_interchanged


class PairSums(NamedTuple):
    """Sums over the tokens of answers, chosen and rejected, fp64 [2, samples, pairs].

    Attributes:
        logps: log-probabilities in nats.
        token_counts: numbers of tokens; zero where a sample has fewer pairs.
    """

    logps: Tensor
    token_counts: Tensor


PairTensors = Mapping[str, Tensor]
"""Tensors of a micro-batch that the model does not take, by :data:`PAIR_KEYS`."""
FinishPairs = Callable[[PairSums, PairTensors], LossResult]
"""Function of a micro-batch that returns the loss of its pairs."""


class PairForwardStep(ForwardStep):
    """Forward step that sums the log-probabilities of answers, and hands them to a function."""

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        *,
        mask_builder: DocumentMaskBuilder,
        finish: FinishPairs,
        measure_data: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Create the forward step; ``finish`` computes the loss. See :class:`ForwardStep`."""
        super().__init__(
            spec,
            device,
            per_token=False,  # of the loss, which ``finish`` computes
            mask_builder=mask_builder,
            measure_data=measure_data,
        )
        self._finish = finish

    def __call__(
        self,
        iterator: Iterator[MicroBatchTensors | PreparedMicroBatch] | None,
        model: torch.nn.Module,
    ) -> tuple[Tensor, Callable[[Tensor], LossResult]]:
        assert iterator is not None
        with self._measure_data():
            micro_batch = next(iterator)
        assert not isinstance(micro_batch, PreparedMicroBatch)
        batch = dict(micro_batch)
        pair_tensors = {name: batch.pop(name) for name in PAIR_KEYS if name in batch}
        numbers = batch[DOCUMENT_NUMBERS_KEY]
        prepared = self.prepare(batch, model)
        if prepared.mask is not None:
            group = parallel_state.get_context_parallel_group()
            local = split_batch({DOCUMENT_NUMBERS_KEY: numbers}, group.rank(), group.size())
            numbers = self._to_device(local[DOCUMENT_NUMBERS_KEY])
            pair_tensors = {name: self._to_device(value) for name, value in pair_tensors.items()}
        output = model(**prepared.inputs)
        return output, partial(self._compute_loss, prepared.mask, numbers, pair_tensors)

    def _compute_loss(
        self, mask: Tensor | None, numbers: Tensor, pair_tensors: PairTensors, losses: Tensor
    ) -> LossResult:
        assert mask is not None  # on the last pipeline stage, which computes losses
        group = parallel_state.get_context_parallel_group()
        max_pairs = pair_tensors[REFERENCE_KEY].shape[-1]
        return self._finish(sum_by_pair(losses, mask, numbers, max_pairs, group), pair_tensors)


def sum_by_pair(
    losses: Tensor,
    mask: Tensor,
    numbers: Tensor,
    max_pairs: int,
    group: dist.ProcessGroup | None = None,
) -> PairSums:
    """Sum the log-probabilities of the tokens of each answer.

    Args:
        losses: cross-entropies in nats, [rows, s]. Rows are chosen and rejected in turn.
        mask: 1.0 for tokens of answers, [rows, s].
        numbers: number of the pair that a token belongs to, [rows, s].
        max_pairs: maximum number of pairs in a row.
        group: context-parallel group, whose ranks hold parts of the rows. The sums are over all
            parts; their gradients are those of this rank's part.
    """
    # One place behind those of the pairs is for padding.
    rows, width = len(numbers), max_pairs + 1
    begins = width * torch.arange(rows, device=numbers.device).unsqueeze(1)
    places = (begins + numbers.long().clamp(max=max_pairs)).flatten()

    def sum_tokens(values: Tensor) -> Tensor:
        sums = torch.zeros(rows * width, dtype=torch.float64, device=values.device)
        # torch has a deterministic algorithm for one dimension only.
        sums = sums.scatter_add(0, places, values.double().flatten())
        return sums.view(rows, width)[:, :max_pairs]

    logps, counts = -sum_tokens(losses * mask), sum_tokens(mask)
    if group is not None and group.size() > 1:
        totals = torch.stack((logps.detach(), counts))
        dist.all_reduce(totals, group=group)
        logps = logps + (totals[0] - logps.detach())
        counts = totals[1]
    return PairSums(_by_answer(logps), _by_answer(counts))


def _by_answer(rows: Tensor) -> Tensor:
    """Reorder [rows, pairs] to [2, samples, pairs]."""
    return torch.stack((rows[0::2], rows[1::2]))


def finish_training(
    loss: PreferenceLoss, per_pair: bool, sums: PairSums, pair_tensors: PairTensors
) -> LossResult:
    """Return the loss of a micro-batch.

    Args:
        loss: loss of a pair.
        per_pair: whether gradients are divided by the number of pairs of the whole step
            (``calculate_per_token_loss``) instead of that of the micro-batch.
        sums: the sums of the answers.
        pair_tensors: log-probabilities under the reference model, [2 x samples, pairs].

    Returns:
        Sum of the losses, number of pairs (int32), and a report.
    """
    ratios = sums.logps - _by_answer(pair_tensors[REFERENCE_KEY])
    exists = sums.token_counts[0] > 0
    ratios = torch.where(exists, ratios, 0.0)
    losses = torch.where(exists, loss(ratios, sums.token_counts), 0.0)
    total, count = losses.sum(), exists.sum()
    rewards = loss.beta * ratios.detach()
    correct = (rewards[0] > rewards[1]) & exists
    report = {
        LOSS_REPORT_KEY: torch.stack([total.detach(), count.double()]),
        REWARDS_REPORT_KEY: torch.stack(
            [rewards[0].sum(), rewards[1].sum(), correct.sum().double(), count.double()]
        ),
    }
    # All ranks of a context-parallel group have the loss of the same pairs, and gradients of their
    # own tokens. Gradients are summed over the group and divided by the pairs of all ranks, or
    # averaged over it.
    group = parallel_state.get_context_parallel_group()
    if not per_pair:
        total = total * group.size()
    elif group.rank():
        count = torch.zeros_like(count)
    return total.float(), count.to(torch.int), report


class RewardAverages:
    """Averages the rewards of pairs between two calls of :meth:`pop_averages`.

    The reward of an answer is beta times the log-ratio of its probabilities under the model and
    the reference model.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)

    def add(self, reports: Sequence[Mapping[str, Tensor]]) -> None:
        """Add the reports of micro-batches; those of other data have no rewards."""
        for report in reports:
            if REWARDS_REPORT_KEY in report:
                self._sums += report[REWARDS_REPORT_KEY]

    def pop_averages(self) -> dict[str, float]:
        """Return the means over all pairs on all ranks, and reset the sums. Collective.

        Tensor-parallel ranks report the same pairs, which cancels in the quotients.
        """
        dist.all_reduce(self._sums)
        chosen, rejected, correct, pairs = self._sums.tolist()
        self._sums.zero_()
        pairs = max(pairs, 1)
        means = (chosen / pairs, rejected / pairs, (chosen - rejected) / pairs, correct / pairs)
        return dict(zip(REWARD_NAMES, means, strict=True))
