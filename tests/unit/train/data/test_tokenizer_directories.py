"""Tokenizer directories of many kinds, compared with ``transformers.AutoTokenizer``.

``FLAGSCALE_TOKENIZER_TEXTS`` sets the number of random texts per kind of directory.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from flagscale.config.model_files import read_vocabulary
from flagscale.errors import DataError
from flagscale.train.data.tokenizers import Tokenizer, TokenizerSpec, open_tokenizer

TEXTS = int(os.environ.get("FLAGSCALE_TOKENIZER_TEXTS", "300"))
CORPUS = [
    "the quick brown fox jumps over the lazy dog and returns to the den\n",
    "def add(a, b):\n    return a + b  # sum of two numbers\n",
    "Grüße aus Köln, où l'été est déjà là; 漢字とかな 한국어 русский текст\n",
    "1234567890 3.14159 1,000,000 <tag> [bracket] {brace} a_b-c/d\\e\n",
] * 20
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")
EXTRA = ("<|im_start|>", "<|im_end|>", "<tool>")
PIECES = (
    *SPECIAL,
    *EXTRA,
    "<s>",
    "</s>",
    "<unk>",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "<|endoftext|>",
    " ",
    "  ",
    "\n",
    "\t",
    "\u00a0",
    "\u200b",
    "e\u0301",
    "\ufb01",
    "🦙",
    "ß",
    "İ",
    "漢字",
    "the quick",
    " fox",
    "def add(a, b):",
    "12345",
    "don't",
    "▁",
    "Ġ",
    "ab<tool>cd",
    "<|im_start",
    "|>",
)


def make_texts(seed: str) -> list[str]:
    """Return random texts with special tokens at odd places."""
    generator = random.Random(seed)
    texts = ["", " ", "\n"]
    while len(texts) < TEXTS:
        count = generator.randrange(1, 12)
        texts.append("".join(generator.choice(PIECES) for _ in range(count)))
    return texts


def train_byte_level(special: tuple[str, ...] = SPECIAL, *, prefix_space: bool = False) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return backend


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def write_generic(directory: Path, *, backend: Backend | None = None, **settings: Any) -> None:
    """Write tokenizer.json and a tokenizer_config.json of transformers' generic class."""
    (backend or train_byte_level()).save(str(directory / "tokenizer.json"))
    defaults = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
    }
    write_json(directory / "tokenizer_config.json", {**defaults, **settings})


def write_added_tokens_json(directory: Path) -> None:
    write_generic(directory)
    size = train_byte_level().get_vocab_size()
    write_json(directory / "added_tokens.json", {t: size + i for i, t in enumerate(EXTRA)})


def write_added_tokens_decoder(directory: Path) -> None:
    size = train_byte_level().get_vocab_size()
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    tokens = {
        str(size + i): {"content": token, "special": i < 2, **flags}
        for i, token in enumerate(EXTRA)
    }
    write_generic(directory, added_tokens_decoder=tokens)


def write_truncated(directory: Path) -> None:
    backend = train_byte_level()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(pad_id=0, pad_token=SPECIAL[0], length=6)
    write_generic(directory, backend=backend)


def write_flagged(directory: Path) -> None:
    backend = train_byte_level()
    backend.add_tokens(
        [
            AddedToken("<tool>", lstrip=True, rstrip=True, normalized=False),
            AddedToken("fox", single_word=True),
            AddedToken("the quick", lstrip=True),
        ]
    )
    backend.add_special_tokens([AddedToken("<|im_start|>", rstrip=True), "<|im_end|>"])
    write_generic(directory, backend=backend)


def write_normalizing(directory: Path) -> None:
    backend = train_byte_level()
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace("x", "ks")]
    )
    backend.add_tokens(["Fox"])
    write_generic(directory, backend=backend)


def write_gpt2_files(directory: Path, **settings: Any) -> None:
    backend = train_byte_level(("<|endoftext|>",))
    backend.model.save(str(directory))
    if settings:
        write_json(directory / "tokenizer_config.json", settings)


def write_llama3(directory: Path) -> None:
    write_generic(directory, additional_special_tokens=["<|im_start|>"])
    write_json(directory / "config.json", {"model_type": "llama"})


def write_byte_fallback(directory: Path, **settings: Any) -> None:
    """Write a tokenizer.json like those of Llama 2: metaspace, byte fallback, prepended space."""
    fallback = [f"<0x{value:02X}>" for value in range(256)]
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.train_from_iterator(
        [line.replace(" ", "▁") for line in CORPUS],
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *fallback], show_progress=False
        ),
    )
    backend.save(str(directory / "tokenizer.json"))
    defaults = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(directory / "tokenizer_config.json", {**defaults, **settings})


def write_sentencepiece(directory: Path, kind: str = "bpe", **settings: Any) -> None:
    import sentencepiece

    corpus = directory.parent / f"{directory.name}.txt"
    corpus.write_text("".join(CORPUS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=420,
        model_type=kind,
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    (directory / "tokenizer.vocab").unlink()
    write_json(directory / "tokenizer_config.json", settings)


def write_wordpiece(directory: Path) -> None:
    words = sorted({word for line in CORPUS for word in line.lower().split()})
    letters = sorted(set("".join(CORPUS).lower()) - set(" \n"))
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    tokens += [*letters, *(f"##{letter}" for letter in letters)]
    (directory / "vocab.txt").write_text("\n".join(dict.fromkeys(tokens)), encoding="utf-8")
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "sep_token": "[SEP]"},
    )


def write_unigram(directory: Path) -> None:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=300,
            special_tokens=[*SPECIAL, "<unk>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    write_generic(directory, backend=backend, unk_token="<unk>")


LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
KINDS: Mapping[str, Callable[[Path], None]] = {
    "byte-level": write_generic,
    "added-tokens-json": write_added_tokens_json,
    "added-tokens-decoder": write_added_tokens_decoder,
    "additional-special-tokens": lambda d: write_generic(
        d, additional_special_tokens=list(EXTRA), pad_token="<pad>"
    ),
    "extra-special-tokens": lambda d: write_generic(d, extra_special_tokens=list(EXTRA)),
    "truncation-and-padding": write_truncated,
    "flagged-added-tokens": write_flagged,
    "normalizer": write_normalizing,
    "prefix-space": lambda d: write_generic(d, backend=train_byte_level(prefix_space=True)),
    "prefix-space-setting": lambda d: write_generic(d, add_prefix_space=True),
    "split-special-tokens": lambda d: write_generic(d, split_special_tokens=True),
    "gpt2-class": lambda d: write_gpt2_files(d, tokenizer_class="GPT2Tokenizer"),
    "qwen2-class": lambda d: write_gpt2_files(
        d,
        tokenizer_class="Qwen2Tokenizer",
        eos_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    ),
    "llama3": write_llama3,
    "byte-fallback": lambda d: write_byte_fallback(d, tokenizer_class="PreTrainedTokenizerFast"),
    "llama-class": lambda d: write_byte_fallback(d, tokenizer_class="LlamaTokenizer"),
    "llama-class-legacy": lambda d: write_byte_fallback(
        d, tokenizer_class="LlamaTokenizer", legacy=True
    ),
    "sentencepiece": lambda d: write_sentencepiece(d, tokenizer_class="LlamaTokenizer", **LLAMA),
    "sentencepiece-added": lambda d: write_sentencepiece(
        d, tokenizer_class="LlamaTokenizer", additional_special_tokens=list(EXTRA), **LLAMA
    ),
    "wordpiece": write_wordpiece,
    "unigram": write_unigram,
}


def open_directory(directory: Path) -> Tokenizer:
    return open_tokenizer(TokenizerSpec("HuggingFaceTokenizer", str(directory)))


@pytest.mark.parametrize("kind", KINDS)
def test_directory_means_what_auto_tokenizer_makes_of_it(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = tmp_path / kind
    directory.mkdir()
    KINDS[kind](directory)
    reference = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    tokenizer = open_directory(directory)
    texts = make_texts(kind)
    expected = reference(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer.tokenize_many(texts) == expected
    assert [tokenizer.tokenize(text) for text in texts[:50]] == expected[:50]
    assert tokenizer.vocab_size == max(reference.get_vocab().values()) + 1
    ids = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eod}
    for name, token_id in ids.items():
        if getattr(reference, name) is not None:
            assert token_id == getattr(reference, f"{name}_id")
    assert dict(tokenizer.special_tokens) == {
        name: text for name, text in reference.special_tokens_map.items() if isinstance(text, str)
    }
    # The launcher counts the same tokens, without transformers.
    vocabulary = read_vocabulary("HuggingFaceTokenizer", str(directory))
    if vocabulary is not None:
        assert vocabulary.size <= tokenizer.vocab_size
        # Some tokenizer classes add tokens that no file names.
        assert vocabulary.size == tokenizer.vocab_size or kind in ("gpt2-class", "qwen2-class")


@pytest.mark.parametrize(
    "name", ["byte-level", "truncation-and-padding", "flagged-added-tokens", "normalizer"]
)
def test_transformers_is_not_imported_for_a_self_contained_directory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    KINDS[name](tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert open_directory(tmp_path).tokenize("the quick fox")


def test_a_directory_that_needs_transformers_is_refused_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    write_added_tokens_decoder(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"'<\|im_start\|>', which tokenizer.json does not add"):
        open_directory(tmp_path)


def test_a_directory_without_tokens_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", **LLAMA})
    with pytest.raises(DataError, match="holds no tokenizer"):
        open_directory(tmp_path)
