"""Prompts of ``eval_prompts``: formats and errors."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from support.chat_files import write_tokenizer

from flagscale.errors import DataError
from flagscale.train.data.tokenizers import TokenizerSpec, open_tokenizer
from flagscale.train.generation import read_prompts

pytestmark = pytest.mark.torch

CONVERSATION = (
    '{"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "why"}]}'
)


def create_arguments(tmp_path: Path, prompt_file: bytes) -> Namespace:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(prompt_file)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    return Namespace(
        eval_prompts=str(path),
        eval_prompt_tokens=16,
        seq_length=64,
        tokenizer_path=str(tokenizer),
        chat_template=None,
    )


def test_prompts_are_texts_or_conversations(tmp_path: Path) -> None:
    args = create_arguments(tmp_path, f'{{"prompt": "so\\nit"}}\n\n{CONVERSATION}\n'.encode())
    tokenizer = open_tokenizer(TokenizerSpec("HuggingFaceTokenizer", args.tokenizer_path))
    displayed_texts, prompt_ids = read_prompts(args, tokenizer)
    assert displayed_texts == ["so\nit", "why"]
    assert [tokenizer.detokenize(ids) for ids in prompt_ids] == [
        "so\nit",
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nwhy<|im_end|>\n"
        "<|im_start|>assistant\n",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(b"\n", "contains no prompt", id="no-prompt"),
        pytest.param(b"\n{", r"prompts\.jsonl:2: Expecting", id="no-json"),
        pytest.param(b"\xff", "cannot be read", id="no-utf-8"),
        pytest.param(b'{"text": "a"}', r":1: expected ..prompt", id="another-key"),
        pytest.param(
            b'{"messages": [{"role": "user"}]}', "expected a text, found nothing", id="no-content"
        ),
        pytest.param(b'{"prompt": ""}', "0 tokens; 1 to 48 fit before an answer", id="empty"),
        pytest.param(b'{"prompt": "%s"}' % (b"ab" * 64), ":1: [0-9]+ tokens; 1 to 48", id="long"),
    ],
)
def test_error_names_the_line_of_an_invalid_prompt(
    text: bytes, message: str, tmp_path: Path
) -> None:
    args = create_arguments(tmp_path, text)
    tokenizer = open_tokenizer(TokenizerSpec("HuggingFaceTokenizer", args.tokenizer_path))
    with pytest.raises(DataError, match=message):
        read_prompts(args, tokenizer)
