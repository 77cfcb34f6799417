"""Files of a tokenizer on this machine, checked before any rank opens them. No torch.

The ranks open a tokenizer with its library. Here its files are only looked for, so that a directory
without a tokenizer, or a tokenizer without the chat template that ``sft`` needs, is reported before
anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.data_arguments import CHAT_TEMPLATES
from flagscale.config.model_files import (
    HUGGINGFACE_TOKENIZERS,
    SENTENCEPIECE_TOKENIZERS,
)
from flagscale.config.yaml_file import short_path
from flagscale.errors import DataError
from flagscale.tokenizer_files import (
    DEFAULT_TEMPLATE,
    TEMPLATE_FILE,
    find_vocabulary_files,
    read_chat_templates,
    read_settings,
)

_TYPE, _PATH = "tokenizer_type", "tokenizer_path"


def check_tokenizer_files(args: Values, *, shared_fs: bool) -> Iterator[Violation]:
    """Check that the tokenizer is given, and that its files are those of its type.

    Files that are not on this machine, or may differ between hosts (``shared_fs`` is false), are
    left to the hosts.
    """
    kind = args[_TYPE]
    if kind is None and not args["mock_data"]:
        names = "HuggingFaceTokenizer for a directory with tokenizer.json"
        yield _TYPE, f"is required without mock_data: {names}"
    if kind not in (*HUGGINGFACE_TOKENIZERS, *SENTENCEPIECE_TOKENIZERS):
        return
    if args[_PATH] is None:
        yield _PATH, _require_path(args)
        return
    path = Path(args[_PATH])
    if not shared_fs or not path.exists():
        return
    if kind in SENTENCEPIECE_TOKENIZERS:
        file = path / "tokenizer.model" if path.is_dir() else path
        if not file.is_file():
            message = f"no tokenizer.model in {short_path(path)}, as {kind} needs"
            yield _PATH, f"{message}{_suggest_type(path)}"
    elif path.is_dir() or path.suffix == ".json":
        yield from _check_directory(args, path if path.is_dir() else path.parent)


def _require_path(args: Values) -> str:
    """Return the message about a missing ``tokenizer_path``, with the directory of the pretrained
    model if that has a tokenizer.
    """
    message = f"is required by tokenizer_type: {args[_TYPE]}, a directory with tokenizer.json"
    model = args["pretrained_checkpoint"]
    if model and Path(model).is_dir() and find_vocabulary_files(Path(model)):
        return f"{message}; the pretrained model has one: write `{_PATH}: {model}`"
    return message


def _suggest_type(path: Path) -> str:
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return "; it has a tokenizer.json: use tokenizer_type: HuggingFaceTokenizer"
    return ""


def _check_directory(args: Values, directory: Path) -> Iterator[Violation]:
    if args["merge_file"]:
        return  # GPT-2's vocabulary and merges, given as two files
    if not find_vocabulary_files(directory):
        names = ", ".join(sorted(item.name for item in directory.iterdir())[:8]) or "nothing"
        message = f"{short_path(directory)} holds no tokenizer: expected tokenizer.json, or the "
        yield _PATH, f"{message}vocabulary of another kind; found {names}"
        return
    try:
        templates = read_chat_templates(directory, read_settings(directory).get("chat_template"))
    except DataError as error:
        yield _PATH, error.message
        return
    if not args["sft"] or args["chat_template"] is not None or DEFAULT_TEMPLATE in templates:
        return
    problem = (
        f"its chat templates are {', '.join(templates)}, and none is named {DEFAULT_TEMPLATE}"
        if templates
        else f"it has neither {TEMPLATE_FILE} nor chat_template in tokenizer_config.json"
    )
    yield (
        "chat_template",
        f"is required: the tokenizer in {short_path(directory)} has no chat template ({problem}); "
        f"set it to {' or '.join(CHAT_TEMPLATES)}, or to a .jinja file",
    )
