"""Generation of answers to a file of prompts (``eval_prompts``) during training.

Decoding is greedy. Each token is a forward pass of whole sequences through the evaluation schedule,
so it works with any parallel layout; there is no KV cache. It is meant for looking at a few
prompts, not for speed.
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
from flagscale.train.data.chat.records import UnusableConversationError
from flagscale.train.data.chat.templates import open_template
from flagscale.train.data.tokenizers import Tokenizer
from flagscale.train.device import Device
from flagscale.train.models.base import get_model_spec
from flagscale.train.models.document_mask import DocumentMaskBuilder
from flagscale.train.state import TrainState, unwrap_model

_MAX_BYTES = 16 << 20


class Generator:
    """Generates answers to the prompts of ``eval_prompts``."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: TransformerConfig,
        state: TrainState,
        tokenizer: Tokenizer,
        device: Device,
    ) -> None:
        """Read the prompts.

        Raises:
            DataError: the file cannot be read, or a prompt is invalid or too long.
        """
        self._args, self._state, self._tokenizer = args, state, tokenizer
        self._device, self._spec = device.torch_device, get_model_spec(args)
        self._masks = DocumentMaskBuilder(config, device)
        self._mask_documents = bool(args.sft or args.reset_attention_mask)
        self.prompts, self._ids = read_prompts(args, tokenizer)
        self._end_tokens = tokenizer.special_ids | {tokenizer.eod}

    def generate_answers(self) -> list[str]:
        """Generate an answer to each prompt. Collective; all ranks return the same answers."""
        rows, lengths = self._build_rows()
        finished = [False] * len(lengths)
        for chunk in self._state.chunks:
            chunk.eval()
        for _ in range(self._args.eval_prompt_tokens):
            for row, token in enumerate(self._predict_next(rows, lengths)):
                finished[row] = finished[row] or token in self._end_tokens
                if not finished[row]:
                    rows[row, lengths[row]] = token
                    lengths[row] += 1
            if all(finished):
                break
        for chunk in self._state.chunks:
            chunk.train()
        return [
            self._tokenizer.detokenize(rows[index, len(ids) : lengths[index]].tolist()).strip()
            for index, ids in enumerate(self._ids)
        ]

    def _build_rows(self) -> tuple[torch.Tensor, list[int]]:
        """Return the prompts as rows ``[rows, sequence]``, and their lengths.

        The first prompts are repeated to fill whole micro-batches.
        """
        args = self._args
        stages = args.pipeline_model_parallel_size
        multiple = args.micro_batch_size * (stages if self._chunks > 1 else 1)
        missing = -len(self._ids) % multiple
        prompts = [self._ids[index % len(self._ids)] for index in range(len(self._ids) + missing)]
        rows = torch.zeros(len(prompts), args.seq_length, dtype=torch.int64)
        for row, ids in zip(rows, prompts, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        return rows, [len(ids) for ids in prompts]

    @property
    def _chunks(self) -> int:
        return len(self._state.chunks)

    @torch.no_grad()
    def _predict_next(self, rows: torch.Tensor, lengths: Sequence[int]) -> list[int]:
        """Return the most likely next token of each row."""
        size = self._args.micro_batch_size
        batches = [
            self._build_batch(rows[begin : begin + size], lengths[begin : begin + size])
            for begin in range(0, len(rows), size)
        ]
        data: Any = [iter(batches) for _ in range(self._chunks)]
        outputs = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=data if self._chunks > 1 else data[0],
            model=self._state.chunks,
            num_microbatches=len(batches),
            seq_length=self._args.seq_length,
            micro_batch_size=size,
            forward_only=True,
            collect_non_loss_data=True,
        )
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        if outputs:  # on the last stage
            tokens = torch.cat(outputs)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(tokens, last, parallel_state.get_pipeline_model_parallel_group())
        return [int(token) for token in tokens.tolist()]

    def _build_batch(self, rows: torch.Tensor, lengths: Sequence[int]) -> dict[str, Any]:
        positions = torch.arange(rows.shape[1]).expand(rows.shape).contiguous()
        last = torch.tensor([length - 1 for length in lengths])
        return {"tokens": rows, "labels": None, "position_ids": positions, "last": last}

    def _forward_step(self, iterator: Iterator[Mapping[str, Any]], model: torch.nn.Module) -> Any:
        """Run the forward pass of one micro-batch, as pipeline schedules call it.

        Returns:
            The logits, and a function that selects the next tokens from them.
        """
        bare: Any = unwrap_model(model)
        batch = dict(next(iterator))
        last = batch.pop("last")
        if self._mask_documents:
            batch["attention_mask"] = self._masks(torch.zeros_like(batch["tokens"]))
        inputs = self._spec.inputs(batch, first=bare.pre_process, last=bare.post_process)
        output = model(
            **{
                name: None if tensor is None else tensor.to(self._device)
                for name, tensor in inputs.items()
            }
        )
        return output, partial(_select_most_likely, last, self._tokenizer.vocab_size)


def _select_most_likely(
    last: torch.Tensor, vocabulary: int, logits: torch.Tensor, *, non_loss_data: bool = True
) -> torch.Tensor:
    """Return the most likely token of each sequence, over all shards of the vocabulary.

    Args:
        last: position in each sequence whose logits are used. Shape ``[batch]``.
        vocabulary: number of tokens; logits beyond it are padding.
        logits: ``[batch, sequence, vocabulary / tensor-parallel size]``.
    """
    del non_loss_data
    local_logits = logits[torch.arange(len(last)), last.to(logits.device)].float()
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(local_logits) for _ in range(group.size())]
    dist.all_gather(shards, local_logits.contiguous(), group=group)
    return torch.cat(shards, -1)[:, :vocabulary].argmax(-1)


def read_prompts(
    args: argparse.Namespace, tokenizer: Tokenizer
) -> tuple[list[str], list[list[int]]]:
    """Read the prompts of ``eval_prompts``.

    Returns:
        The text to display and the token ids of each prompt.

    Raises:
        DataError: names file and line of an invalid or too long prompt.
    """
    path = Path(args.eval_prompts)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DataError(f"{path}: eval_prompts is for a few prompts; it is larger than 16 MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    displayed, ids = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompt, text = _parse_prompt(line, args)
            except (UnusableConversationError, ValueError) as error:
                raise DataError(f"{path}:{number}: {error}") from None
            tokens = tokenizer.tokenize(text)
            room = args.seq_length - args.eval_prompt_tokens
            if not 0 < len(tokens) <= room:
                message = f"{path}:{number}: {len(tokens)} tokens; 1 to {room} fit before an answer"
                raise DataError(message, hint="raise seq_length, or lower eval_prompt_tokens")
            displayed.append(prompt)
            ids.append(tokens)
    if not ids:
        raise DataError(f"{path}: holds no prompt")
    return displayed, ids


def _parse_prompt(line: str, args: argparse.Namespace) -> tuple[str, str]:
    """Return the text to display of a prompt, and the text to continue."""
    record = json.loads(line)
    if isinstance(record, dict) and isinstance(record.get("prompt"), str):
        return record["prompt"], record["prompt"]
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UnusableConversationError('expected {"prompt": "…"} or {"messages": […]}')
    contents = [
        message.get("content") if isinstance(message, dict) else None for message in messages
    ]
    if not all(isinstance(text, str) for text in contents):
        raise UnusableConversationError("messages: expected a text as content of each")
    directory = Path(args.tokenizer_path or "")
    template = open_template(
        args.chat_template, directory if directory.is_dir() else directory.parent
    )
    return str(contents[-1]), template.render(messages, ask=True)
