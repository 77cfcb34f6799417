"""Chat templates: the text is that of transformers, whatever format a conversation came in."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.chat_files import CHATML_TEMPLATE, write_lines, write_tokenizer
from support.chat_templates import TEMPLATES

from flagscale.errors import DataError
from flagscale.train.data.chat.encoding import decode_ids, encode_samples, render_samples
from flagscale.train.data.chat.messages import UnusableConversationError, arguments_as_text
from flagscale.train.data.chat.records import Conversation, read_conversations
from flagscale.train.data.chat.templates import open_template, warn_unknown_markers
from flagscale.train.data.tokenizers import Tokenizer, TokenizerSpec, open_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für <Ort> & 'Tag'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Köln", "days": [1, 2]}},
}
TEXTS = ("why", "  so\n", "Grüße <b>&</b>", "<think>hm</think>\n\nyes", "{{ x }}", "a'b\"c")


def make_messages(generator: random.Random, *, with_tools: bool) -> list[dict[str, Any]]:
    """Return a random conversation of alternating user and assistant, with tool calls or not."""
    messages: list[dict[str, Any]] = []
    for _ in range(generator.randrange(1, 4)):
        messages.append({"role": "user", "content": generator.choice(TEXTS)})
        if with_tools:
            messages.append({"role": "assistant", "content": None, "tool_calls": [CALL]})
            messages.append({"role": "tool", "content": '{"t": 9}', "tool_call_id": CALL["id"]})
        answer = {"role": "assistant", "content": generator.choice(TEXTS)}
        if generator.random() < 0.5:
            answer[generator.choice(("reasoning_content", "thinking", "reasoning"))] = "because"
        messages.append(answer)
    return messages


def open_written(directory: Path, template: Any) -> Tokenizer:
    path = write_tokenizer(directory, template=template)
    return open_tokenizer(TokenizerSpec("HuggingFaceTokenizer", str(path)))


def read_one(path: Path, record: Any) -> Conversation:
    (conversation,) = read_conversations(write_lines(path, [record]))
    return conversation


@pytest.mark.parametrize(
    ("name", "with_tools"),
    [
        pytest.param(name, with_tools, id=f"{name}-{'tools' if with_tools else 'plain'}")
        for name in TEMPLATES
        for with_tools in (False, True)
        if name != "gemma" or not with_tools  # a family without tools
    ],
)
def test_text_is_that_of_transformers(name: str, with_tools: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = open_written(tmp_path / "tokenizer", TEMPLATES[name])
    reference = AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    template = open_template(None, tokenizer, "here")
    generator = random.Random(name)
    for number in range(10):
        messages = make_messages(generator, with_tools=with_tools)
        record = {"messages": messages, "tools": [TOOL] if with_tools else None}
        conversation = read_one(tmp_path / f"{number}.jsonl", record)
        expected_messages: Any = messages
        if name == "deepseek":  # it concatenates arguments, which transformers leaves to the user
            expected_messages = arguments_as_text(messages)
        for prompt in (False, True):
            expected = reference.apply_chat_template(
                expected_messages,
                tools=[TOOL] if with_tools else None,
                tokenize=False,
                add_generation_prompt=prompt,
            )
            text = template.render(
                conversation.messages, conversation.tools, add_generation_prompt=prompt
            )
            assert text == expected


def test_marks_of_a_template_decide_which_tokens_have_a_loss(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = open_written(tmp_path / "tokenizer", TEMPLATES["marked"])
    reference = AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    template = open_template(None, tokenizer, "here")
    generator = random.Random(1)
    for number in range(20):
        messages = make_messages(generator, with_tools=number % 2 == 1)
        conversation = read_one(tmp_path / f"{number}.jsonl", {"messages": messages})
        (sample,) = render_samples(conversation, template)
        (tokens,) = encode_samples([sample], tokenizer)
        expected = reference.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        assert decode_ids(tokens).tolist() == expected["input_ids"]
        assert (tokens >= 0).astype(int).tolist() == expected["assistant_masks"]


def test_marked_answers_of_weight_0_have_no_loss(tmp_path: Path) -> None:
    tokenizer = open_written(tmp_path, TEMPLATES["marked"])
    answer = {"role": "assistant", "content": "so"}
    messages = [
        {"role": "user", "content": "why"},
        {**answer, "weight": 0},
        {"role": "user", "content": "x"},
        answer,
    ]
    conversation = read_one(tmp_path / "a.jsonl", {"messages": messages})
    (sample,) = render_samples(conversation, open_template(None, tokenizer, "here"))
    ((begin, end),) = sample.answer_spans
    assert sample.text[begin:end] == "so<|im_end|>"
    assert begin > sample.text.index("x")


USER, ANSWER = {"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}
CALLING = {"role": "assistant", "tool_calls": [{**CALL, "id": "c"}]}
RESULT = {"role": "tool", "content": "9", "tool_call_id": "c"}
TEXT_CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "get_weather", "arguments": json.dumps(CALL["function"]["arguments"])},  # type: ignore[index]
}
BARE_CALL = {**CALL["function"]}  # type: ignore[dict-item]
NORMAL_CALLING = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": CALL["function"]}],
}
THINKING = {**ANSWER, "reasoning_content": "hm", "thinking": "hm"}
FORMS: Mapping[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "json-text-arguments": (
        {"messages": [USER, {**CALLING, "content": None, "tool_calls": [TEXT_CALL]}, RESULT]},
        [USER, CALLING, RESULT],
    ),
    "function-call": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": BARE_CALL},
                {"role": "function", "name": "get_weather", "content": "9"},
            ]
        },
        [USER, NORMAL_CALLING, {"role": "tool", "name": "get_weather", "content": "9"}],
    ),
    "openai-messages-under-conversations": (
        {"conversations": [USER, CALLING, RESULT, {**ANSWER, "weight": 0}]},
        [USER, CALLING, RESULT, {**ANSWER, "weight": 0}],
    ),
    "sharegpt-under-messages": (
        {"messages": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]},
        [USER, ANSWER],
    ),
    "sharegpt-function-call": (
        {
            "conversations": [
                {"from": "human", "value": "why"},
                {"from": "function_call", "value": json.dumps(BARE_CALL)},
                {"from": "observation", "value": "9"},
                {"from": "gpt", "value": "so"},
            ]
        },
        [USER, NORMAL_CALLING, {"role": "tool", "content": "9"}, ANSWER],
    ),
    "sharegpt-weight": (
        {
            "conversations": [
                {"from": "gpt", "value": "so", "weight": 0},
                {"from": "human", "value": "why"},
                {"from": "gpt", "value": "so", "reasoning_content": "hm"},
            ]
        },
        [{**ANSWER, "weight": 0}, USER, THINKING],
    ),
    "reasoning": ({"messages": [USER, {**ANSWER, "reasoning": "hm"}]}, [USER, THINKING]),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "why"}]}, ANSWER]},
        [USER, ANSWER],
    ),
    "system-beside": (
        {"system": "be", "messages": [USER, ANSWER]},
        [{"role": "system", "content": "be"}, USER, ANSWER],
    ),
    "name": (
        {"messages": [{**USER, "name": "Ann"}, {**ANSWER, "refusal": None}]},
        [{**USER, "name": "Ann"}, ANSWER],
    ),
}


@pytest.mark.parametrize(("record", "expected"), FORMS.values(), ids=FORMS)
def test_every_form_has_one_normal_form(
    record: dict[str, Any], expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    messages = [dict(message) for message in read_one(tmp_path / "a.jsonl", record).messages]
    for message in messages:
        if message.get("reasoning"):
            del message["reasoning"]  # kept beside the standard names
    assert messages == expected


TOOLS: Mapping[str, Any] = {
    "objects": {"tools": [TOOL]},
    "json-text": {"tools": json.dumps([TOOL])},
    "bare": {"tools": [TOOL["function"]]},
    "functions": {"functions": [TOOL["function"]]},
}


@pytest.mark.parametrize("record", TOOLS.values(), ids=TOOLS)
def test_tools_have_one_normal_form(record: dict[str, Any], tmp_path: Path) -> None:
    conversation = read_one(tmp_path / "a.jsonl", {"messages": [USER, ANSWER], **record})
    assert conversation.tools == [TOOL]


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "arguments": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                },
            ]
        },
        r"messages\[1\].tool_calls\[0\].arguments: not JSON",
    ),
    "arguments-list": (
        {
            "messages": [
                USER,
                {"role": "assistant", "function_call": {"name": "f", "arguments": "[]"}},
            ]
        },
        "arguments: expected an object, found list",
    ),
    "call-without-a-name": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        r"tool_calls\[0\]: expected a function with a name",
    ),
    "sharegpt-call": (
        {"conversations": [{"from": "function_call", "value": "get_weather"}]},
        r"conversations\[0\].value: not JSON",
    ),
    "tools": ({"messages": [USER, ANSWER], "tools": "weather"}, "tools: not JSON"),
    "tool": ({"messages": [USER, ANSWER], "tools": [{}]}, r"tools\[0\]: expected a function"),
    "weight": ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "weight: expected 0 or 1"),
    "refusal": ({"messages": [USER, {**ANSWER, "refusal": "no"}]}, "refusal: is not supported"),
    "two-systems": (
        {"system": "a", "messages": [{"role": "system", "content": "b"}, USER, ANSWER]},
        "system: messages has a system message already",
    ),
}


@pytest.mark.parametrize(("record", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_normal_form_is_refused(
    record: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl:1: .*{message}"):
        read_one(tmp_path / "a.jsonl", record)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        pytest.param({"messages": [USER, CALLING]}, "ignores tool_calls", id="calls"),
        pytest.param({"messages": [USER, ANSWER], "tools": [TOOL]}, "ignores tools", id="tools"),
    ],
)
def test_a_template_that_ignores_tools_is_refused(
    record: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tokenizer = open_written(tmp_path, CHATML_TEMPLATE)
    conversation = read_one(tmp_path / "a.jsonl", record)
    text = "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}"
    (tmp_path / "small.jinja").write_text(text)
    template = open_template(str(tmp_path / "small.jinja"), tokenizer, "here")
    with pytest.raises(UnusableConversationError, match=message):
        render_samples(conversation, template)


def test_tools_select_the_template_for_tools(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | tojson }}"},
    ]
    template = open_template(None, open_written(tmp_path, templates), "here")
    assert template.render([USER]) == "plain"
    assert template.render([USER], [TOOL]) == json.dumps([TOOL], ensure_ascii=False)


def test_a_template_whose_markers_are_no_tokens_is_reported(tmp_path: Path) -> None:
    tokenizer = open_written(tmp_path, None)
    assert warn_unknown_markers(open_template("chatml", tokenizer, "x"), tokenizer) is None
    warning = warn_unknown_markers(open_template("llama3", tokenizer, "x"), tokenizer)
    assert warning is not None
    assert "no token <|end_header_id|>, <|eot_id|>, <|start_header_id|>" in warning
