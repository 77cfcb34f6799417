"""Normal form of a conversation's messages and tools, whatever format they came in.

Every format is converted to this form, and checked, before a chat template sees it:

- A message is an object with ``role`` and, unless it is null, ``content``, a text.
- ``tool_calls`` is a list of ``{"type": "function", "function": {"name": …, "arguments": {…}}}``
  with optional ``id``. Arguments are an object, also where they were JSON text. The deprecated
  ``function_call`` is converted to it.
- ``reasoning_content`` is the reasoning before an answer; ``thinking`` and ``reasoning`` are other
  names for it. As in transformers, a template finds it under ``thinking`` too.
- ``weight`` is 0 or 1: whether the loss is computed on an answer.
- Other keys, such as ``name`` and ``tool_call_id``, are passed to the template unchanged, and null
  ones are left out, as transformers does.
- ``tools`` is a list of ``{"type": "function", "function": {"name": …, …}}``.

What this form cannot represent is an error, so nothing is dropped without a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Message = Mapping[str, Any]

ASSISTANT = "assistant"
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_CALL_ROLES = ("function_call", "tool_call")
_ROLES_BY_SPEAKER: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bard": ASSISTANT,
    "bing": ASSISTANT,
    "model": ASSISTANT,
    ASSISTANT: ASSISTANT,
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    **dict.fromkeys(_CALL_ROLES, ASSISTANT),
}
"""Roles by the names that ShareGPT files give the speakers."""


class UnusableConversationError(Exception):
    """A conversation that the model cannot be trained on; the message gives the reason."""


def normalize_messages(items: Iterable[Any], field_name: str) -> list[Message]:
    """Convert messages of OpenAI's or of ShareGPT's form to the normal form.

    Args:
        items: the messages, as parsed from JSON.
        field_name: where they are, for messages of errors.

    Raises:
        UnusableConversationError: a message cannot be represented.
    """
    return [normalize_message(item, f"{field_name}[{i}]") for i, item in enumerate(items)]


def normalize_message(item: Any, field_name: str) -> Message:
    """Convert one message to the normal form.

    Raises:
        UnusableConversationError: the message cannot be represented.
    """
    if not isinstance(item, dict):
        raise UnusableConversationError(
            f"{field_name}: expected an object with a role, found {describe_type(item)}"
        )
    if "from" in item:
        return _normalize_sharegpt(item, field_name)
    message = {key: value for key, value in item.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str):
        raise UnusableConversationError(
            f"{field_name}: expected an object with a role, found {describe_type(item)}"
        )
    message["role"] = "tool" if role == "function" else role
    for key in ("refusal", "audio"):
        if message.get(key):
            raise UnusableConversationError(f"{field_name}.{key}: is not supported")
    _normalize_tool_calls(message, field_name)
    if "content" in message:
        message["content"] = _normalize_content(message["content"], f"{field_name}.content")
    elif not message.get("tool_calls"):
        raise UnusableConversationError(f"{field_name}.content: expected a text, found nothing")
    _normalize_reasoning(message, field_name)
    _normalize_weight(message, field_name)
    return message


def _normalize_sharegpt(item: Mapping[str, Any], field_name: str) -> Message:
    speaker, value = item["from"], item.get("value", item.get("content"))
    if not isinstance(speaker, str) or speaker not in _ROLES_BY_SPEAKER:
        speakers = ", ".join(_ROLES_BY_SPEAKER)
        raise UnusableConversationError(
            f"{field_name}.from: unknown speaker {speaker!r} (known: {speakers})"
        )
    other_fields = {key: v for key, v in item.items() if key not in ("from", "value", "content")}
    if speaker in _CALL_ROLES:
        calls = _parse_json(value, f"{field_name}.value") if isinstance(value, str) else value
        calls = calls if isinstance(calls, list) else [calls]
        return normalize_message(
            {**other_fields, "role": ASSISTANT, "tool_calls": calls}, field_name
        )
    text = require_text(value, f"{field_name}.value")
    return normalize_message(
        {**other_fields, "role": _ROLES_BY_SPEAKER[speaker], "content": text}, field_name
    )


def _normalize_content(content: Any, field_name: str) -> str:
    """Return the text of a message, which may be a list of parts."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise UnusableConversationError(f"{field_name}: only parts of text are supported")
        content = "".join(texts)
    return require_text(content, field_name)


def _normalize_tool_calls(message: dict[str, Any], field_name: str) -> None:
    calls = message.pop("tool_calls", None) or []
    if "function_call" in message:
        calls = [*calls, message.pop("function_call")]
    if not isinstance(calls, list):
        raise UnusableConversationError(
            f"{field_name}.tool_calls: expected a list, found {describe_type(calls)}"
        )
    if calls:
        message["tool_calls"] = [
            _normalize_tool_call(call, f"{field_name}.tool_calls[{index}]")
            for index, call in enumerate(calls)
        ]


def _normalize_tool_call(call: Any, field_name: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise UnusableConversationError(
            f"{field_name}: expected an object, found {describe_type(call)}"
        )
    kind = call.get("type", "function")
    if kind != "function":
        raise UnusableConversationError(f"{field_name}.type: {kind!r} is not supported")
    is_wrapped = "function" in call
    function = call["function"] if is_wrapped else call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UnusableConversationError(f"{field_name}: expected a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parse_json(arguments or "{}", f"{field_name}.arguments")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise UnusableConversationError(
            f"{field_name}.arguments: expected an object, found {describe_type(arguments)}"
        )
    other_fields = {k: v for k, v in call.items() if v is not None} if is_wrapped else {}
    return {
        **other_fields,
        "type": kind,
        "function": {**function, "arguments": arguments},
    }


def _normalize_reasoning(message: dict[str, Any], field_name: str) -> None:
    for key in _REASONING_KEYS:
        if key in message:
            reasoning = require_text(message[key], f"{field_name}.{key}")
            message.update({"thinking": message.get("thinking", reasoning)})
            message["reasoning_content"] = reasoning
            return


def _normalize_weight(message: dict[str, Any], field_name: str) -> None:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise UnusableConversationError(
            f"{field_name}.weight: expected 0 or 1, found {json.dumps(weight)}"
        )


def normalize_tools(record: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools of a record with ``tools`` or the deprecated ``functions``; None if it has
    none. Both may be JSON text.

    Raises:
        UnusableConversationError: a tool is not a function.
    """
    key = next((name for name in ("tools", "functions") if record.get(name)), None)
    if key is None:
        return None
    tools = record[key]
    if isinstance(tools, str):
        tools = _parse_json(tools, key) if tools.strip() else []
    if not isinstance(tools, list):
        raise UnusableConversationError(f"{key}: expected a list, found {describe_type(tools)}")
    normalized = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UnusableConversationError(f"{key}[{index}]: expected a function with a name")
        is_wrapped = function is not tool
        normalized.append(tool if is_wrapped else {"type": "function", "function": function})
    return normalized or None


def arguments_as_text(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with the arguments of tool calls as JSON text, for templates that print
    them unchanged."""

    def convert(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    return [
        {**message, "tool_calls": [convert(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def has_loss(message: Message) -> bool:
    """Return whether the loss is computed on a message."""
    return bool(message["role"] == ASSISTANT and message.get("weight", 1) != 0)


def _parse_json(text: str, field_name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableConversationError(f"{field_name}: not JSON: {error}") from None


def require_text(value: object, field_name: str) -> str:
    """Return a text, with half surrogate pairs replaced.

    Raises:
        UnusableConversationError: the value is not a text.
    """
    if not isinstance(value, str):
        raise UnusableConversationError(
            f"{field_name}: expected a text, found {describe_type(value)}"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can encode half of a surrogate pair, which no tokenizer accepts.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def describe_type(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
