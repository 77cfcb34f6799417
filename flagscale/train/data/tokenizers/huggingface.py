"""Hugging Face tokenizers from a local directory.

Token ids are those of ``transformers.AutoTokenizer``. They depend on more than ``tokenizer.json``:
on the tokenizer class, on the model type in ``config.json``, and on tokens that only
``tokenizer_config.json`` or ``added_tokens.json`` lists. So transformers opens the directory,
unless ``tokenizer.json`` alone provably defines the same tokenizer. Reading that file takes
milliseconds, whereas importing transformers delays the start of every rank. Nothing is ever
downloaded, and no code of a directory is run.

Truncation and padding that ``tokenizer.json`` stores are never applied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.errors import DataError
from flagscale.tokenizer_files import (
    DEFAULT_TEMPLATE,
    SPECIAL_TOKEN_NAMES,
    VOCABULARY_SUFFIXES,
    iter_declared_tokens,
    read_chat_templates,
    read_settings,
    token_text,
)
from flagscale.train.data.tokenizers.base import Tokenizer, hash_files

_END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eod>", "<|im_end|>", "[SEP]")
_AQUILA_END_TOKEN = "</s>"
_GPT2_END_TOKEN = "<|endoftext|>"
_BEGIN_TOKENS = ("<|begin_of_text|>", "<s>")
_BERT_TOKENS: Mapping[str, tuple[str, ...]] = {
    "mask_token": ("[MASK]", "<mask>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
}
"""Special tokens of models like BERT, and their usual texts."""

_GENERIC_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Values of ``tokenizer_class`` for which transformers uses ``tokenizer.json`` unchanged. Other
classes build normalizer and pre-tokenizer themselves."""
_NEUTRAL_SETTINGS = frozenset(
    (
        *SPECIAL_TOKEN_NAMES,
        "added_tokens_decoder",
        "additional_special_tokens",
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",
        "extra_special_tokens",
        "is_local",
        "model_input_names",
        "model_max_length",
        "padding_side",
        "tokenizer_class",
        "truncation_side",
    )
)
"""Keys of ``tokenizer_config.json`` that change no token id, or that are compared with
``tokenizer.json``."""
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def open_directory(path: Path) -> Tokenizer:
    """Open the tokenizer in a Hugging Face directory, or a ``tokenizer.json``.

    Raises:
        DataError: the path does not exist, or holds no tokenizer that can be read offline.
    """
    if path.is_file() and path.suffix == ".json":
        path = path.parent
    if not path.is_dir():
        raise DataError(
            f"{path}: no such tokenizer directory",
            hint="a Hugging Face tokenizer is a local directory with tokenizer.json and "
            "tokenizer_config.json; nothing is downloaded by name",
        )
    if (path / "tokenizer.json").is_file():
        return _open_tokenizer_json(path)
    has_gpt2_files = (path / "vocab.json").is_file() and (path / "merges.txt").is_file()
    if has_gpt2_files and not _has_settings(path):
        return _open_gpt2_files(path)
    if not _list_model_files(path):
        names = ", ".join(sorted(item.name for item in path.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{path}: holds no tokenizer: expected tokenizer.json and tokenizer_config.json, "
            f"found {names}"
        )
    return _open_with_transformers(path, "there is no tokenizer.json")


def open_files(vocabulary: Path, merges: Path, special_tokens: Path | None = None) -> Tokenizer:
    """Open a tokenizer from GPT-2's files, wherever they are.

    Args:
        vocabulary: ``vocab.json``.
        merges: ``merges.txt``.
        special_tokens: file with one token per line; they get the ids after the vocabulary's. In
            Aquila's tokenizers, ``</s>`` among them ends a document.

    Raises:
        DataError: a file is missing or invalid.
    """
    files = [vocabulary, merges, *([special_tokens] if special_tokens else [])]
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    if special_tokens is None:
        settings = read_settings(vocabulary.parent)
    else:
        settings = {"eos_token": _AQUILA_END_TOKEN}
    return FastTokenizer(
        _load_backend(files),
        vocabulary.parent,
        _special_token_texts(settings),
        files=hash_files(files),
    )


def _open_tokenizer_json(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    settings = read_settings(directory)
    if reason := _explain_settings_effect(directory, settings):
        return _open_with_transformers(directory, reason)
    backend = _load_backend([file])
    if reason := next(_iter_backend_differences(directory, backend, settings), None):
        return _open_with_transformers(directory, reason)
    special_tokens = _special_token_texts(settings)
    if backend.padding is not None:
        special_tokens.setdefault("pad_token", backend.padding["pad_token"])
    return FastTokenizer(
        backend,
        directory,
        special_tokens,
        chat_templates=read_chat_templates(directory, settings.get("chat_template")),
        files=hash_files([file]),
    )


def _open_gpt2_files(directory: Path) -> Tokenizer:
    files = [directory / "vocab.json", directory / "merges.txt"]
    backend = _load_backend(files)
    if backend.token_to_id(_GPT2_END_TOKEN) is not None:
        backend.add_special_tokens([_GPT2_END_TOKEN])
    return FastTokenizer(backend, directory, {}, files=hash_files(files))


class FastTokenizer(Tokenizer):
    """A tokenizer with a backend of the ``tokenizers`` library."""

    def __init__(
        self,
        backend: Any,
        directory: Path,
        special_tokens: Mapping[str, str],
        *,
        chat_templates: Mapping[str, str] | None = None,
        **identity: str,
    ) -> None:
        """
        Args:
            backend: a ``tokenizers.Tokenizer``; its truncation and padding are switched off.
            directory: directory of its files, for messages.
            special_tokens: texts of the special tokens by name, such as ``eos_token``.
            chat_templates: Jinja templates by name.
            identity: values that identify this tokenizer in cache keys, such as a hash of its
                files.

        Raises:
            DataError: no token ends a document.
        """
        super().__init__(**identity)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates or {})
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        self._bos = _find_special_id(vocabulary, special_tokens, "bos_token", _BEGIN_TOKENS)
        begin_ids = backend.encode("", add_special_tokens=True).ids[:1]
        has_prefix = self._bos is not None and begin_ids == [self._bos]
        self._text_prefix_ids = tuple(begin_ids) if has_prefix else ()
        self._bert_ids = {
            name: _find_special_id(vocabulary, special_tokens, name, usual_texts, required=False)
            for name, usual_texts in _BERT_TOKENS.items()
        }
        eod = _find_special_id(vocabulary, special_tokens, "eos_token", _END_TOKENS)
        eod = self._bert_ids["sep_token"] if eod is None else eod
        if eod is None:
            raise DataError(
                f"{directory}: no end-of-document token: tokenizer_config.json names no eos_token "
                f"of the vocabulary, and none of {', '.join(_END_TOKENS)} is in it"
            )
        self._eod = eod

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eod(self) -> int:
        return self._eod

    @property
    def bos(self) -> int | None:
        return self._bos

    @property
    def text_prefix_ids(self) -> tuple[int, ...]:
        return self._text_prefix_ids

    @property
    def mask(self) -> int | None:
        return self._bert_ids["mask_token"]

    @property
    def cls(self) -> int | None:
        return self._bert_ids["cls_token"]

    @property
    def sep(self) -> int | None:
        return self._bert_ids["sep_token"]

    def find_id(self, token: str) -> int | None:
        token_id = self._backend.token_to_id(token)
        return None if token_id is None else int(token_id)

    def tokenize(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def tokenize_with_special_tokens(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def tokenize_many(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    @property
    def special_ids(self) -> frozenset[int]:
        added_tokens = self._backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added_tokens.items() if token.special)

    def tokenize_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            (list(encoding.ids), [begin for begin, _ in encoding.offsets]) for encoding in encodings
        ]

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=False))


class PythonTokenizer(Tokenizer):
    """A tokenizer that transformers implements in Python, without the ``tokenizers`` library."""

    def __init__(self, tokenizer: Any, directory: Path, **identity: str) -> None:
        """
        Args:
            tokenizer: a tokenizer of transformers.
            directory: directory of its files, for messages.
            identity: values that identify this tokenizer in cache keys, such as a hash of its
                files.

        Raises:
            DataError: no token ends a document.
        """
        super().__init__(**identity)
        self._tokenizer = tokenizer
        self.special_tokens = _special_tokens_of(tokenizer)
        self.chat_templates = _chat_templates_of(tokenizer)
        end_ids = (self._get_special_id("eos_token"), self._get_special_id("sep_token"))
        eod = next((token_id for token_id in end_ids if token_id is not None), None)
        if eod is None:
            raise DataError(f"{directory}: the tokenizer names no eos_token and no sep_token")
        self._eod = eod

    @property
    def vocab_size(self) -> int:
        return int(max(self._tokenizer.get_vocab().values())) + 1

    @property
    def eod(self) -> int:
        return self._eod

    @property
    def bos(self) -> int | None:
        return self._get_special_id("bos_token")

    @property
    def mask(self) -> int | None:
        return self._get_special_id("mask_token")

    @property
    def cls(self) -> int | None:
        return self._get_special_id("cls_token")

    @property
    def sep(self) -> int | None:
        return self._get_special_id("sep_token")

    def _get_special_id(self, name: str) -> int | None:
        token_id = getattr(self._tokenizer, f"{name}_id")
        return None if token_id is None else int(token_id)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(map(int, self._tokenizer.all_special_ids))

    def find_id(self, token: str) -> int | None:
        token_id = self._tokenizer.get_vocab().get(token)
        return None if token_id is None else int(token_id)

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def tokenize_with_special_tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def _open_with_transformers(directory: Path, reason: str) -> Tokenizer:
    """Open a directory with ``AutoTokenizer``.

    Args:
        directory: the tokenizer's directory.
        reason: why ``tokenizer.json`` alone does not define the tokenizer.

    Raises:
        DataError: transformers is not installed, or cannot read the directory.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # never look up a name on the hub
    try:
        import transformers
    except ImportError as error:
        raise DataError(
            f"{directory}: {reason}, so only transformers can tell its token ids, and it is not "
            f"installed ({error})",
            hint="pip install transformers",
        ) from None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises whatever its backends do
        names = ", ".join(sorted(item.name for item in directory.iterdir())) or "nothing"
        lines = str(error).strip().splitlines()
        raise DataError(
            f"{directory}: holds no tokenizer that can be read: {lines[0] if lines else error!r}",
            hint=f"expected tokenizer.json (and tokenizer_config.json); found {names}",
        ) from error
    vocabulary_files = set(tokenizer.vocab_files_names.values()) - {"tokenizer_config.json"}
    if not any((directory / name).is_file() for name in vocabulary_files):
        # transformers makes an empty tokenizer of settings alone.
        raise DataError(
            f"{directory}: holds no tokenizer: expected {' or '.join(sorted(vocabulary_files))}"
        )
    identity = {
        "files": hash_files(_list_model_files(directory)),
        # Token ids of some classes have changed between versions.
        "transformers": transformers.__version__,
    }
    if not tokenizer.is_fast or getattr(tokenizer, "split_special_tokens", False):
        return PythonTokenizer(tokenizer, directory, **identity)
    return FastTokenizer(
        tokenizer.backend_tokenizer,
        directory,
        _special_tokens_of(tokenizer),
        chat_templates=_chat_templates_of(tokenizer),
        **identity,
    )


def _special_tokens_of(tokenizer: Any) -> dict[str, str]:
    """Return the named special tokens of a transformers tokenizer, as templates get them."""
    return {
        name: str(text)
        for name, text in tokenizer.special_tokens_map.items()
        if isinstance(text, str)
    }


def _chat_templates_of(tokenizer: Any) -> dict[str, str]:
    templates = tokenizer.chat_template
    if templates is None:
        return {}
    return dict(templates) if isinstance(templates, dict) else {DEFAULT_TEMPLATE: templates}


def _explain_settings_effect(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """Return why, because of its settings, transformers may load a tokenizer that differs from
    ``tokenizer.json``; None if it cannot differ.

    Args:
        directory: the tokenizer's directory.
        settings: result of :func:`read_settings`.
    """
    tokenizer_class = settings.get("tokenizer_class")
    if tokenizer_class not in _GENERIC_CLASSES:
        return f"its tokenizer_class {tokenizer_class} changes tokenizer.json when it is loaded"
    if (directory / "config.json").is_file():
        return "its token ids may depend on the model type in config.json"
    unknown_settings = sorted(settings.keys() - _NEUTRAL_SETTINGS)
    return f"tokenizer_config.json sets {unknown_settings[0]}" if unknown_settings else None


def _iter_backend_differences(
    directory: Path, backend: Any, settings: Mapping[str, Any]
) -> Iterator[str]:
    """Yield why transformers may load a tokenizer that differs from ``tokenizer.json``: a
    pre-tokenizer that adds spaces, and tokens that other files declare differently.

    Args:
        directory: the tokenizer's directory.
        backend: ``tokenizer.json``, as a ``tokenizers.Tokenizer``.
        settings: result of :func:`read_settings`.
    """
    if "add_prefix_space=True" in str(backend.pre_tokenizer):
        yield "its pre-tokenizer adds a space in front"
    added_tokens = {
        token.content: (index, token) for index, token in backend.get_added_tokens_decoder().items()
    }
    for token, index in iter_declared_tokens(directory, settings):
        text = token_text(token)
        if text not in added_tokens:
            yield f"its files name the token {text!r}, which tokenizer.json does not add"
            continue
        known_index, known_token = added_tokens[text]
        flags = {"special": True} if isinstance(token, str) else token
        if index not in (None, known_index) or any(
            flags[name] != getattr(known_token, name) for name in _TOKEN_FLAGS if name in flags
        ):
            yield f"its files describe the token {text!r} differently from tokenizer.json"


def _load_backend(files: list[Path]) -> Any:
    """Load a tokenizer of the ``tokenizers`` library from ``tokenizer.json``, or from GPT-2's
    files.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    names = " and ".join(str(file) for file in files)
    try:
        if len(files) == 1:
            return Backend.from_file(str(files[0]))
        backend = Backend(models.BPE.from_file(*map(str, files[:2])))  # GPT-2's file format
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        for path in files[2:]:
            backend.add_special_tokens(path.read_text(encoding="utf-8").splitlines())
        return backend
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise DataError(f"{names}: not a tokenizer that can be read: {error}") from None


def _has_settings(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("tokenizer_config.json", "config.json"))


def _special_token_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the named special tokens in settings."""
    texts = ((name, token_text(settings.get(name))) for name in SPECIAL_TOKEN_NAMES)
    return {name: text for name, text in texts if text is not None}


def _find_special_id(
    vocabulary: Mapping[str, int],
    special_tokens: Mapping[str, str],
    name: str,
    candidates: tuple[str, ...],
    *,
    required: bool = True,
) -> int | None:
    """Return the id of a special token, or None.

    Args:
        vocabulary: token ids by text.
        special_tokens: texts of the special tokens by name.
        name: the special token.
        candidates: texts to look for if ``special_tokens`` lacks it.
        required: raise DataError if the vocabulary lacks the named token.
    """
    text = special_tokens.get(name)
    if text is None:
        return next((vocabulary[item] for item in candidates if item in vocabulary), None)
    if text not in vocabulary and required:
        raise DataError(f"tokenizer_config.json: {name} {text!r} is not in the vocabulary")
    return vocabulary.get(text)


def _list_model_files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if p.suffix in VOCABULARY_SUFFIXES)
