"""Chat templates: rendering of conversations as text.

A template is Jinja, from ``tokenizer_config.json`` or from ``chat_template.jinja`` next to it. It
is rendered as in transformers, in a sandbox: a template can neither access Python nor modify its
input. It has no access to the time, so a conversation renders the same every day.
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

from flagscale.config.arguments.spec.paths import is_template_file
from flagscale.errors import DataError
from flagscale.train.data.chat.records import Message, UnusableConversationError
from flagscale.train.data.tokenizers.huggingface import read_settings

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
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_FILE = "chat_template.jinja"


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, text: str, source: str, specials: Mapping[str, str]) -> None:
        """Compile a template.

        Args:
            text: the Jinja source.
            source: its name in error messages.
            specials: the tokenizer's special tokens, such as ``bos_token``.

        Raises:
            DataError: the text is not valid Jinja.
        """
        self.text, self.source, self.specials = text, source, dict(specials)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationExtension],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise DataError(f"{source}: not a chat template: {error}") from None

    def render(self, messages: Sequence[Message], tools: Any = None, *, ask: bool = False) -> str:
        """Render a conversation; with ``ask``, add the prompt for an assistant's answer.

        Raises:
            UnusableConversationError: the template rejects it.
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
            raise UnusableConversationError(
                f"the chat template of {self.source} refuses it: {error}"
            ) from None


def open_template(chosen: str | None, directory: Path) -> ChatTemplate:
    """Open a chat template.

    Args:
        chosen: a key of :data:`NAMED`, a ``.jinja`` file, or None for the tokenizer's own template.
        directory: the tokenizer's directory, which also has the special tokens.

    Raises:
        DataError: the template does not exist.
    """
    settings = read_settings(directory) if directory.is_dir() else {}
    specials = {name: _get_token_text(settings.get(name)) for name in _SPECIAL_TOKENS}
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
    template = _select_default(settings.get("chat_template"))
    if template is None:
        raise DataError(
            f"{directory}: the tokenizer has no chat template: neither {_FILE} nor chat_template "
            "in tokenizer_config.json",
            hint=f"set chat_template: to {' or '.join(NAMED)}, or to a .jinja file",
        )
    return ChatTemplate(template, str(directory / "tokenizer_config.json"), specials)


def _select_default(template: Any) -> str | None:
    """Return a tokenizer's template; among several named ones, ``default``."""
    if isinstance(template, list):
        templates = {
            item.get("name"): item.get("template") for item in template if isinstance(item, dict)
        }
        template = templates.get("default")
    return template if isinstance(template, str) else None


def _get_token_text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """Serialize as transformers does for tools: without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationExtension(jinja2.ext.Extension):
    """Jinja extension for ``{% generation %}``, which marks answers and changes no text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)
