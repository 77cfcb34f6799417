"""Conversations, from lines of a file to sequences of tokens."""

from __future__ import annotations

import gzip
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.chat_files import (
    CHATML_TEMPLATE,
    REASONING_TEMPLATE,
    make_conversation,
    write_conversations,
    write_lines,
    write_tokenizer,
)

from flagscale.errors import DataError
from flagscale.train.data.chat import conversation_sets, records, token_cache
from flagscale.train.data.chat.encoding import decode_ids, encode_samples, render_samples
from flagscale.train.data.chat.packed_dataset import PackedConversations, SequenceSettings
from flagscale.train.data.chat.records import Conversation
from flagscale.train.data.chat.templates import open_template
from flagscale.train.data.chat.token_cache import ConversationFile
from flagscale.train.data.tokenizers import Tokenizer, TokenizerSpec, open_tokenizer

pytestmark = pytest.mark.torch

QUESTION_AND_ANSWER = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
WITH_SYSTEM_MESSAGE = [{"role": "system", "content": "be"}, *QUESTION_AND_ANSWER]

FORMATS: dict[str, tuple[Any, list[dict[str, str]]]] = {
    "messages": ({"messages": WITH_SYSTEM_MESSAGE}, WITH_SYSTEM_MESSAGE),
    "parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "why"}]},
                QUESTION_AND_ANSWER[1],
            ]
        },
        QUESTION_AND_ANSWER,
    ),
    "sharegpt": (
        {
            "system": "be",
            "conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}],
        },
        WITH_SYSTEM_MESSAGE,
    ),
    "alpaca": ({"instruction": "why", "input": "", "output": "so"}, QUESTION_AND_ANSWER),
    "alpaca-with-all": (
        {
            "system": "be",
            "history": [["why", "so"]],
            "instruction": "w",
            "input": "hy",
            "output": "so",
        },
        [*WITH_SYSTEM_MESSAGE, {"role": "user", "content": "w\n\nhy"}, QUESTION_AND_ANSWER[1]],
    ),
    "half-a-character": (
        {"instruction": "\ud83d", "output": "so"},
        [{"role": "user", "content": "\ufffd"}, QUESTION_AND_ANSWER[1]],
    ),
}


def test_rows_of_a_parquet_file_are_conversations(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    # Columns and fields that only some rows have are null in the others.
    rows = [
        {"messages": WITH_SYSTEM_MESSAGE, "tools": None},
        {"messages": [*QUESTION_AND_ANSWER[:1], {**QUESTION_AND_ANSWER[1], "reasoning": "as"}]},
    ]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    first, second = records.read_conversations(path)
    assert list(first.messages) == WITH_SYSTEM_MESSAGE
    assert (second.messages[1]["reasoning_content"], second.line) == ("as", "row 2")


@pytest.mark.parametrize(("record", "messages"), FORMATS.values(), ids=FORMATS)
def test_each_format_is_read(record: Any, messages: Any, tmp_path: Path) -> None:
    path = tmp_path / "it's $one.jsonl"
    path.write_text("\ufeff\n" + json.dumps(record) + "\n\n", encoding="utf-8")
    (parsed,) = records.read_conversations(path)
    assert (list(parsed.messages), parsed.line) == (messages, 2)


INVALID_LINES: dict[str, tuple[bytes, str]] = {
    "no-json": (b"{", "not JSON"),
    "no-object": (b"[1]", "expected a JSON object a line, found list"),
    "no-utf-8": (b'{"messages": "\xff"}', "not UTF-8"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "no-conversation": (b'{"text": "a"}', "expected a key of 'messages'.*the object has 'text'"),
    "no-list": (b'{"messages": {}}', "messages: expected a list, found dict"),
    "no-role": (b'{"messages": [{"content": "a"}]}', r"messages\[0\]: expected an object with a"),
    "no-answer": (
        b'{"messages": [{"role": "user", "content": "a"}]}',
        "no message of an assistant to compute the loss on; the roles are user",
    ),
    "nothing-to-learn": (
        b'{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}',
        "no message of an assistant to compute the loss on",
    ),
    "picture": (
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        "only parts of text",
    ),
    "number": (b'{"messages": [{"role": "user", "content": 1}]}', "expected a text, found int"),
    "stranger": (b'{"conversations": [{"from": "me", "value": "a"}]}', "unknown speaker 'me'"),
    "no-output": (b'{"instruction": "a"}', "output: expected a text, found nothing"),
}


@pytest.mark.parametrize(("line", "message"), INVALID_LINES.values(), ids=INVALID_LINES)
def test_an_invalid_line_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps({"messages": QUESTION_AND_ANSWER}).encode() + b"\n\n" + line)
    with pytest.raises(DataError, match=rf"bad\.jsonl:3: .*{message}"):
        list(records.read_conversations(path))


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"messages": QUESTION_AND_ANSWER}) + "\n{")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:2: not JSON"):
        list(records.read_conversations(path))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        list(records.read_conversations(path))


def test_the_length_of_a_line_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    with path.open("wb") as file:
        file.truncate(10 << 30)  # of zeros, which take no room
    with pytest.raises(DataError, match=r"one\.jsonl:1: is longer than 64 MiB"):
        list(records.read_conversations(path))


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("chat") / "a tokenizer")


@pytest.fixture(scope="module")
def tokenizer(tokenizer_directory: Path) -> Tokenizer:
    return open_tokenizer(TokenizerSpec("HuggingFaceTokenizer", str(tokenizer_directory)))


def make_conversation_of(*messages: dict[str, Any]) -> Conversation:
    return Conversation(Path("a.jsonl"), 1, messages)


def decode_tokens_with_loss(tokens: Any, tokenizer: Tokenizer) -> list[str]:
    """Return the runs of tokens with a loss, as text.

    A token without a loss is stored as ``~id``.
    """
    encoded, runs = np.asarray(tokens), []
    edges = np.flatnonzero(np.diff((encoded >= 0).astype(int), prepend=0, append=0))
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        runs.append(tokenizer.detokenize(encoded[begin:end].tolist()))
    return runs


def test_answers_up_to_the_end_of_their_turn_are_learned(
    tokenizer_directory: Path, tokenizer: Tokenizer
) -> None:
    more = [
        {"role": "user", "content": "x"},
        {**QUESTION_AND_ANSWER[1], "weight": 0},
        {"role": "user", "content": "y"},
        {"role": "assistant", "content": "z"},
    ]
    talk = make_conversation_of(*WITH_SYSTEM_MESSAGE, *more)
    (sample,) = render_samples(talk, open_template(None, tokenizer, "here"))
    (tokens,) = encode_samples([sample], tokenizer)
    assert tokenizer.detokenize(decode_ids(tokens).tolist()) == sample.text
    assert decode_tokens_with_loss(tokens, tokenizer) == ["so<|im_end|>", "z<|im_end|>"]


def test_text_and_answers_are_those_of_transformers(
    tokenizer_directory: Path, tokenizer: Tokenizer
) -> None:
    """transformers finds answers by marks in the template, which are not needed here."""
    transformers = pytest.importorskip("transformers")
    reference_tokenizer = transformers.AutoTokenizer.from_pretrained(str(tokenizer_directory))
    template = open_template(None, tokenizer, "here")
    for seed in range(20):
        messages = make_conversation(1 + seed % 4, 9, seed)
        expected = reference_tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        (sample,) = render_samples(make_conversation_of(*messages), template)
        (tokens,) = encode_samples([sample], tokenizer)
        assert decode_ids(tokens).tolist() == expected["input_ids"]
        assert (tokens >= 0).astype(int).tolist() == expected["assistant_masks"]


def test_answers_that_a_template_rewrites_become_separate_samples(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "thinking.jinja"
    path.write_text(REASONING_TEMPLATE)
    template = open_template(str(path), tokenizer, "here")
    first, second = render_samples(
        make_conversation_of(*QUESTION_AND_ANSWER, *QUESTION_AND_ANSWER), template
    )
    assert first.text.count("<think>") == second.text.count("<think>") == 1
    runs = [
        decode_tokens_with_loss(tokens, tokenizer)
        for tokens in encode_samples([first, second], tokenizer)
    ]
    assert runs == [["<think>\n\n</think>\n\nso<|im_end|>"]] * 2
    assert second.text.startswith("<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\nso")


UNUSABLE_TEMPLATES = {
    "not-jinja": ("{% for %}", "not a chat template"),
    "refuses": ("{{ raise_exception('no system') }}", "rejects the conversation: no system"),
    "does-not-continue": ("{{ messages | length }}", "as a continuation of its question"),
    "reaches-out": (
        "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}",
        "rejects the conversation",
    ),
}


@pytest.mark.parametrize(("text", "message"), UNUSABLE_TEMPLATES.values(), ids=UNUSABLE_TEMPLATES)
def test_an_unusable_template_is_refused(
    text: str, message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    template, lines = tmp_path / "one.jinja", write_conversations(tmp_path / "a.jsonl", 1)
    template.write_text(text)
    with pytest.raises(DataError, match=message):
        source = ConversationFile(
            lines, "auto", tokenizer, open_template(str(template), tokenizer, "here")
        )
        token_cache.build_cache(source, tmp_path / "cache", "key")
    assert not list(tmp_path.glob("cache/*"))


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_named_templates_mark_answers(name: str, tokenizer: Tokenizer) -> None:
    (sample,) = render_samples(
        make_conversation_of(*WITH_SYSTEM_MESSAGE, *QUESTION_AND_ANSWER),
        open_template(name, tokenizer, "here"),
    )
    (without_answer, with_answer) = (sample.text[begin:end] for begin, end in sample.answer_spans)
    assert without_answer == with_answer
    assert without_answer.startswith("so<|")


def open_written_tokenizer(directory: Path, template: str | None) -> Tokenizer:
    path = write_tokenizer(directory, template=template)
    return open_tokenizer(TokenizerSpec("HuggingFaceTokenizer", str(path)))


def test_a_tokenizer_without_a_template_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat template") as raised:
        open_template(None, open_written_tokenizer(tmp_path, None), str(tmp_path))
    assert "chat_template: to chatml or llama3" in str(raised.value.hint)
    (tmp_path / "chat_template.jinja").write_text(CHATML_TEMPLATE)
    tokenizer = open_written_tokenizer(tmp_path, None)
    assert open_template(None, tokenizer, "here").texts == {"default": CHATML_TEMPLATE}


def arguments(tmp_path: Path, **changes: Any) -> Namespace:
    defaults = {
        "data_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "data_cache_path": str(tmp_path / "cache"),
        "chat_template": None,
        "dpo": False,
        "sft_format": "auto",
        "sft_packing": True,
        "sft_too_long": "truncate",
        "seq_length": 128,
        "split": None,
        "seed": 1,
        "skip_train": False,
        "eval_iters": 1,
        "multiple_validation_sets": False,
        **changes,
    }
    return Namespace(**defaults)


def test_a_file_is_tokenized_once(
    tmp_path: Path, tokenizer_directory: Path, tokenizer: Tokenizer
) -> None:
    path = write_conversations(tmp_path / "a.jsonl", 5)
    args = arguments(tmp_path, data_path=[str(path)], tokenizer_path=str(tokenizer_directory))
    first, second = (conversation_sets.build_conversation_sets(args, tokenizer) for _ in range(2))
    assert "tokenized a.jsonl" in first.remarks[0]
    (cached,) = (tmp_path / "cache" / "conversations").iterdir()
    assert cached.stat().st_mode & 0o777 == 0o700
    assert "tokenized" not in second.remarks[0]
    write_conversations(path, 5, seed=1)
    third = conversation_sets.build_conversation_sets(args, tokenizer)
    assert "tokenized a.jsonl" in third.remarks[0]
    assert third.train is not None
    assert second.train is not None
    assert not torch.equal(third.train[0]["tokens"], second.train[0]["tokens"])


def test_separate_files_and_splits_of_one_file(
    tmp_path: Path, tokenizer_directory: Path, tokenizer: Tokenizer
) -> None:
    one, two = (write_conversations(tmp_path / f"{name}.jsonl", 40) for name in ("one", "two"))
    separate = arguments(
        tmp_path,
        train_data_path=[str(one)],
        valid_data_path=[str(one), str(two)],
        tokenizer_path=str(tokenizer_directory),
        multiple_validation_sets=True,
    )
    sets = conversation_sets.build_conversation_sets(separate, tokenizer)
    assert (list(sets.valid), sets.test) == (["one", "two"], None)
    parts = arguments(
        tmp_path, data_path=[str(one)], split="8,1,1", tokenizer_path=str(tokenizer_directory)
    )
    cut = conversation_sets.build_conversation_sets(parts, tokenizer)
    counts = [data.sample_count for data in (cut.train, cut.valid[""], cut.test) if data]
    assert counts == [32, 4, 4]


def tokenize_file(
    tmp_path: Path, lines: Path, tokenizer_directory: Path, tokenizer: Tokenizer
) -> Any:
    source = ConversationFile(lines, "auto", tokenizer, open_template(None, tokenizer, "here"))
    token_cache.build_cache(source, tmp_path / "cache", "key")
    return token_cache.open_samples(source, tmp_path / "cache", "key")


def test_sequences_hold_whole_separate_conversations(
    tmp_path: Path, tokenizer_directory: Path, tokenizer: Tokenizer
) -> None:
    stored_samples = tokenize_file(
        tmp_path, write_conversations(tmp_path / "a.jsonl", 200), tokenizer_directory, tokenizer
    )
    selected_samples = [(stored_samples, np.arange(len(stored_samples)))]
    data = PackedConversations(
        "train",
        selected_samples,
        SequenceSettings(length=256, is_packed=True, long_conversations="refuse", seed=1),
    )
    assert data.token_utilization > 0.95
    texts = []
    for index in range(len(data)):
        item = data[index]
        numbers, mask = item["documents"].numpy(), item["loss_mask"].numpy()
        for number in range(numbers.max() + 1):
            document = numbers == number
            assert item["position_ids"][document].tolist() == list(range(document.sum()))
            ids = [int(item["tokens"][document][0]), *item["labels"][document].tolist()]
            assert item["tokens"][document].tolist()[1:] == ids[1:-1]
            if mask[document].any():
                flags = [False, *(mask[document] > 0).tolist()]
                texts.append([i if flag else ~i for i, flag in zip(ids, flags, strict=True)])
    assert sorted(texts) == sorted(
        stored_samples[index].tolist() for index in range(len(stored_samples))
    )


def test_long_conversations_are_truncated_dropped_or_refused(
    tmp_path: Path, tokenizer_directory: Path, tokenizer: Tokenizer
) -> None:
    long = {
        "messages": [QUESTION_AND_ANSWER[0], {"role": "assistant", "content": "so again " * 40}]
    }
    late = {"messages": [{"role": "user", "content": "why " * 200}, QUESTION_AND_ANSWER[1]]}
    lines = write_lines(tmp_path / "a.jsonl", [long, late, {"messages": QUESTION_AND_ANSWER}])
    stored_samples = tokenize_file(tmp_path, lines, tokenizer_directory, tokenizer)
    selected_samples = [(stored_samples, np.arange(3))]
    cut = PackedConversations(
        "train",
        selected_samples,
        SequenceSettings(length=64, is_packed=True, long_conversations="truncate", seed=1),
    )
    dropped = PackedConversations(
        "train",
        selected_samples,
        SequenceSettings(length=64, is_packed=True, long_conversations="drop", seed=1),
    )
    assert (cut.sample_count, cut.truncated_count, cut.dropped_count) == (2, 1, 1)
    assert (dropped.sample_count, dropped.truncated_count, dropped.dropped_count) == (1, 0, 2)
    with pytest.raises(DataError, match=r"2 conversations for train are longer.*in .*a\.jsonl"):
        PackedConversations(
            "train",
            selected_samples,
            SequenceSettings(length=64, is_packed=True, long_conversations="refuse", seed=1),
        )
    with pytest.raises(DataError, match="no conversation is left for train"):
        PackedConversations(
            "train",
            [(stored_samples, np.array([1]))],
            SequenceSettings(length=64, is_packed=True, long_conversations="drop", seed=1),
        )


def test_without_packing_a_conversation_has_a_sequence(
    tmp_path: Path, tokenizer_directory: Path, tokenizer: Tokenizer
) -> None:
    stored_samples = tokenize_file(
        tmp_path, write_conversations(tmp_path / "a.jsonl", 9), tokenizer_directory, tokenizer
    )
    data = PackedConversations(
        "train",
        [(stored_samples, np.arange(9))],
        SequenceSettings(length=256, is_packed=False, long_conversations="drop", seed=1),
    )
    assert len(data) == 9
