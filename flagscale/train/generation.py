"""Generation of answers to a file of prompts (``eval_prompts``) during training.

Decoding is greedy. Each token takes a forward pass of whole sequences through the evaluation
schedule, so decoding works with every parallel layout. There is no KV cache, so it is slow and
meant for a few prompts.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.rules.layers import documents_are_separate
from flagscale.errors import DataError
from flagscale.train.data.chat.messages import (
    UnusableConversationError,
    normalize_messages,
    normalize_tools,
)
from flagscale.train.data.chat.templates import ChatTemplate, open_template
from flagscale.train.data.tokenizers import Tokenizer
from flagscale.train.device import Device
from flagscale.train.models.base import get_model_spec
from flagscale.train.models.document_mask import DocumentMaskBuilder
from flagscale.train.state import TrainState, unwrap_model

_MAX_PROMPT_FILE_BYTES = 16 << 20


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
        """Read the prompts from the file ``args.eval_prompts``.

        Raises:
            DataError: the file cannot be read, or a prompt is invalid or too long.
        """
        self._args, self._state, self._tokenizer = args, state, tokenizer
        self._device, self._spec = device.torch_device, get_model_spec(args)
        self._mask_builder = DocumentMaskBuilder(config, device)
        self._mask_documents = documents_are_separate(vars(args))
        self.prompts, self._prompt_ids = read_prompts(args, tokenizer)
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
            for index, ids in enumerate(self._prompt_ids)
        ]

    def _build_rows(self) -> tuple[torch.Tensor, list[int]]:
        """Return token ids, [rows, sequence length] with a prompt per row, and the prompts'
        lengths.

        The first prompts are repeated to fill whole micro-batches.
        """
        args = self._args
        stages = args.pipeline_model_parallel_size
        # The interleaved schedule requires a multiple of the number of stages.
        multiple = args.micro_batch_size * (stages if self._chunk_count > 1 else 1)
        row_count = math.ceil(len(self._prompt_ids) / multiple) * multiple
        prompts = [self._prompt_ids[row % len(self._prompt_ids)] for row in range(row_count)]
        rows = torch.zeros(len(prompts), args.seq_length, dtype=torch.int64)
        for row, ids in zip(rows, prompts, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        return rows, [len(ids) for ids in prompts]

    @property
    def _chunk_count(self) -> int:
        return len(self._state.chunks)

    @torch.no_grad()
    def _predict_next(self, rows: torch.Tensor, lengths: Sequence[int]) -> list[int]:
        """Return the most likely next token of each row."""
        batch_size = self._args.micro_batch_size
        batches = [
            self._build_batch(rows[begin : begin + batch_size], lengths[begin : begin + batch_size])
            for begin in range(0, len(rows), batch_size)
        ]
        data: Any = [iter(batches) for _ in range(self._chunk_count)]
        outputs = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=data if self._chunk_count > 1 else data[0],
            model=self._state.chunks,
            num_microbatches=len(batches),
            seq_length=self._args.seq_length,
            micro_batch_size=batch_size,
            forward_only=True,
            collect_non_loss_data=True,
        )
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        if outputs:  # on the last stage
            tokens = torch.cat(outputs)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last_rank = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(tokens, last_rank, parallel_state.get_pipeline_model_parallel_group())
        return [int(token) for token in tokens.tolist()]

    def _build_batch(self, rows: torch.Tensor, lengths: Sequence[int]) -> dict[str, Any]:
        positions = torch.arange(rows.shape[1]).expand(rows.shape).contiguous()
        last_positions = torch.tensor([length - 1 for length in lengths])
        return {"tokens": rows, "labels": None, "position_ids": positions, "last": last_positions}

    def _forward_step(self, iterator: Iterator[Mapping[str, Any]], model: torch.nn.Module) -> Any:
        """Run the forward pass of one micro-batch, as pipeline schedules call it.

        Returns:
            The logits, and a function that selects the next tokens from them.
        """
        inner_model: Any = unwrap_model(model)
        batch = dict(next(iterator))
        last_positions = batch.pop("last")
        if self._mask_documents:
            batch["attention_mask"] = self._mask_builder(torch.zeros_like(batch["tokens"]))
        inputs = self._spec.inputs(
            batch, first=inner_model.pre_process, last=inner_model.post_process
        )
        output = model(
            **{
                name: None if tensor is None else tensor.to(self._device)
                for name, tensor in inputs.items()
            }
        )
        return output, partial(_select_most_likely, last_positions, self._tokenizer.vocab_size)


def _select_most_likely(
    last_positions: torch.Tensor,
    vocabulary: int,
    logits: torch.Tensor,
    *,
    non_loss_data: bool = True,
) -> torch.Tensor:
    """Return the most likely token of each sequence, over all shards of the vocabulary.

    Args:
        last_positions: position of each sequence's last token, whose logits are used, [batch].
        vocabulary: number of tokens; logits beyond it are padding.
        logits: ``[batch, sequence, vocabulary / tensor-parallel size]``.
    """
    del non_loss_data
    local_logits = logits[
        torch.arange(len(last_positions)), last_positions.to(logits.device)
    ].float()
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
        if path.stat().st_size > _MAX_PROMPT_FILE_BYTES:
            raise DataError(f"{path}: eval_prompts is for a few prompts; it is larger than 16 MiB")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    open_template_once = cache(
        partial(open_template, args.chat_template, tokenizer, str(args.tokenizer_path))
    )
    displayed_texts, prompt_ids = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompt, text = _parse_prompt(line, open_template_once)
            except (UnusableConversationError, ValueError) as error:
                raise DataError(f"{path}:{number}: {error}") from None
            tokens = tokenizer.tokenize(text)
            max_prompt_tokens = args.seq_length - args.eval_prompt_tokens
            if not 0 < len(tokens) <= max_prompt_tokens:
                message = (
                    f"{path}:{number}: {len(tokens)} tokens; "
                    f"1 to {max_prompt_tokens} fit before an answer"
                )
                raise DataError(message, hint="raise seq_length, or lower eval_prompt_tokens")
            displayed_texts.append(prompt)
            prompt_ids.append(tokens)
    if not prompt_ids:
        raise DataError(f"{path}: contains no prompt")
    return displayed_texts, prompt_ids


def _parse_prompt(line: str, get_template: Callable[[], ChatTemplate]) -> tuple[str, str]:
    """Parse a line of the prompt file.

    Args:
        line: the line.
        get_template: returns the chat template; it is only called for a conversation.

    Returns:
        The text to display in the log, and the text that the model continues. They differ for a
        conversation, of which only the last message is displayed.
    """
    record = json.loads(line)
    if isinstance(record, dict) and isinstance(record.get("prompt"), str):
        return record["prompt"], record["prompt"]
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UnusableConversationError('expected {"prompt": "…"} or {"messages": […]}')
    messages = normalize_messages(messages, "messages")
    text = get_template().render(messages, normalize_tools(record), add_generation_prompt=True)
    return str(messages[-1].get("content", "")), text
