"""Chat templates with the constructs of published model families, as short stand-ins."""

from __future__ import annotations

from collections.abc import Mapping

_CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

TEMPLATES: Mapping[str, str] = {
    # Loop without conditions, like ChatML.
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.content is defined %}{{ m.content }}{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}" + _CHATML_PROMPT
    ),
    # Current date, tools with an indent, set blocks, slices of messages (Llama 3.1).
    "llama3.1": (
        "{{- bos_token }}\n"
        "{%- if strftime_now is defined %}{%- set date = strftime_now('%d %b %Y') %}"
        "{%- else %}{%- set date = '26 Jul 2024' %}{%- endif %}\n"
        "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
        "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}\n"
        "{{- '<|start|>system\n\nToday Date: ' + date + '\n\n' + system }}\n"
        "{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}"
        "{{- '\n\n' }}{%- endfor %}{%- endif %}\n"
        "{%- for m in messages %}\n"
        "{%- if 'tool_calls' in m %}\n"
        "{%- if not m.tool_calls | length == 1 %}"
        "{{- raise_exception('only single tool-calls') }}{%- endif %}\n"
        "{%- set call = m.tool_calls[0].function %}"
        '{{- \'<|start|>assistant\n\n{"name": "\' + call.name + \'", "parameters": \' }}'
        "{{- call.arguments | tojson }}{{- '}<|eot|>' }}\n"
        "{%- elif m.role == 'tool' or m.role == 'ipython' %}"
        "{{- '<|start|>ipython\n\n' }}{{- m.content | tojson }}{{- '<|eot|>' }}\n"
        "{%- else %}{{- '<|start|>' + m.role + '\n\n' + m.content | trim + '<|eot|>' }}"
        "{%- endif %}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|start|>assistant\n\n' }}{%- endif %}"
    ),
    # Tools inside the system message, consecutive tool results in one turn (Qwen 2.5).
    "qwen2.5": (
        "{%- if tools %}{{- '<|im_start|>system\n# Tools\n<tools>' }}"
        "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
        "{{- '\n</tools><|im_end|>\n' }}{%- endif %}\n"
        "{%- for m in messages %}\n"
        "{%- if m.role in ('user', 'system') or (m.role == 'assistant' and not m.tool_calls) %}"
        "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}\n"
        "{%- elif m.role == 'assistant' %}{{- '<|im_start|>' + m.role }}"
        "{%- if m.content %}{{- '\n' + m.content }}{%- endif %}"
        "{%- for call in m.tool_calls %}"
        "{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}"
        '{{- \'\n<tool_call>\n{"name": "\' }}{{- call.name }}{{- \'", "arguments": \' }}'
        "{{- call.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}"
        "{{- '<|im_end|>\n' }}\n"
        "{%- elif m.role == 'tool' %}"
        "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
        "{{- '<|im_start|>user' }}{%- endif %}"
        "{{- '\n<tool_response>\n' }}{{- m.content }}{{- '\n</tool_response>' }}"
        "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
        "{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}{%- endfor %}\n" + _CHATML_PROMPT
    ),
    # Reasoning, a namespace, a reversed loop, string methods (Qwen 3).
    "qwen3": (
        "{%- set ns = namespace(last_query=messages | length - 1, seen=false) %}\n"
        "{%- for m in messages[::-1] %}{%- set index = messages | length - 1 - loop.index0 %}"
        "{%- if not ns.seen and m.role == 'user' %}{%- set ns.seen = true %}"
        "{%- set ns.last_query = index %}{%- endif %}{%- endfor %}\n"
        "{%- for m in messages %}{%- set content = m.content or '' %}"
        "{%- if m.role == 'assistant' %}{%- set reasoning = '' %}"
        "{%- if m.reasoning_content is string %}{%- set reasoning = m.reasoning_content %}"
        "{%- elif '</think>' in content %}"
        "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>assistant\n' }}"
        "{%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}"
        "{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{%- endif %}{{- content }}"
        "{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>' + call.function.name }}"
        "{%- if call.function.arguments is string %}{{- call.function.arguments }}"
        "{%- else %}{{- call.function.arguments | tojson }}{%- endif %}{%- endfor %}"
        "{{- '<|im_end|>\n' }}"
        "{%- else %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}"
        "{%- endfor %}\n"
        "{%- for t in tools or [] %}{{- t.function.name }}{%- endfor %}" + _CHATML_PROMPT
    ),
    # Alternating roles are enforced; ids of tool calls have nine characters (Mistral).
    "mistral": (
        "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
        "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}"
        "{%- endif %}{{- bos_token }}\n"
        "{%- for m in loop_messages %}\n"
        "{%- if m.role == 'user' %}"
        "{%- if tools is not none and m == loop_messages | selectattr('role', 'equalto', 'user')"
        " | list | last %}{{- '[AVAILABLE_TOOLS] [' }}"
        "{%- for tool in tools %}{{- tool | tojson }}{{- ', ' if not loop.last else ']' }}"
        "{%- endfor %}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}"
        "{%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + m.content }}"
        "{%- else %}{{- '[INST] ' + m.content }}{%- endif %}{{- '[/INST]' }}\n"
        "{%- elif m.tool_calls is defined and m.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}"
        "{%- for call in m.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] }}"
        "{%- if not call.id is defined or call.id | length != 9 %}"
        "{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
        "{%- endif %}{{- ', \"id\": \"' + call.id + '\"}' }}"
        "{{- ', ' if not loop.last else ']' + eos_token }}{%- endfor %}\n"
        "{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}\n"
        "{%- elif m.role == 'tool' %}"
        "{{- '[TOOL_RESULTS] {\"content\": ' + m.content | string + '}[/TOOL_RESULTS]' }}\n"
        "{%- elif m.role != 'system' %}{{- raise_exception('Only user and assistant roles') }}"
        "{%- endif %}{%- endfor %}"
    ),
    # Another name of the assistant, no system role (Gemma).
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
        "{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    # Arguments of tool calls are JSON text that is concatenated (DeepSeek).
    "deepseek": (
        "{% set ns = namespace(is_first=true) %}{{ bos_token }}"
        "{% for m in messages %}"
        "{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}{% endif %}"
        "{% if m['role'] == 'assistant' and m['tool_calls'] %}"
        "{% for tool in m['tool_calls'] %}{% if ns.is_first %}"
        "{{ '<|Assistant|><|calls|>' }}{% set ns.is_first = false %}{% endif %}"
        "{{ tool['type'] + '<|sep|>' + tool['function']['name'] + '\n```json\n'"
        " + tool['function']['arguments'] + '\n```' }}{% endfor %}{{ '<|end|>' }}"
        "{% elif m['role'] == 'assistant' %}{% set content = m['content'] %}"
        "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}"
        "{% endif %}{{ '<|Assistant|>' + content + '<|end|>' }}{% endif %}"
        "{% if m['role'] == 'tool' %}{{ '<|output|>' + m['content'] }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
    ),
    # A macro, loop controls, sorted JSON with separators (Command R, Granite).
    "command": (
        "{%- macro show(tool) %}{{ tool.function | tojson(sort_keys=true) }}"
        "{{ tool.function | tojson(separators=(',', ':'), ensure_ascii=true) }}{% endmacro %}\n"
        "{%- for tool in tools or [] %}{{- show(tool) }}{%- endfor %}\n"
        "{%- for m in messages %}{%- if m.role == 'system' %}{%- continue %}{%- endif %}"
        "{{- '<|TURN|><|' ~ m.role | upper ~ '|>' ~ (m.content or '') }}"
        "{%- for c in m.tool_calls or [] %}{{- c.function.name ~ c.function.arguments | tojson }}"
        "{%- endfor %}{{- '<|END|>' }}{%- if loop.index > 50 %}{%- break %}{%- endif %}"
        "{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|TURN|><|ASSISTANT|>' }}{%- endif %}"
    ),
    # Reasoning under another name, dictionaries, filters (gpt-oss).
    "gpt-oss": (
        "{%- for m in messages -%}\n"
        "{%- if m.role == 'assistant' -%}\n"
        "{%- if m.thinking is defined and loop.last -%}"
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
        "{%- endif -%}\n"
        "{%- for c in m.tool_calls or [] -%}{{- ' to=functions.' + c.function.name }}"
        "{{- c.function.arguments | tojson }}{%- endfor -%}"
        "{{- '<|start|>assistant<|channel|>final<|message|>' + (m.content or '') + '<|end|>' }}\n"
        "{%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
        "{%- endif -%}\n{%- endfor -%}\n"
        "{%- for t in tools or [] -%}"
        "{%- for name, value in (t.function.parameters.properties or {}) | dictsort -%}"
        "{{- t.function.name + name + ': ' + value.type }}{%- endfor -%}{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|start|>assistant' }}{%- endif -%}"
    ),
    # Answers are marked (OLMo, SmolLM).
    "marked": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        "{% generation %}{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + _CHATML_PROMPT
    ),
    # Whether a token is defined decides (Phi, Falcon).
    "defined": (
        "{% if pad_token is defined %}{{ pad_token }}{% endif %}"
        "{% if bos_token is defined %}{{ bos_token }}{% endif %}"
        "{% if documents %}{{ documents }}{% endif %}"
        "{% for m in messages %}{{ m.role | capitalize ~ ': ' ~ (m.content | default('')) }}"
        "{% for c in m.tool_calls | default([]) %}{{ c | tojson(indent=2) }}{% endfor %}"
        "{{ '\n' if not loop.last }}{% endfor %}"
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
}
