"""Generation of answers to a file of prompts (``eval_prompts``) during training.

Decoding is greedy. Each token takes a forward pass of whole sequences
(:mod:`flagscale.train.evaluation.scoring`), so decoding works with every homogeneous parallel
layout. There is no KV cache, so it is slow and meant for a few prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from flagscale.errors import DataError
from flagscale.train.data.chat.messages import (
    UnusableConversationError,
    normalize_messages,
    normalize_tools,
)
from flagscale.train.data.chat.templates import ChatTemplate, open_template
from flagscale.train.data.tokenizers import Tokenizer
from flagscale.train.evaluation.scoring import SequenceScorer

_MAX_PROMPT_FILE_BYTES = 16 << 20


class Generator:
    """Generates answers to the prompts of ``eval_prompts``."""

    def __init__(
        self, args: argparse.Namespace, scorer: SequenceScorer, tokenizer: Tokenizer
    ) -> None:
        """Read the prompts from the file ``args.eval_prompts``.

        Raises:
            DataError: the file cannot be read, or a prompt is invalid or too long.
        """
        self._args, self._scorer, self._tokenizer = args, scorer, tokenizer
        self.prompts, self._prompt_ids = read_prompts(args, tokenizer)
        self._end_tokens = tokenizer.special_ids | {tokenizer.eod}

    def generate_answers(self) -> list[str]:
        """Generate an answer to each prompt. Collective; all ranks return the same answers."""
        answers = generate_greedily(
            self._scorer.predict_next,
            self._prompt_ids,
            self._args.eval_prompt_tokens,
            lambda answer: answer[-1] in self._end_tokens,
        )
        return [
            self._tokenizer.detokenize(
                [token for token in answer if token not in self._end_tokens]
            ).strip()
            for answer in answers
        ]


def generate_greedily(
    predict_next: Callable[[Sequence[Sequence[int]]], Sequence[int]],
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    is_finished: Callable[[Sequence[int]], bool],
) -> list[list[int]]:
    """Continue each prompt with the most likely tokens.

    Args:
        predict_next: returns the next token of each sequence.
        prompts: token ids of each prompt.
        max_tokens: maximum number of tokens of an answer.
        is_finished: returns whether an answer is complete, given its token ids so far.

    Returns:
        The answers, with the tokens that completed them.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    unfinished = list(range(len(prompts)))
    for _ in range(max_tokens):
        if not unfinished:
            break
        sequences = [[*prompts[index], *answers[index]] for index in unfinished]
        for index, token in zip(unfinished, predict_next(sequences), strict=True):
            answers[index].append(token)
        unfinished = [index for index in unfinished if not is_finished(answers[index])]
    return answers


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
