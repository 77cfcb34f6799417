"""Pairs of answers, from lines of a file to pairs of sequences."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.chat_files import CHATML_TEMPLATE, REASONING_TEMPLATE, write_lines, write_tokenizer
from support.preference_files import PAIR_TEMPLATE, make_dialog_pairs

from flagscale.errors import DataError
from flagscale.train.data.chat import conversation_sets
from flagscale.train.data.chat.encoding import decode_ids
from flagscale.train.data.chat.packed_dataset import SequenceSettings
from flagscale.train.data.chat.packed_preferences import (
    REFERENCE_KEY,
    PackedPreferences,
    collate_pairs,
)
from flagscale.train.data.chat.preference_files import PreferenceFile
from flagscale.train.data.chat.preferences import Dialog, TextPair, read_preferences
from flagscale.train.data.chat.templates import open_template
from flagscale.train.data.chat.token_cache import build_cache, open_samples
from flagscale.train.data.tokenizers import Tokenizer, TokenizerSpec, open_tokenizer

pytestmark = pytest.mark.torch


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


WHY, SO, NO = user("why"), assistant("so"), assistant("no")
DIALOG = Dialog((WHY,), ((SO,), (NO,)))
FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "texts": (
        {"prompt": "Why?", "chosen": " So.", "rejected": " No.", "score": 3},
        TextPair("Why?", (" So.", " No.")),
    ),
    "texts-with-implicit-prompt": (
        {"chosen": "Q: why? A: so", "rejected": "Q: why? A: no"},
        TextPair("Q: why? A:", (" so", " no")),
    ),
    "texts-that-begin-alike": (
        {"chosen": "why: soon", "rejected": "why: so it is"},
        TextPair("why: so", ("on", " it is")),
    ),
    "messages": ({"prompt": [WHY], "chosen": [SO], "rejected": [NO]}, DIALOG),
    "implicit-prompt": ({"chosen": [WHY, SO], "rejected": [WHY, NO]}, DIALOG),
    "prompt-twice": ({"prompt": [WHY], "chosen": [WHY, SO], "rejected": [WHY, NO]}, DIALOG),
    "prompt-as-text-too": ({"prompt": "why ", "chosen": [WHY, SO], "rejected": [WHY, NO]}, DIALOG),
    "prompt-as-text": ({"prompt": "why", "chosen": [SO], "rejected": [NO]}, DIALOG),
    "sharegpt": (
        {
            "chosen": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}],
            "rejected": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "no"}],
        },
        DIALOG,
    ),
    "system": (
        {"system": "be", "prompt": [WHY], "chosen": [SO], "rejected": [NO]},
        Dialog(({"role": "system", "content": "be"}, WHY), ((SO,), (NO,))),
    ),
    "earlier-answers": (
        {"chosen": [WHY, SO, WHY, SO], "rejected": [WHY, SO, WHY, NO]},
        Dialog((WHY, {**SO, "weight": 0}, WHY), ((SO,), (NO,))),
    ),
    "several-answers": (
        {"chosen": [WHY, SO, WHY, SO], "rejected": [WHY, NO]},
        Dialog((WHY,), ((SO, WHY, SO), (NO,))),
    ),
}


@pytest.mark.parametrize(("fields", "pair"), FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_each_format_is_read(
    fields: dict[str, Any], pair: Any, suffix: str, tmp_path: Path
) -> None:
    path = write_records(tmp_path / f"it's $one.{suffix}", [fields])
    (preference,) = read_preferences(path)
    assert preference.pair == pair


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        return write_lines(path, records)
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=2)
    return path


TEXTS = {"prompt": "Why?", "chosen": " So.", "rejected": " No."}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "without-rejected": (
        {"prompt": "a", "chosen": "b", "rejected": None},
        "no pair of answers: rejected missing; the keys are 'prompt', 'chosen', 'rejected'",
    ),
    "conversation": (
        {"messages": [WHY, SO]},
        "chosen and rejected missing; the keys are 'messages'; to train on conversations set sft",
    ),
    "unpaired": (
        {"prompt": "a", "completion": "b", "label": True},
        r"answers with a label each, without a pair \(KTO\), are not supported",
    ),
    "equal": ({**TEXTS, "rejected": " So."}, "are equal, so there is nothing to prefer; remove"),
    "equal-messages": ({"chosen": [WHY, SO], "rejected": [WHY, SO]}, "are equal, so there is"),
    "text-and-messages": (
        {"prompt": "a", "chosen": "b", "rejected": [NO]},
        "expected two texts or two lists of messages, found str and list",
    ),
    "numbers": ({"prompt": "a", "chosen": 1, "rejected": 2}, "found int and int"),
    "prompt-of-messages-for-texts": (
        {**TEXTS, "prompt": [WHY]},
        "prompt: expected a text, like chosen and rejected, found list",
    ),
    "system-of-texts": ({**TEXTS, "system": "be"}, "system: is not supported with texts"),
    "no-shared-text": ({"chosen": "abc", "rejected": "xyz"}, "have no common prompt at their"),
    "no-shared-message": (
        {"chosen": [WHY, SO], "rejected": [user("what"), NO]},
        "have no common message at their beginning; write the prompt as prompt",
    ),
    "no-answer-behind-text": (
        {"chosen": "why", "rejected": "why not"},
        "chosen: has no text behind the prompt",
    ),
    "no-answer-behind-messages": (
        {"chosen": [WHY], "rejected": [WHY, NO]},
        "chosen: behind the prompt, no message of an assistant",
    ),
    "answer-of-a-user": (
        {"prompt": [WHY], "chosen": [user("so")], "rejected": [NO]},
        "chosen: behind the prompt, no message of an assistant.*the roles are user",
    ),
    "other-prompt": (
        {"prompt": "where", "chosen": [WHY, SO], "rejected": [WHY, NO]},
        "prompt: is none of the messages at the beginning of chosen and rejected",
    ),
    "two-systems": (
        {
            "system": "be",
            "prompt": [{"role": "system", "content": "do"}],
            "chosen": [SO],
            "rejected": [NO],
        },
        "system: the prompt has a system message already",
    ),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_unusable_pair_is_refused_with_its_line(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "pairs.jsonl", [TEXTS, fields])
    with pytest.raises(DataError, match=rf"pairs\.jsonl:2: .*{message}"):
        list(read_preferences(path))


def test_row_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.parquet", [TEXTS, TEXTS, {**TEXTS, "rejected": " So."}])
    with pytest.raises(DataError, match=r"a\.parquet:row 3: chosen and rejected are equal"):
        list(read_preferences(path))
    (tmp_path / "b.parquet").write_text("{}")
    with pytest.raises(DataError, match=r"b\.parquet: not a Parquet file"):
        list(read_preferences(tmp_path / "b.parquet"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_written(tmp_path_factory.mktemp("tokenizer"), PAIR_TEMPLATE)


def open_written(directory: Path, template: str | None) -> Tokenizer:
    path = write_tokenizer(directory, template)
    return open_tokenizer(TokenizerSpec("HuggingFaceTokenizer", str(path)))


def tokenize(path: Path, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return text and answer of each conversation of a file, as their tokens are decoded."""
    template = open_template(None, tokenizer, "here") if tokenizer.chat_templates else None
    source = PreferenceFile(path, tokenizer, template)
    return [
        (
            tokenizer.detokenize(decode_ids(ids).tolist()),
            tokenizer.detokenize(ids[ids >= 0].tolist()),
        )
        for ids in source.iter_tokenized(None)
    ]


def test_answers_alone_have_a_loss(tmp_path: Path, tokenizer: Tokenizer) -> None:
    start, end = "<|im_start|>", "<|im_end|>"
    prompt = (
        f"{start}user\nwhy{end}{start}assistant\nso{end}{start}user\nwhy{end}{start}assistant\n"
    )
    dialog, _ = FORMATS["earlier-answers"]
    dialogs = write_lines(tmp_path / "dialogs.jsonl", [dialog])
    assert tokenize(dialogs, tokenizer) == [
        (f"{prompt}{text}{end}", f"{text}{end}") for text in ("so", "no")
    ]
    texts = write_lines(tmp_path / "texts.jsonl", [{**TEXTS, "rejected": f" No.{end}"}])
    assert tokenize(texts, tokenizer) == [
        (f"Why?{text}{end}", f"{text}{end}") for text in (" So.", " No.")
    ]


def test_token_across_the_end_of_the_prompt_belongs_to_the_answer(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "ga", "chosen": "ther", "rejected": "x"}])
    assert [tokenizer.detokenize([i]) for i in tokenizer.tokenize("gather")] == ["gat", "her"]
    (_, chosen), (_, rejected) = tokenize(path, tokenizer)
    assert (chosen, rejected) == ("gather<|im_end|>", "x<|im_end|>")


def test_text_begins_as_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = write_tokenizer(tmp_path, None)
    settings = json.loads((path / "tokenizer.json").read_text())
    begin = "<|endoftext|>"
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": begin, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {begin: {"id": begin, "ids": [0], "tokens": [begin]}},
    }
    (path / "tokenizer.json").write_text(json.dumps(settings))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": begin}))
    tokenizer = open_tokenizer(TokenizerSpec("HuggingFaceTokenizer", str(path)))
    source = PreferenceFile(write_lines(tmp_path / "a.jsonl", [TEXTS]), tokenizer, None)
    chosen, _ = source.iter_tokenized(None)
    expected = transformers.AutoTokenizer.from_pretrained(path)("Why? So.<|im_end|>")["input_ids"]
    assert decode_ids(chosen).tolist() == expected
    assert expected[0] == 0
    assert chosen[0] == ~0


def test_messages_need_a_template(tmp_path: Path) -> None:
    tokenizer = open_written(tmp_path / "t", None)
    path = write_lines(tmp_path / "a.jsonl", [FORMATS["messages"][0]])
    with pytest.raises(DataError, match=r"a\.jsonl:1: has messages, but the tokenizer has no chat"):
        tokenize(path, tokenizer)
    reasoning = open_written(tmp_path / "r", REASONING_TEMPLATE)
    path = write_lines(tmp_path / "b.jsonl", [FORMATS["several-answers"][0]])
    with pytest.raises(DataError, match=r"b\.jsonl:1: chosen: .*several answers are no single"):
        tokenize(path, reasoning)


def test_answers_that_a_template_makes_equal_are_refused(tmp_path: Path) -> None:
    tokenizer = open_written(tmp_path / "t", CHATML_TEMPLATE.replace("message.content", "'x'"))
    path = write_lines(tmp_path / "a.jsonl", [FORMATS["messages"][0]])
    with pytest.raises(DataError, match=r"a\.jsonl:1: .* equal after the chat template and the"):
        tokenize(path, tokenizer)


def test_pairs_are_at_the_same_place_of_two_sequences(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_lines(tmp_path / "a.jsonl", make_dialog_pairs(20))
    source = PreferenceFile(path, tokenizer, open_template(None, tokenizer, "here"))
    build_cache(source, tmp_path, "key")
    stored = open_samples(source, tmp_path, "key")
    settings = SequenceSettings(160, is_packed=True, long_conversations="refuse", seed=1)
    data = PackedPreferences("train", [(stored, np.arange(4, 20))], settings)
    scores = np.arange(40.0).reshape(20, 2)
    data.set_reference({path: scores})
    numbers = []
    for index in range(len(data)):
        sample = data[index]
        pairs = data.pairs_of(index)
        numbers += pairs.tolist()
        assert sample[REFERENCE_KEY][:, : len(pairs)].T.tolist() == scores[pairs].tolist()
        for place, pair in enumerate(pairs):
            for member in range(2):
                document = sample["documents"][member] == place
                expected = decode_ids(stored[2 * pair + member]).tolist()
                assert sample["tokens"][member][document].tolist() == expected[:-1]
                assert sample["labels"][member][document].tolist() == expected[1:]
    assert sorted(numbers) == list(range(4, 20))
    batch = collate_pairs([data[0], data[1]], keys=["tokens", REFERENCE_KEY])
    assert batch["tokens"].shape == (4, 160)
    assert torch.equal(batch["tokens"][2:], data[1]["tokens"])
    assert data.max_pairs > 1


def test_long_pairs_are_truncated_dropped_or_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompt, late = [user("why")], [user("why " * 200)]
    pairs = [
        {"prompt": prompt, "chosen": [assistant("so " * 100)], "rejected": [NO]},
        {"prompt": late, "chosen": [SO], "rejected": [NO]},
        # equal but for their end
        {
            "prompt": prompt,
            "chosen": [assistant("a " * 99 + "b")],
            "rejected": [assistant("a " * 100)],
        },
        {"prompt": prompt, "chosen": [SO], "rejected": [NO]},
    ]
    path = write_lines(tmp_path / "a.jsonl", pairs)

    def build(policy: str) -> Any:
        args = Namespace(
            **{f"{name}_data_path": None for name in ("train", "valid", "test")},
            **{"data_path": [str(path)], "data_cache_path": str(tmp_path), "chat_template": None},
            **{"dpo": True, "sft_packing": True, "sft_too_long": policy, "seq_length": 48},
            **{"split": None, "seed": 1, "skip_train": False, "eval_iters": 0},
            **{"multiple_validation_sets": False, "tokenizer_path": "here"},
        )
        return conversation_sets.build_conversation_sets(args, tokenizer)

    truncated, dropped = (build(policy) for policy in ("truncate", "drop"))
    assert [truncated.train.sample_count, dropped.train.sample_count] == [2, 1]
    assert "2 pairs in 2 pairs of sequences of 48" in truncated.remarks[-1]
    assert truncated.remarks[-1].endswith(
        "1 were longer and are cut; 2 were longer and are left out"
    )
    with pytest.raises(DataError, match=r"dpo: 3 pairs for train are longer than seq_length 48"):
        build("refuse")
