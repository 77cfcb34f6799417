"""Chat templates: how a tokenizer's model is told who says what.

A template is Jinja, as ``tokenizer_config.json`` has it, or ``chat_template.jinja`` beside it. It
is rendered as transformers renders it, in a sandbox: a template can neither reach Python nor change
what it is given. What the time is, it is not told, so that a conversation is the same every day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from flagscale.config.arguments.paths import is_template_file
from flagscale.errors import DataError
from flagscale.train.data.chat.records import Message, UnfitError
from flagscale.train.data.tokenizers.huggingface import settings_of

NAMED: Mapping[str, str] = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
        "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
}
_SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")
_FILE = "chat_template.jinja"


class ChatTemplate:
    """A template, ready to render."""

    def __init__(self, text: str, source: str, specials: Mapping[str, str]) -> None:
        """``source``: what errors call it. ``specials``: the tokenizer's tokens by their names.

        Raises:
            DataError: it is no Jinja.
        """
        self.text, self.source, self.specials = text, source, dict(specials)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise DataError(f"{source}: not a chat template: {error}") from None

    def render(self, messages: Sequence[Message], tools: Any = None, *, ask: bool = False) -> str:
        """The text of a conversation; with ``ask`` as it stands before an assistant's answer.

        Raises:
            UnfitError: the template refuses it.
        """
        try:
            return self._template.render(
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=ask,
                **self.specials,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise UnfitError(f"the chat template of {self.source} refuses it: {error}") from None


def open_template(chosen: str | None, directory: Path) -> ChatTemplate:
    """The template that ``chosen`` says: a name of :data:`NAMED`, a ``.jinja`` file, or if it is
    None the tokenizer's own, of whose ``directory`` the special tokens are.

    Raises:
        DataError: there is none.
    """
    found = settings_of(directory) if directory.is_dir() else {}
    specials = {name: _content(found.get(name)) for name in _SPECIALS}
    if chosen is not None and chosen in NAMED:
        return ChatTemplate(NAMED[chosen], f"chat_template {chosen}", specials)
    if chosen is not None:
        path = Path(chosen) if is_template_file(chosen) else None
        if path is None or not path.is_file():
            raise DataError(f"chat_template: {chosen}: no such file")
        return ChatTemplate(path.read_text(encoding="utf-8"), str(path), specials)
    if (directory / _FILE).is_file():
        text = (directory / _FILE).read_text(encoding="utf-8")
        return ChatTemplate(text, str(directory / _FILE), specials)
    own = _own(found.get("chat_template"))
    if own is None:
        raise DataError(
            f"{directory}: the tokenizer has no chat template: neither {_FILE} nor chat_template "
            "in tokenizer_config.json",
            hint=f"set chat_template: to {' or '.join(NAMED)}, or to a .jinja file",
        )
    return ChatTemplate(own, str(directory / "tokenizer_config.json"), specials)


def _own(found: Any) -> str | None:
    """A tokenizer's template; of several, which have names, the one called ``default``."""
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _content(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """As transformers writes tools: without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, by which templates mark answers for transformers, changes no text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)
