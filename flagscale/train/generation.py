"""What a model answers, while it is trained: prompts of a file, continued token by token.

The likeliest token is taken each time, by a forward pass of whole sequences through the schedule
that evaluates, so that any layout can do it; nothing is kept between passes. It is for a look at a
few prompts, not for speed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.errors import DataError
from flagscale.train.data.chat.records import UnfitError
from flagscale.train.data.chat.templates import open_template
from flagscale.train.data.tokenizers import Tokenizer
from flagscale.train.device import Device
from flagscale.train.models.base import spec_of
from flagscale.train.models.documents import DocumentMasks
from flagscale.train.state import TrainState, unwrap

_MOST_BYTES = 16 << 20


class Generator:
    """Continues the prompts of ``eval_prompts``."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: TransformerConfig,
        state: TrainState,
        tokenizer: Tokenizer,
        device: Device,
    ) -> None:
        """
        Raises:
            DataError: the file cannot be read, or a prompt is none, or is too long.
        """
        self._args, self._state, self._tokenizer = args, state, tokenizer
        self._device, self._spec = device.torch_device, spec_of(args)
        self._masks = DocumentMasks(config, device)
        self._apart = bool(args.sft or args.reset_attention_mask)
        self.prompts, self._ids = read_prompts(args, tokenizer)
        self._ends = tokenizer.special_ids | {tokenizer.eod}

    def answers(self) -> list[str]:
        """An answer to each prompt, equal on all ranks, which all call it."""
        rows, lengths = self._rows()
        done = [False] * len(lengths)
        for chunk in self._state.chunks:
            chunk.eval()
        for _ in range(self._args.eval_prompt_tokens):
            for row, token in enumerate(self._next(rows, lengths)):
                done[row] = done[row] or token in self._ends
                if not done[row]:
                    rows[row, lengths[row]] = token
                    lengths[row] += 1
            if all(done):
                break
        for chunk in self._state.chunks:
            chunk.train()
        return [
            self._tokenizer.detokenize(rows[index, len(ids) : lengths[index]].tolist()).strip()
            for index, ids in enumerate(self._ids)
        ]

    def _rows(self) -> tuple[torch.Tensor, list[int]]:
        """The prompts as ``[rows, sequence]`` and their lengths; as many as whole micro-batches
        take, the first ones again."""
        args = self._args
        stages = args.pipeline_model_parallel_size
        whole = args.micro_batch_size * (stages if self._chunks > 1 else 1)
        missing = -len(self._ids) % whole
        every = [self._ids[index % len(self._ids)] for index in range(len(self._ids) + missing)]
        rows = torch.zeros(len(every), args.seq_length, dtype=torch.int64)
        for row, ids in zip(rows, every, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        return rows, [len(ids) for ids in every]

    @property
    def _chunks(self) -> int:
        return len(self._state.chunks)

    @torch.no_grad()
    def _next(self, rows: torch.Tensor, lengths: Sequence[int]) -> list[int]:
        """The likeliest token behind each row."""
        size = self._args.micro_batch_size
        batches = [
            self._batch(rows[begin : begin + size], lengths[begin : begin + size])
            for begin in range(0, len(rows), size)
        ]
        data: Any = [iter(batches) for _ in range(self._chunks)]
        found = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=data if self._chunks > 1 else data[0],
            model=self._state.chunks,
            num_microbatches=len(batches),
            seq_length=self._args.seq_length,
            micro_batch_size=size,
            forward_only=True,
            collect_non_loss_data=True,
        )
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        if found:  # on the last stage
            tokens = torch.cat(found)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(tokens, last, parallel_state.get_pipeline_model_parallel_group())
        return [int(token) for token in tokens.tolist()]

    def _batch(self, rows: torch.Tensor, lengths: Sequence[int]) -> dict[str, Any]:
        positions = torch.arange(rows.shape[1]).expand(rows.shape).contiguous()
        last = torch.tensor([length - 1 for length in lengths])
        return {"tokens": rows, "labels": None, "position_ids": positions, "last": last}

    def _forward(self, iterator: Iterator[Mapping[str, Any]], model: torch.nn.Module) -> Any:
        """One micro-batch, as schedules call it: logits, and what is taken of them."""
        bare: Any = unwrap(model)
        batch = dict(next(iterator))
        last = batch.pop("last")
        if self._apart:
            batch["attention_mask"] = self._masks(torch.zeros_like(batch["tokens"]))
        inputs = self._spec.inputs(batch, first=bare.pre_process, last=bare.post_process)
        output = model(
            **{
                name: None if tensor is None else tensor.to(self._device)
                for name, tensor in inputs.items()
            }
        )
        return output, partial(_likeliest, last, self._tokenizer.vocab_size)


def _likeliest(
    last: torch.Tensor, vocabulary: int, logits: torch.Tensor, *, non_loss_data: bool = True
) -> torch.Tensor:
    """The likeliest token of each sequence, over all parts of the vocabulary.

    Args:
        last: the place in each sequence that is looked at.
        vocabulary: tokens that there are; what is behind them is padding.
        logits: ``[batch, sequence, vocabulary of this rank]``.
    """
    del non_loss_data
    own = logits[torch.arange(len(last)), last.to(logits.device)].float()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, -1)[:, :vocabulary].argmax(-1)


def read_prompts(
    args: argparse.Namespace, tokenizer: Tokenizer
) -> tuple[list[str], list[list[int]]]:
    """The prompts of ``eval_prompts``: what is shown of each, and its tokens.

    Raises:
        DataError: with file and line, what is no prompt, or is too long.
    """
    path = Path(args.eval_prompts)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path}: eval_prompts is for a few prompts; it is larger than 16 MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    shown, ids = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                asked, text = _text(line, args)
            except (UnfitError, ValueError) as error:
                raise DataError(f"{path}:{number}: {error}") from None
            tokens = tokenizer.tokenize(text)
            room = args.seq_length - args.eval_prompt_tokens
            if not 0 < len(tokens) <= room:
                message = f"{path}:{number}: {len(tokens)} tokens; 1 to {room} fit before an answer"
                raise DataError(message, hint="raise seq_length, or lower eval_prompt_tokens")
            shown.append(asked)
            ids.append(tokens)
    if not ids:
        raise DataError(f"{path}: holds no prompt")
    return shown, ids


def _text(line: str, args: argparse.Namespace) -> tuple[str, str]:
    """What is shown of a prompt, and the text that is continued."""
    record = json.loads(line)
    if isinstance(record, dict) and isinstance(record.get("prompt"), str):
        return record["prompt"], record["prompt"]
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UnfitError('expected {"prompt": "…"} or {"messages": […]}')
    said = [one.get("content") if isinstance(one, dict) else None for one in messages]
    if not all(isinstance(text, str) for text in said):
        raise UnfitError("messages: expected a text as content of each")
    directory = Path(args.tokenizer_path or "")
    template = open_template(
        args.chat_template, directory if directory.is_dir() else directory.parent
    )
    return str(said[-1]), template.render(messages, ask=True)
