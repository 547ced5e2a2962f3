"""Chat templates of Qwen3.5, Gemma 4, gpt-oss and LFM2 in short form, written for these tests."""

from __future__ import annotations

# Opens the reasoning block, or closes an empty one. Knows images, which quire never passes to a template.
QWEN35 = """{%- macro text(content) %}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for item in content %}
            {%- if item.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{- item.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
    {{- "\\n</tools>\\n\\n<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>" }}
    {{- "\\n</function>\\n</tool_call>" }}
    {%- if messages[0].role == 'system' %}{{- '\\n\\n' + text(messages[0].content) }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + text(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{- raise_exception('System must be first.') }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + text(message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_user %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text(message.content) }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n\\n' if loop.first and message.content else '' if loop.first else '\\n' }}
            {{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
            {%- for name, value in tool_call.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {%- set is_json = value is mapping or (value is sequence and value is not string) %}
                {{- value | tojson | safe if is_json else value | string }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}
"""

GEMMA4 = """{%- macro literal(value) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}
        {%- for key, item in value | dictsort -%}
            {{- '{' if loop.first else ',' -}}{{- key -}}:{{- literal(item) -}}{{- '}' if loop.last -}}
        {%- endfor -%}
        {{- '{}' if not value -}}
    {%- elif value is sequence -%}
        [{%- for item in value -%}{{- literal(item) -}}{{- ',' if not loop.last -}}{%- endfor -%}]
    {%- else -%}{{- 'null' if value is none else value -}}{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- set ns = namespace(last='') -%}
{%- set is_first_system = messages[0].role == 'system' -%}
{%- if enable_thinking or tools or is_first_system -%}
    {{- '<|turn>system\\n' -}}{{- '<|think|>\\n' if enable_thinking -}}
    {%- if is_first_system -%}{{- messages[0].content | trim -}}{%- endif -%}
    {%- for tool in tools or [] -%}
        {{- '<|tool>declaration:' + tool.function.name + literal(tool.function) + '<tool|>' -}}
    {%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|tool_response>response:' + message.name + '{value:' + literal(message.content) + '}' -}}
        {{- '<tool_response|>' -}}
        {%- set ns.last = 'tool' -%}
    {%- elif not (loop.first and message.role == 'system') -%}
        {%- if ns.last != 'tool' -%}
            {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
        {%- endif -%}
        {%- if message.reasoning_content and message.tool_calls -%}
            {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' -}}
        {%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {{- '<|tool_call>call:' + call.function.name + literal(call.function.arguments) + '<tool_call|>' -}}
        {%- endfor -%}
        {{- message.content | trim -}}
        {%- if not message.tool_calls -%}{{- '<turn|>\\n' -}}{%- endif -%}
        {%- set ns.last = 'call' if message.tool_calls else '' -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.last -%}
    {{- '<|turn>model\\n' -}}
    {%- if not enable_thinking | default(false) -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}
{%- endif -%}
"""

HARMONY = """{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- set developer = messages[0].content if messages[0].role == 'system' else '' %}
{%- if developer or tools %}
    {{- '<|start|>developer<|message|>' + developer }}
    {%- for tool in tools or [] %}{{- '\\ntype ' + tool.function.name + ' = ' + (tool | tojson) }}{%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.content and message.thinking %}{{- raise_exception('content and thinking') }}{%- endif %}
        {%- if message.content or message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) }}
            {{- '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{- '<|call|>' }}
        {%- set last_call.name = call.name %}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last_call.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson }}{{- '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# Renders earlier calls itself. Older templates of this family do not: see LFM2_OLD.
LFM2 = """{{- bos_token -}}
{%- if tools -%}
    {{- '<|im_start|>system\\nList of tools: [' -}}
    {%- for tool in tools -%}{{- tool | tojson -}}{{- ', ' if not loop.last -}}{%- endfor -%}
    {{- ']<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.thinking is defined -%}{{- '<think>' + message.thinking + '</think>' -}}{%- endif -%}
    {{- message.content -}}
    {%- if message.tool_calls is defined -%}
        {{- '<|tool_call_start|>[' -}}
        {%- for call in message.tool_calls -%}
            {{- call.function.name + '(' -}}
            {%- for name, value in call.function.arguments.items() -%}
                {{- name + '=' + (value | tojson) -}}{{- ', ' if not loop.last -}}
            {%- endfor -%}
            {{- ')' -}}{{- ', ' if not loop.last -}}
        {%- endfor -%}
        {{- ']<|tool_call_end|>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

LFM2_OLD = """{{- bos_token -}}
{%- if tools -%}
    {{- '<|im_start|>system\\nList of tools: <|tool_list_start|>' + (tools | tojson) -}}
    {{- '<|tool_list_end|><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
