"""Exchange of shards of parameters with the ranks that process whole ones, in bounded waves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from flagscale.train.checkpoint.gather_plan import Part


class _Transfer(NamedTuple):
    """A part of a parameter that this rank sends to another one, or receives from it.

    Attributes:
        parameter: index of the parameter.
        part: the part; its rank holds it in its shard.
        peer: rank at the other end.
    """

    parameter: int
    part: Part
    peer: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.part.end - self.part.start


class Wave:
    """Parameters that are exchanged together.

    Attributes:
        owned: indices of the parameters that this rank receives.
    """

    def __init__(
        self,
        parts: Mapping[int, Sequence[Part]],
        owners: Sequence[int],
        ranks: dist.ProcessGroup,
    ) -> None:
        """Plan the exchange.

        Args:
            parts: parts of each parameter of the wave, by its index.
            owners: rank that receives each parameter.
            ranks: the ranks.
        """
        rank, size = ranks.rank(), ranks.size()
        self.owned = [index for index in parts if owners[index] == rank]
        self._ranks = ranks
        outgoing = [
            _Transfer(index, part, owners[index])
            for index, parameter_parts in parts.items()
            for part in parameter_parts
            if part.rank == rank
        ]
        incoming = [_Transfer(i, part, part.rank) for i in self.owned for part in parts[i]]
        # Stable sorting leaves the parts between two ranks in the same order on both.
        self._outgoing = sorted(outgoing, key=lambda transfer: transfer.peer)
        self._incoming = sorted(incoming, key=lambda transfer: transfer.peer)
        self._sizes_out, self._sizes_in = [0] * size, [0] * size
        for transfer in self._outgoing:
            self._sizes_out[transfer.peer] += transfer.size
        for transfer in self._incoming:
            self._sizes_in[transfer.peer] += transfer.size

    def gather(
        self, read: Callable[[int], torch.Tensor], device: torch.device
    ) -> dict[int, torch.Tensor]:
        """Return the flat fp32 parameters that this rank owns, by index. Collective.

        Args:
            read: returns this rank's part of a parameter, flat.
            device: device of the parameters.
        """
        sent = torch.empty(sum(self._sizes_out), device=device)
        position = 0
        for transfer in self._outgoing:
            sent[position : position + transfer.size].copy_(read(transfer.parameter))
            position += transfer.size
        received = torch.empty(sum(self._sizes_in), device=device)
        dist.all_to_all_single(received, sent, self._sizes_in, self._sizes_out, group=self._ranks)
        sizes = dict.fromkeys(self.owned, 0)
        for transfer in self._incoming:
            sizes[transfer.parameter] += transfer.size
        whole = {index: torch.empty(size, device=device) for index, size in sizes.items()}
        position = 0
        for index, part, _ in self._incoming:
            size = part.end - part.start
            whole[index][part.start : part.end].copy_(received[position : position + size])
            position += size
        return whole

    def scatter(
        self,
        whole: Mapping[int, torch.Tensor],
        write: Callable[[int, torch.Tensor], None],
        device: torch.device,
    ) -> None:
        """Return parts of the parameters that this rank owns to the ranks that hold them.
        Collective.

        Args:
            whole: flat fp32 values of these parameters, by index.
            write: takes this rank's part of a parameter, flat.
            device: device of the parameters.
        """
        sent = torch.empty(sum(self._sizes_in), device=device)
        position = 0
        for index, part, _ in self._incoming:
            size = part.end - part.start
            sent[position : position + size].copy_(whole[index][part.start : part.end])
            position += size
        received = torch.empty(sum(self._sizes_out), device=device)
        dist.all_to_all_single(received, sent, self._sizes_out, self._sizes_in, group=self._ranks)
        position = 0
        for transfer in self._outgoing:
            write(transfer.parameter, received[position : position + transfer.size])
            position += transfer.size
