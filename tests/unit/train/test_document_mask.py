"""Document masks: numbering of documents, forms of the mask, and attention with each form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnBackend

from flagscale.accelerators.base import Accelerator
from flagscale.accelerators.device import Device
from flagscale.accelerators.registry import get_accelerator
from flagscale.train.data.document_datasets import number_documents
from flagscale.train.models import document_mask
from flagscale.train.models.document_mask import (
    DocumentMaskBuilder,
    attend_masked,
    attend_packed,
    attend_to_earlier_keys,
    visible_mask,
)

pytestmark = pytest.mark.torch

END_TOKEN = 9


@pytest.mark.parametrize(
    ("tokens", "numbers"),
    [
        ([1, 2, 3], [0, 0, 0]),
        ([1, END_TOKEN, 3, 4], [0, 0, 1, 1]),
        ([END_TOKEN, END_TOKEN, 3, END_TOKEN], [0, 1, 2, 2]),
    ],
    ids=["one_document", "end_token_belongs_to_its_document", "documents_of_an_end_token_only"],
)
def test_tokens_are_numbered_by_document(tokens: list[int], numbers: list[int]) -> None:
    assert number_documents(torch.tensor(tokens), END_TOKEN).tolist() == numbers


def test_documents_end_at_the_end_of_their_sequence() -> None:
    numbers = torch.tensor([[0, 0, 1, 1], [1, 2, 2, 2]])
    assert document_mask.compute_cu_seqlens(numbers).tolist() == [0, 2, 4, 5, 8]


class Npu(Accelerator):
    name = "npu"


def device(kind: str) -> Device:
    return Device(Npu() if kind == Npu.name else get_accelerator(kind), torch.device("cpu"))


def config(**changes: Any) -> Any:
    values = {
        "attention_backend": AttnBackend.auto,
        "context_parallel_size": 1,
        "cp_comm_type": "all_gather",
        "params_dtype": torch.bfloat16,
        "kv_channels": 128,
        "window_size": None,
        "attn_logit_softcapping": None,
        "multi_latent_attention": False,
        **changes,
    }
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("kind", "changes", "form"),
    [
        ("cpu", {"params_dtype": torch.float32}, "cu_seqlens"),
        ("cpu", {"attention_backend": AttnBackend.local}, "hidden"),
        ("cpu", {"attention_backend": AttnBackend.unfused}, "visible"),
        ("cuda", {}, "cu_seqlens"),
        ("cuda", {"attention_backend": AttnBackend.flash}, "cu_seqlens"),
        ("cuda", {"attention_backend": AttnBackend.unfused}, "visible"),
        ("cuda", {"params_dtype": torch.float32}, "visible"),
        ("cuda", {"kv_channels": 288}, "visible"),
        ("cuda", {"kv_channels": 12}, "visible"),
        ("cuda", {"context_parallel_size": 2}, "chunk_cu_seqlens"),
        ("cuda", {"context_parallel_size": 2, "params_dtype": torch.float32}, "document_numbers"),
        ("cpu", {"context_parallel_size": 2, "window_size": [4, 0]}, "document_numbers"),
        ("cuda", {"context_parallel_size": 2, "cp_comm_type": "a2a"}, "cu_seqlens"),
        ("cuda", {"multi_latent_attention": True}, "visible"),
        ("cpu", {"window_size": [4, 0]}, "visible"),
        ("cuda", {"attn_logit_softcapping": 50.0}, "visible"),
        ("npu", {}, "visible"),
    ],
)
def test_mask_form_of_each_attention(kind: str, changes: Any, form: str) -> None:
    assert document_mask.select_mask_form(config(**changes), device(kind)) == form


def test_cu_seqlens_is_padded_and_rarely_changes_its_length() -> None:
    mask_builder = DocumentMaskBuilder(config(), device("cuda"))
    # A capacity of 2560 / 128 = 20 documents, which grows fourfold for 52 documents and stays.
    few_documents, many_documents = torch.zeros(1, 2560), torch.arange(2560)[None] // 50
    cu_seqlens = mask_builder(few_documents)
    assert cu_seqlens.tolist() == [0, *[2560] * 20]
    assert [len(mask_builder(batch)) for batch in (many_documents, few_documents)] == [81, 81]


document_lengths = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(document_lengths, document_lengths)
def test_all_forms_equal_attention_per_document(first_lengths: Any, second_lengths: Any) -> None:
    size = max(sum(first_lengths), sum(second_lengths))
    # Two sequences; a last document fills each of them up to the same length.
    row_lengths = [[*lengths, size - sum(lengths)] for lengths in (first_lengths, second_lengths)]
    numbers = torch.stack(
        [
            torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            for lengths in row_lengths
        ]
    )
    generator = torch.Generator().manual_seed(size)
    query = torch.randn(size, 2, 4, 8, generator=generator)
    key, value = torch.randn(2, size, 2, 2, 8, generator=generator)
    cu_seqlens = document_mask.compute_cu_seqlens(numbers)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    unmasked = attend_packed(q, k, v, cu_seqlens, cu_seqlens, scale=None, dropout=0.0)
    mask = visible_mask(numbers, numbers)
    masked = attend_masked(q, k, v, mask, scale=None, dropout=0.0)
    torch.testing.assert_close(unmasked, masked)
    # Reference: the last query of the last document of sequence 1 attends to exactly this document.
    begin, end = cu_seqlens[-2].item() - size, size
    for head in range(4):
        scores = (k[1, head // 2, begin:end] @ q[1, head, end - 1]) * 8**-0.5
        expected = scores.softmax(0) @ v[1, head // 2, begin:end]
        torch.testing.assert_close(unmasked[1, head, end - 1], expected)


@settings(max_examples=30, deadline=None)
@given(document_lengths, document_lengths, st.integers(2, 4))
def test_chunks_of_ranks_equal_the_whole_sequence(
    first_lengths: Any, second_lengths: Any, ranks: int
) -> None:
    """Outputs and gradients of all ranks' chunks are those of whole documents."""
    chunks = 2 * ranks
    size = -(-max(sum(first_lengths), sum(second_lengths)) // chunks) * chunks
    numbers = torch.stack(
        [
            torch.arange(len(lengths) + 1).repeat_interleave(
                torch.tensor([*lengths, size - sum(lengths)])
            )
            for lengths in (first_lengths, second_lengths)
        ]
    )
    generator = torch.Generator().manual_seed(size)
    query = torch.randn(2, 4, size, 8, generator=generator, requires_grad=True)
    key, value = torch.randn(2, 2, 2, size, 8, generator=generator).unbind()
    key.requires_grad_()
    mask = visible_mask(numbers, numbers)
    expected = attend_masked(query, key, value, mask, scale=None, dropout=0.0)
    output = torch.empty_like(expected)
    for rank in range(ranks):
        cu_seqlens = document_mask.compute_chunk_cu_seqlens(numbers, rank, ranks)
        for number, index in enumerate((rank, chunks - 1 - rank)):
            begin, end = index * size // chunks, (index + 1) * size // chunks
            assert cu_seqlens[number, :, -1].tolist() == [2 * (end - begin), 2 * end]
            output[:, :, begin:end] = attend_to_earlier_keys(
                query[:, :, begin:end],
                key[:, :, :end],
                value[:, :, :end],
                cu_seqlens[number],
                scale=None,
                dropout=0.0,
            )
    torch.testing.assert_close(output, expected)
    gradients = torch.autograd.grad(output.square().sum(), (query, key))
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected.square().sum(), (query, key)), rtol=1e-4, atol=1e-5
    )
