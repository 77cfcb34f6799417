"""Chat templates: rendering of conversations as text.

A template is Jinja: the tokenizer's own, one of :data:`NAMED_TEMPLATES`, or a file. It is rendered
in the environment that ``apply_chat_template`` of transformers has, so that the text is the same:
filters, functions, extensions, special tokens, and names of reasoning. As there, the sandbox
prevents a template from accessing Python or modifying its input.

A template that calls ``strftime_now`` renders the current date, as in transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from flagscale.config.arguments.spec.paths import is_template_file
from flagscale.errors import DataError
from flagscale.tokenizer_files import DEFAULT_TEMPLATE, TEMPLATE_FILE
from flagscale.train.data.chat.messages import (
    Message,
    UnusableConversationError,
    arguments_as_text,
)
from flagscale.train.data.tokenizers import Tokenizer

NAMED_TEMPLATES: Mapping[str, str] = {
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
_TOOL_TEMPLATE = "tool_use"
"""Name of the template that transformers uses for conversations with tools, if there is one."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKER = re.compile(r"<\|[^\s<>|{}'\"]+\|>")
_PROBE_CALL = {
    "id": "probecall",
    "type": "function",
    "function": {"name": "probe", "arguments": {"probe_key": "probe_value"}},
}
_PROBE_MESSAGES: Sequence[Message] = (
    {"role": "user", "content": "probe"},
    {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
)
_T = TypeVar("_T")
_RenderError = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError)

Span = tuple[int, int]
"""Half-open range ``[begin, end)`` of characters of a rendered text."""


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: name of the template in error messages.
        special_tokens: the tokenizer's special tokens by name, such as ``bos_token``.
        texts: the Jinja sources by name: ``default``, and ``tool_use`` for conversations with
            tools if there is one.
    """

    def __init__(
        self, texts: Mapping[str, str], source: str, special_tokens: Mapping[str, str]
    ) -> None:
        """Compile the templates; see the attributes.

        Raises:
            DataError: a text is not valid Jinja.
        """
        self.texts = {
            name: texts[name] for name in (DEFAULT_TEMPLATE, _TOOL_TEMPLATE) if name in texts
        }
        self.source, self.special_tokens = source, dict(special_tokens)
        self._answers = _AnswerSpans()
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationExtension, jinja2.ext.loopcontrols],
        )
        environment.extend(answer_spans=self._answers)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = _format_current_time
        try:
            self._templates = {
                name: environment.from_string(text) for name, text in self.texts.items()
            }
        except jinja2.TemplateError as error:
            raise DataError(f"{source}: not a chat template: {error}") from None
        self._prints_arguments: dict[str, bool] = {}

    def marks_answers(self, tools: Any = None) -> bool:
        """Return whether the template marks answers by ``{% generation %}``."""
        return _GENERATION.search(self.texts[self._select(tools)]) is not None

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Render a conversation as text.

        Args:
            messages: messages in the normal form of :mod:`flagscale.train.data.chat.messages`.
            tools: descriptions of tools for the template.
            add_generation_prompt: append the prompt for an assistant's answer.

        Raises:
            UnusableConversationError: the template rejects the conversation.
        """
        return self._render(
            messages, tools, add_generation_prompt, lambda template, values: template.render(values)
        )

    def render_with_answers(
        self, messages: Sequence[Message], tools: Any = None
    ) -> tuple[str, list[Span]]:
        """Render a conversation as text, and return the spans that ``{% generation %}`` marks.

        Raises:
            UnusableConversationError: the template rejects the conversation.
        """

        def render(template: jinja2.Template, values: Mapping[str, Any]) -> tuple[str, list[Span]]:
            with self._answers.record() as spans:
                blocks = []
                for block in template.generate(values):
                    blocks.append(block)
                    self._answers.length += len(block)
                return "".join(blocks), list(spans)

        return self._render(messages, tools, False, render)

    def list_markers(self) -> list[str]:
        """Return the control tokens, of the form ``<|name|>``, that the templates write."""
        return sorted({m for text in self.texts.values() for m in _MARKER.findall(text)})

    def _select(self, tools: Any) -> str:
        return _TOOL_TEMPLATE if tools and _TOOL_TEMPLATE in self.texts else DEFAULT_TEMPLATE

    def _render(
        self,
        messages: Sequence[Message],
        tools: Any,
        add_generation_prompt: bool,
        render: Callable[[jinja2.Template, Mapping[str, Any]], _T],
    ) -> _T:
        name = self._select(tools)
        has_calls = any(message.get("tool_calls") for message in messages)
        if has_calls and self._takes_text_arguments(name):
            messages = arguments_as_text(messages)
        values = {
            **self.special_tokens,
            "messages": list(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render(self._templates[name], values)
        except _RenderError as error:
            raise UnusableConversationError(
                f"the chat template of {self.source} rejects the conversation: {error}"
            ) from None

    def _takes_text_arguments(self, name: str) -> bool:
        """Return whether a template prints the arguments of tool calls unchanged.

        Published templates either serialize arguments, which are an object then, or print them and
        expect JSON text. With an object, the latter fail or print Python's notation.
        """
        if name not in self._prints_arguments:
            probes = {}
            for is_text in (False, True):
                messages = arguments_as_text(_PROBE_MESSAGES) if is_text else _PROBE_MESSAGES
                try:
                    probes[is_text] = self._templates[name].render(
                        **self.special_tokens, messages=list(messages), tools=None
                    )
                except _RenderError:
                    probes[is_text] = ""
            notation = str(_PROBE_CALL["function"]["arguments"])  # type: ignore[index]
            self._prints_arguments[name] = bool(probes[True]) and (
                not probes[False] or notation in probes[False]
            )
        return self._prints_arguments[name]


def open_template(name_or_path: str | None, tokenizer: Tokenizer, source: str) -> ChatTemplate:
    """Open a chat template.

    Args:
        name_or_path: a key of :data:`NAMED_TEMPLATES`, a ``.jinja`` file, or None for the
            tokenizer's own template.
        tokenizer: the tokenizer, which has the special tokens and its own template.
        source: the tokenizer's directory, for messages.

    Raises:
        DataError: the template does not exist.
    """
    special_tokens = tokenizer.special_tokens
    if name_or_path is not None and name_or_path in NAMED_TEMPLATES:
        texts = {DEFAULT_TEMPLATE: NAMED_TEMPLATES[name_or_path]}
        return ChatTemplate(texts, f"chat_template {name_or_path}", special_tokens)
    if name_or_path is not None:
        path = Path(name_or_path) if is_template_file(name_or_path) else None
        if path is None or not path.is_file():
            raise DataError(f"chat_template: {name_or_path}: no such file")
        texts = {DEFAULT_TEMPLATE: path.read_text(encoding="utf-8")}
        return ChatTemplate(texts, str(path), special_tokens)
    hint = f"set chat_template: to {' or '.join(NAMED_TEMPLATES)}, or to a .jinja file"
    if not tokenizer.chat_templates:
        raise DataError(
            f"{source}: the tokenizer has no chat template: neither {TEMPLATE_FILE} nor "
            "chat_template in tokenizer_config.json",
            hint=hint,
        )
    if DEFAULT_TEMPLATE not in tokenizer.chat_templates:
        names = ", ".join(tokenizer.chat_templates)
        raise DataError(
            f"{source}: none of the tokenizer's chat templates is named {DEFAULT_TEMPLATE}; they "
            f"are {names}",
            hint=hint,
        )
    return ChatTemplate(tokenizer.chat_templates, source, special_tokens)


def warn_unknown_markers(template: ChatTemplate, tokenizer: Tokenizer) -> str | None:
    """Return a warning if the template writes control tokens that the tokenizer does not have.

    The model would learn them as several tokens of ordinary text.
    """
    unknown = [marker for marker in template.list_markers() if tokenizer.find_id(marker) is None]
    if not unknown:
        return None
    return (
        f"{template.source}: the tokenizer has no token {', '.join(unknown)}: the template's "
        "control tokens are learned as ordinary text"
    )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize as transformers does: without HTML escapes, with the options of :mod:`json`."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _format_current_time(time_format: str) -> str:
    return datetime.now().strftime(time_format)


class _AnswerSpans:
    """Recorder of the spans that ``{% generation %}`` blocks mark while a template is rendered.

    Attributes:
        length: number of characters rendered before the current block.
    """

    def __init__(self) -> None:
        self.length = 0
        self._spans: list[Span] | None = None

    @contextmanager
    def record(self) -> Iterator[list[Span]]:
        self.length, self._spans = 0, []
        try:
            yield self._spans
        finally:
            self._spans = None

    def add(self, length: int) -> None:
        if self._spans is not None:
            self._spans.append((self.length, self.length + length))


class _GenerationExtension(jinja2.ext.Extension):
    """Jinja extension for ``{% generation %}``, which marks answers and changes no text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_mark_answer")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark_answer(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.environment.answer_spans.add(len(text))  # type: ignore[attr-defined]
        return text
