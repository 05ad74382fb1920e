"""The chat templates that published checkpoints carry, without their branches for tools and for images: the reference of the tests.

Content is text here; the tests write images into it.
"""

_USER = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
_SYSTEM_FIRST = "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}\n"

QWEN2_5 = (
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n"
    "{%- else %}\n"
    "    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}\n"
    "{%- endif %}\n"
    "{%- for message in messages %}\n"
    '    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}\n'
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)

QWEN3_VL = (  # Qwen3-VL-Instruct, and Qwen3-Instruct-2507
    _SYSTEM_FIRST
    + "{%- for message in messages %}\n"
    + "    {%- if message.role == 'user' or message.role == 'assistant' or (message.role == 'system' and not loop.first) %}\n"
    + f"        {_USER}\n"
    + "    {%- endif %}\n"
    + "{%- endfor %}\n"
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)


def _qwen3_thinks(opening: str) -> str:
    return (
        _SYSTEM_FIRST
        + "{%- set ns = namespace(searching=true, last_query_index=messages|length - 1) %}\n"
        + "{%- for message in messages[::-1] %}\n"
        + "    {%- if ns.searching and message.role == 'user' %}\n"
        + "        {%- set ns.searching = false %}{%- set ns.last_query_index = (messages|length - 1) - loop.index0 %}\n"
        + "    {%- endif %}\n"
        + "{%- endfor %}\n"
        + "{%- for message in messages %}\n"
        + "    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}\n"
        + f"        {_USER}\n"
        + "    {%- elif message.role == 'assistant' %}\n"
        + "        {%- set content = message.content %}{%- set reasoning_content = '' %}\n"
        + "        {%- if '</think>' in content %}\n"
        + "            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n"
        + "            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n"
        + "        {%- endif %}\n"
        + "        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}\n"
        + "            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}\n"
        + "            {{- content.lstrip('\\n') }}\n"
        + "        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}\n"
        + "        {{- '<|im_end|>\\n' }}\n"
        + "    {%- endif %}\n"
        + "{%- endfor %}\n"
        + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n"
        + opening
        + "' }}{%- endif %}\n"
    )


QWEN3 = _qwen3_thinks("")  # of April 2025, as it comes
QWEN3_WITHOUT = _qwen3_thinks("<think>\\n\\n</think>\\n\\n")  # enable_thinking=False
QWEN3_VL_THINKING = _qwen3_thinks("<think>\\n")  # and Qwen3-Thinking-2507


def _qwen3_5(opening: str) -> str:
    return (
        "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content|trim + '<|im_end|>\\n' }}{%- endif %}\n"
        "{%- set ns = namespace(searching=true, last_query_index=messages|length - 1) %}\n"
        "{%- for message in messages[::-1] %}\n"
        "    {%- if ns.searching and message.role == 'user' %}\n"
        "        {%- set ns.searching = false %}{%- set ns.last_query_index = (messages|length - 1) - loop.index0 %}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
        "{%- for message in messages %}\n"
        "    {%- set content = message.content|trim %}\n"
        "    {%- if message.role == 'user' %}\n"
        "        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}\n"
        "    {%- elif message.role == 'assistant' %}\n"
        "        {%- set reasoning_content = '' %}\n"
        "        {%- if '</think>' in content %}\n"
        "            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n"
        "            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n"
        "        {%- endif %}\n"
        "        {%- set reasoning_content = reasoning_content|trim %}\n"
        "        {%- if loop.index0 > ns.last_query_index %}\n"
        "            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}\n"
        "        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}\n"
        "        {{- '<|im_end|>\\n' }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n" + opening + "' }}{%- endif %}\n"
    )


QWEN3_5 = _qwen3_5("<think>\\n\\n</think>\\n\\n")
QWEN3_5_THINKING = _qwen3_5("<think>\\n")

SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = (
    "{% for message in messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = '<|begin_of_text|>' + content %}{% endif %}"
    "{{ content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def _llama3(date: str) -> str:
    return (
        "{{- '<|begin_of_text|>' }}\n"
        "{%- if not date_string is defined %}" + date + "{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}\n"
        '{%- else %}{%- set system_message = "" %}{%- endif %}\n'
        '{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}\n'
        '{{- "Cutting Knowledge Date: December 2023\\n" }}\n'
        '{{- "Today Date: " + date_string + "\\n\\n" }}\n'
        '{{- system_message + "<|eot_id|>" }}\n'
        "{%- for message in messages %}\n"
        "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}\n"
    )


LLAMA3_1 = _llama3('{%- set date_string = "26 Jul 2024" %}')  # and 3.3
LLAMA3_2 = _llama3(
    '{%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}'
    '{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}'
)

PUBLISHED = {
    "qwen2.5": QWEN2_5,
    "qwen3": QWEN3_VL,
    "qwen3-thinking": QWEN3,
    "qwen3-vl-thinking": QWEN3_VL_THINKING,
    "qwen3-no-thinking": QWEN3_WITHOUT,
    "qwen3.5": QWEN3_5,
    "qwen3.5-thinking": QWEN3_5_THINKING,
    "smollm2": SMOLLM2,
    "llama3": LLAMA3,
    "llama3.1": LLAMA3_1,
}
