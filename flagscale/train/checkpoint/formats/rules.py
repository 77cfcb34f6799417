"""How tensors of one program are rearranged into one of megatron.core's, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flagscale.train.checkpoint.formats.tensors import (
    Alike,
    Item,
    Rows,
    Run,
    Shape,
    Stack,
    Stored,
    Transposed,
    joined,
    rows,
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that its tensors are made of."""

    vocabulary: int
    positions: int
    hidden: int
    heads: int
    groups: int
    head: int
    inner: int
    expert_inner: int
    experts: int
    shared_inner: int = 0
    latent_queries: int = 0
    latent_keys: int = 0
    own_key: int = 0
    turned: int = 0
    value: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Sizes:
        """From arguments, written out."""
        return cls(
            vocabulary=values["vocab_size"],
            positions=values["max_position_embeddings"] or 0,
            hidden=values["hidden_size"],
            heads=values["num_attention_heads"],
            groups=values["num_query_groups"],
            head=values["kv_channels"],
            inner=values["ffn_hidden_size"],
            expert_inner=values["moe_ffn_hidden_size"] or 0,
            experts=values["num_moe_experts"] or 0,
            shared_inner=values["moe_shared_expert_intermediate_size"] or 0,
            latent_queries=values["q_lora_rank"] or 0,
            latent_keys=values["kv_lora_rank"],
            own_key=values["qk_head_dim"],
            turned=values["qk_pos_emb_head_dim"],
            value=values["v_head_dim"],
        )

    def shape(self, letters: str) -> Shape:
        """The shape that letters (``tables``) stand for, a comma between dimensions."""
        sizes = {
            "V": self.vocabulary,
            "P": self.positions,
            "H": self.hidden,
            "A": self.heads * self.head,
            "G": self.groups * self.head,
            "D": self.head,
            "F": self.inner,
            "E": self.expert_inner,
            "N": self.experts,
            "S": self.shared_inner,
            "Q": self.latent_queries,
            "L": self.latent_keys,
            "M": self.latent_keys + self.turned,
            "T": self.heads * (self.own_key + self.turned),
            "U": self.heads * (self.own_key + self.value),
            "W": self.heads * self.value,
        }
        return tuple(int(word[:-1] or 1) * sizes[word[-1]] for word in letters.split(","))


class Rule(Protocol):
    """A rearrangement that loses nothing."""

    def join(self, parts: Sequence[Stored], sizes: Sizes) -> Stored:
        """megatron.core's tensor of the other program's."""

    def split(self, tensor: Stored, sizes: Sizes) -> Sequence[Stored]:
        """The other program's tensors of megatron.core's."""


class _Same:
    def join(self, parts: Sequence[Stored], sizes: Sizes) -> Stored:
        return parts[0]

    def split(self, tensor: Stored, sizes: Sizes) -> Sequence[Stored]:
        return [tensor]


class _Transposed:
    """Linear layers whose weights are ``[in, out]``."""

    def join(self, parts: Sequence[Stored], sizes: Sizes) -> Stored:
        return Transposed(parts[0])

    def split(self, tensor: Stored, sizes: Sizes) -> Sequence[Stored]:
        return [Transposed(tensor)]


class _Vocabulary:
    """Rows of padding, which only megatron.core has, are left out."""

    def join(self, parts: Sequence[Stored], sizes: Sizes) -> Stored:
        return parts[0]

    def split(self, tensor: Stored, sizes: Sizes) -> Sequence[Stored]:
        if tensor.shape[0] == sizes.vocabulary:
            return [tensor]
        return [rows(tensor, 0, min(sizes.vocabulary, tensor.shape[0]))]


class _Halves:
    """Gate and up projection, one after the other."""

    def join(self, parts: Sequence[Stored], sizes: Sizes) -> Stored:
        return joined(parts)

    def split(self, tensor: Stored, sizes: Sizes) -> Sequence[Stored]:
        half = tensor.shape[0] // 2
        return [rows(tensor, 0, half), rows(tensor, half, half)]


class _Heads:
    """Queries, keys and values: apart there; here group by group, a group's queries, its keys, its
    values."""

    def join(self, parts: Sequence[Stored], sizes: Sizes) -> Stored:
        queries, keys, values = parts
        each, head = sizes.heads // sizes.groups * sizes.head, sizes.head
        return Rows(
            tuple(
                run
                for group in range(sizes.groups)
                for run in (
                    Run(queries, group * each, each),
                    Run(keys, group * head, head),
                    Run(values, group * head, head),
                )
            )
        )

    def split(self, tensor: Stored, sizes: Sizes) -> Sequence[Stored]:
        each, head = sizes.heads // sizes.groups * sizes.head, sizes.head
        groups, step = range(sizes.groups), each + 2 * head
        return [
            Rows(tuple(Run(tensor, group * step + begin, count) for group in groups))
            for begin, count in ((0, each), (each, head), (each + head, head))
        ]


class _HeadsTransposed:
    """The same where all three lie in one tensor, whose weights are ``[in, out]``."""

    def join(self, parts: Sequence[Stored], sizes: Sizes) -> Stored:
        fused = Transposed(parts[0]) if len(parts[0].shape) == 2 else parts[0]
        width, keys = sizes.heads * sizes.head, sizes.groups * sizes.head
        apart = [rows(fused, 0, width), rows(fused, width, keys), rows(fused, width + keys, keys)]
        return HEADS.join(apart, sizes)

    def split(self, tensor: Stored, sizes: Sizes) -> Sequence[Stored]:
        fused = joined(HEADS.split(tensor, sizes))
        return [Transposed(fused) if len(tensor.shape) == 2 else fused]


@dataclass(frozen=True)
class _PerExpert:
    """A rule for each expert; here they lie in one tensor."""

    rule: Rule
    count: int
    """Tensors that an expert has there."""

    def join(self, parts: Sequence[Stored], sizes: Sizes) -> Stored:
        each = range(0, len(parts), self.count)
        return Stack(tuple(self.rule.join(parts[i : i + self.count], sizes) for i in each))

    def split(self, tensor: Stored, sizes: Sizes) -> Sequence[Stored]:
        found: list[Stored] = []
        for expert in range(tensor.shape[0]):
            found += self.rule.split(Item(tensor, expert), sizes)
        return found


@dataclass(frozen=True)
class Copied:
    """A rule for a tensor that lies there in several places; here once."""

    rule: Rule
    count: int

    def join(self, parts: Sequence[Stored], sizes: Sizes) -> Stored:
        return self.rule.join([Alike(tuple(parts))], sizes)

    def split(self, tensor: Stored, sizes: Sizes) -> Sequence[Stored]:
        return [*self.rule.split(tensor, sizes)] * self.count


SAME, TRANSPOSED, VOCABULARY = _Same(), _Transposed(), _Vocabulary()
HALVES, HEADS, HEADS_TRANSPOSED = _Halves(), _Heads(), _HeadsTransposed()


def per_expert(rule: Rule) -> Rule:
    """A rule for every expert of a layer."""
    return _PerExpert(rule, 2 if rule is HALVES else 1)
