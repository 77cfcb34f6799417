"""Tokenizers from local files, by Megatron-LM's type names."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.config.arguments.spec.data_arguments import TOKENIZERS
from flagscale.errors import DataError
from flagscale.train.data import train_bpe
from flagscale.train.data.tokenizers import (
    TOKENIZER_TYPES,
    Tokenizer,
    TokenizerSpec,
    build_tokenizer,
    describe_unused_vocabulary,
    open_tokenizer,
)

TEXT = "def main(argv: list[str]) -> int:\n    return 0  # ünïcödé \U0001f600\n"
BPE = train_bpe.BpeSettings(vocab_size=300)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tokenizer and write it as a Hugging Face directory with an unusual name."""
    output = tmp_path_factory.mktemp("tok") / "it's a $tokenizer"
    tokenizer = train_bpe.train_tokenizer([TEXT * 20] * 3, BPE)
    train_bpe.write_directory(tokenizer, output, BPE.special_tokens)
    return output


def test_the_launcher_has_the_same_types() -> None:
    assert set(TOKENIZER_TYPES) == set(TOKENIZERS)


def open_hugging_face(path: Path) -> Tokenizer:
    return open_tokenizer(TokenizerSpec("HuggingFaceTokenizer", str(path)))


def test_a_trained_tokenizer_reads_back(directory: Path) -> None:
    tokenizer = open_hugging_face(directory)
    assert tokenizer.vocab_size == 300
    assert (tokenizer.bos, tokenizer.eod) == (0, 1)
    ids = tokenizer.tokenize(TEXT)
    assert max(ids) < 300
    assert tokenizer.detokenize(ids) == TEXT
    assert tokenizer.tokenize_many([TEXT, ""]) == [ids, []]
    assert not hasattr(tokenizer, "pad")
    json.dumps(tokenizer.unique_identifiers)


BERT_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")


@pytest.mark.parametrize(
    ("tokens", "settings", "expected"),
    [
        pytest.param(BERT_TOKENS, {}, (3, 1, 2, 2), id="by-their-names"),
        pytest.param(
            ("<s>", "</s>", "<mask>"),
            {"cls_token": "<s>", "sep_token": "</s>", "mask_token": {"content": "<mask>"}},
            (2, 0, 1, 1),
            id="as-the-settings-say",
        ),
        pytest.param(BPE.special_tokens, {}, (None, None, None, 1), id="none"),
        pytest.param(BPE.special_tokens, {"mask_token": "[M]"}, (300, None, None, 1), id="added"),
    ],
)
def test_special_tokens_of_masked_models(
    tmp_path: Path,
    tokens: tuple[str, ...],
    settings: dict[str, object],
    expected: tuple[int | None, ...],
) -> None:
    trained = train_bpe.train_tokenizer([TEXT * 20], train_bpe.BpeSettings(300, tokens))
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = open_hugging_face(tmp_path)
    assert (tokenizer.mask, tokenizer.cls, tokenizer.sep, tokenizer.eod) == expected


def test_training_is_deterministic() -> None:
    first, two = (train_bpe.train_tokenizer([TEXT * 20], BPE).to_str() for _ in range(2))
    assert first == two


def test_identity_is_the_content_not_the_place(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in directory.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert (
        open_hugging_face(copy).unique_identifiers
        == open_hugging_face(directory).unique_identifiers
    )


@pytest.mark.parametrize(
    "tokenizer_type", ["Llama3TokenizerFS", "HFTokenizerFS", "QwenTokenizerFS"]
)
def test_older_type_names_open_hugging_face_directories(
    directory: Path, tokenizer_type: str
) -> None:
    assert open_tokenizer(TokenizerSpec(tokenizer_type, str(directory))).vocab_size == 300


def test_llama3_special_tokens_written_as_objects(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    config = {"eos_token": {"content": "<|end_of_text|>", "special": True}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_hugging_face(tmp_path / "tokenizer.json")
    assert (tokenizer.bos, tokenizer.eod) == (0, 1)


def test_gpt2_files_are_read(tmp_path: Path) -> None:
    trained = train_bpe.train_tokenizer([TEXT * 20], BPE)
    trained.model.save(str(tmp_path))
    tokenizer = open_tokenizer(TokenizerSpec("GPT2BPETokenizer", str(tmp_path)))
    assert (tokenizer.vocab_size, tokenizer.eod) == (300, 1)
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT


def test_aquila_files_are_read(tmp_path: Path) -> None:
    train_bpe.train_tokenizer([TEXT * 20], BPE).model.save(str(tmp_path))
    special = tmp_path / "special_tokens.txt"
    special.write_text("[CLS]\n</s>\n", encoding="utf-8")
    files = [str(tmp_path / name) for name in ("vocab.json", "merges.txt", "special_tokens.txt")]
    spec = TokenizerSpec(
        "AquilaTokenizerFS", files[0], merge_file=files[1], special_tokens_file=files[2]
    )
    tokenizer = open_tokenizer(spec)
    assert (tokenizer.vocab_size, tokenizer.eod) == (302, 301)
    ids = tokenizer.tokenize(f"{TEXT}</s>")
    assert (ids[-1], tokenizer.detokenize(ids)) == (301, f"{TEXT}</s>")
    plain = open_tokenizer(TokenizerSpec("GPT2BPETokenizer", files[0], merge_file=files[1]))
    assert plain.tokenize(TEXT) == ids[:-1]


def train_sentencepiece(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("the cat sat on the mat\na dog ate the cat\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=18,
        minloglevel=2,
    )


def test_sentencepiece_model_is_read(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path)
    tokenizer = open_tokenizer(TokenizerSpec("Llama2Tokenizer", str(tmp_path)))
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (18, 1, 2)
    assert tokenizer.detokenize(tokenizer.tokenize("the cat sat")) == "the cat sat"


def test_a_bert_vocabulary_is_read(tmp_path: Path) -> None:
    """It has no end-of-document token except the separator."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer"})
    )
    tokenizer = open_hugging_face(tmp_path)
    assert (tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask, tokenizer.vocab_size) == (
        2,
        3,
        3,
        4,
        8,
    )
    assert tokenizer.tokenize("Hello worlds") == [5, 6, 7]


def test_a_directory_that_only_transformers_can_read(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_hugging_face(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (18, 1, 2)
    assert tokenizer.detokenize(tokenizer.tokenize("the cat sat")) == "the cat sat"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({}, "holds no tokenizer: expected tokenizer.json", id="empty"),
        pytest.param({"config.json": "{}"}, "no tokenizer that can be read", id="model-config"),
    ],
)
def test_directories_without_a_tokenizer_are_refused(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    pytest.importorskip("transformers")
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        open_hugging_face(tmp_path)


def test_null_tokenizer_reads_token_ids() -> None:
    tokenizer = open_tokenizer(TokenizerSpec("NullTokenizer", vocab_size=10))
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10)
    assert tokenizer.tokenize("1 9 0") == [1, 9, 0]
    assert tokenizer.detokenize([1, 9]) == "1 9"


@pytest.mark.parametrize("text", ["1 x", "10", "-1", "1.5"])
def test_null_tokenizer_takes_ids_only(text: str) -> None:
    with pytest.raises(DataError, match="NullTokenizer"):
        open_tokenizer(TokenizerSpec("NullTokenizer", vocab_size=10)).tokenize(text)


@given(st.text())
def test_byte_level_gives_text_back(text: str) -> None:
    tokenizer = open_tokenizer(TokenizerSpec("ByteLevelTokenizer"))
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(
            TokenizerSpec("HugingFaceTokenizr"), "did you mean HuggingFaceTokenizer", id="misspelt"
        ),
        pytest.param(TokenizerSpec("zzz"), "known: HuggingFaceTokenizer, Llama3", id="unknown"),
        pytest.param(TokenizerSpec("HuggingFaceTokenizer"), "needs tokenizer_path", id="no-path"),
        pytest.param(
            TokenizerSpec("HuggingFaceTokenizer", "meta-llama/Meta-Llama-3-8B"),
            "nothing is downloaded by name",
            id="hub-name",
        ),
        pytest.param(TokenizerSpec("NullTokenizer"), "vocab_size of at least 1", id="null"),
        pytest.param(
            TokenizerSpec("Llama2Tokenizer", "/none/x"), "no such SentencePiece", id="sentencepiece"
        ),
    ],
)
def test_unusable_specs_are_refused(spec: TokenizerSpec, message: str) -> None:
    with pytest.raises(DataError) as caught:
        open_tokenizer(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        pytest.param({"tokenizer.json": "{"}, "not a tokenizer that can be read", id="cut"),
        pytest.param(
            {"tokenizer.json": None, "tokenizer_config.json": "[]"},
            "expected a JSON object, found list",
            id="config-list",
        ),
        pytest.param(
            {"tokenizer.json": None, "tokenizer_config.json": "{"}, "not JSON", id="config-cut"
        ),
    ],
)
def test_damaged_directories_are_refused(
    directory: Path, tmp_path: Path, files: dict[str, str | None], message: str
) -> None:
    for name, content in files.items():
        whole = (directory / name).read_text()
        (tmp_path / name).write_text(whole if content is None else content)
    with pytest.raises(DataError) as caught:
        open_hugging_face(tmp_path)
    assert message in str(caught.value)


def test_an_eos_token_that_is_not_in_the_vocabulary_gets_the_next_id(
    directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<x>"}')
    tokenizer = open_hugging_face(tmp_path)
    assert (tokenizer.eod, tokenizer.vocab_size) == (300, 301)


def test_a_vocabulary_larger_than_the_models_is_refused(directory: Path) -> None:
    args = Namespace(
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_path=str(directory),
        vocab_size=256,
        mock_data=False,
    )
    with pytest.raises(DataError, match="has 300 entries, more than the model's vocab_size 256"):
        build_tokenizer(args)
    args.vocab_size = 300
    assert build_tokenizer(args).vocab_size == 300


@pytest.mark.parametrize(
    ("vocab_size", "is_warned"), [(None, False), (300, False), (600, True), (599, False)]
)
def test_a_mostly_unused_vocabulary_is_reported(
    directory: Path, vocab_size: int | None, is_warned: bool
) -> None:
    assert (
        describe_unused_vocabulary(open_hugging_face(directory), vocab_size) is not None
    ) == is_warned


def test_mock_data_needs_no_tokenizer() -> None:
    args = Namespace(tokenizer_type=None, tokenizer_path=None, vocab_size=64, mock_data=True)
    assert build_tokenizer(args).vocab_size == 65
    args.mock_data = False
    with pytest.raises(DataError, match="tokenizer_type is not set"):
        build_tokenizer(args)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(train_bpe.BpeSettings(257), "take 258", id="small"),
        pytest.param(train_bpe.BpeSettings(9999), "too little for 9999 tokens", id="little-text"),
        pytest.param(
            train_bpe.BpeSettings(300, ("<a>", "<a>")), "two different", id="same-special"
        ),
    ],
)
def test_impossible_training_settings_are_refused(
    settings: train_bpe.BpeSettings, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        train_bpe.train_tokenizer([TEXT * 5], settings)


def test_a_directory_of_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    trained = train_bpe.train_tokenizer([TEXT * 20], BPE)
    with pytest.raises(DataError, match=r"other files than a tokenizer's: thesis\.tex"):
        train_bpe.write_directory(trained, tmp_path, BPE.special_tokens)
    assert (tmp_path / "thesis.tex").exists()
