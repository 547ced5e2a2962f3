"""Chat templates with tools, written for these tests in the style of each model family."""

from __future__ import annotations

from tests.text.family_templates import GEMMA4, HARMONY, LFM2, QWEN35

HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" + (tool | tojson) }}{%- endfor %}
    {{- "\\n</tools>\\n\\nCall inside <tool_call></tool_call>.<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA3 = """{{- '<|im_start|>system\\n\\n' }}
{%- if tools is not none %}
    {{- 'Answer with {"name": function name, "parameters": dictionary of arguments}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- '<|im_end|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at once") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- '}<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>ipython\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""

MISTRAL = """{{- bos_token }}
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == questions[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}{{- tool | tojson }}{{- ', ' if not loop.last else '' }}{%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.id is not defined or tool_call.id|length != 9 %}
                {{- raise_exception('ids have 9 characters') }}
            {%- endif %}
            {{- (tool_call.function | tojson)[:-1] + ', "id": "' + tool_call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id|length != 9 %}
            {{- raise_exception('ids have 9 characters') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# A template that opens the reasoning block itself.
THINKING = PLAIN.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}") + "{# </think> #}"


def _foreign(described: str, call: str, *, head: str = "", tail: str = "", between: str = "") -> str:
    """A template that writes each call as `call`, a Jinja text with `f` as the function."""
    return (
        "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{%- set f = tool.function %}"
        + described
        + "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}"
        "{{- '<|im_start|>' + message.role + '\\n' }}{%- if message.tool_calls %}"
        + head
        + "{%- for one in message.tool_calls %}{%- set f = one.function %}"
        + call
        + (f"{{%- if not loop.last %}}{between}{{%- endif %}}" if between else "")
        + "{%- endfor %}"
        + tail
        + "{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )


_SIGNATURE = """{{- '{"name": "' + f.name + '", "parameters": ' + f.parameters | tojson + '}' }}"""
_PARAMETERS = "{%- for name, value in f.arguments | items %}"
# How families without a row write calls. Each source has a string that occurs in the templates of a row.
FOREIGN = {
    # Command R7B and Cohere 2: other names of the keys, in a list.
    "command r7b": _foreign(
        _SIGNATURE,
        """{{- '    {"tool_call_id": "' ~ loop.index0 ~ '", "tool_name": "' + f.name + '", "parameters": ' }}"""
        "{{- f.arguments | tojson + '}' }}",
        head="{{- '<|START_ACTION|>[\\n' }}",
        tail="{{- '\\n]<|END_ACTION|>' }}",
        between="{{- ',\\n' }}",
    ),
    # Command R+: a block of code. Reads the tools even if there are none.
    "command r plus": "{%- for tool in tools %}{{- tool.function.name }}{%- endfor %}"
    + _foreign(
        _SIGNATURE,
        """{{- '    {\\n        "tool_name": "' + f.name + '",\\n        "parameters": ' }}"""
        "{{- f.arguments | tojson(indent=4) + '\\n    }' }}",
        head="{{- 'Action:\\n```json\\n[\\n' }}",
        tail="{{- '\\n]```' }}",
        between="{{- ',\\n' }}",
    ),
    # Muse: XML in a namespace of its own, in a message to the tool.
    "muse glimmer": _foreign(
        _SIGNATURE,
        "{{- ' to=' + f.name + '<|message|><atem:invoke name=\"' + f.name + '\">' }}"
        + _PARAMETERS
        + "{{- '<atem:parameter name=\"' + name + '\">' ~ value ~ '</atem:parameter>' }}{%- endfor %}"
        "{{- '</atem:invoke>' }}",
    ),
    # Functionary 3.1: the name in the tag, JSON inside; another marker for one of its tools.
    "functionary 3.1": _foreign(
        _SIGNATURE,
        "{%- if f.name == 'python' %}{{- '<|python_tag|>' + f.arguments | tojson }}{%- else %}"
        "{{- '<function=' + f.name + '>' + f.arguments | tojson + '</function>' }}{%- endif %}",
    ),
    # Apriel 1.5: a list in <tool_calls>; the instructions name <tool_call> instead.
    "apriel 1.5": _foreign(
        "{{- 'Return calls within <tool_call></tool_call>: ' + f.name }}",
        """{{- '{"name": "' + f.name + '", "arguments": ' + f.arguments | tojson + '}' }}""",
        head="{{- '\\n<tool_calls>[' }}",
        tail="{{- ']</tool_calls>' }}",
        between="{{- ', ' }}",
    ),
    # GLM: a pair of tags for the key and the value of each argument.
    "glm": _foreign(
        "{{- '<tool_call>' + f.name }}",
        "{{- '<tool_call>' + f.name + '\\n' }}"
        + _PARAMETERS
        + "{{- '<arg_key>' + name + '</arg_key>\\n<arg_value>' ~ value ~ '</arg_value>\\n' }}{%- endfor %}"
        "{{- '</tool_call>' }}",
    ),
    # Seed-OSS: as qwen_xml, with other tags around it.
    "seed": _foreign(
        "{{- '<tool_call>' + f.name }}",
        "{{- '<seed:tool_call>\\n<function=' + f.name + '>\\n' }}"
        + _PARAMETERS
        + "{{- '<parameter=' + name + '>' ~ value ~ '</parameter>\\n' }}{%- endfor %}"
        "{{- '</function>\\n</seed:tool_call>' }}",
    ),
    # Mistral Small 3.2: the name before the arguments.
    "mistral small": _foreign(
        "{{- f.name }}", "{{- '[TOOL_CALLS]' + f.name + '[CALL_ID]abcdefghi[ARGS]' + f.arguments | tojson }}"
    ),
    # Arguments as Python writes them, which is not JSON.
    "python values": _foreign(
        "{{- f.name }}",
        """{{- '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}"""
        "{{- f.arguments ~ '}\\n</tool_call>' }}",
    ),
    # The template refuses calls.
    "no calls": _foreign("{{- '<tool_call>' + f.name }}", "{{- raise_exception('no calls') }}"),
}

# Another marker after the call: the format's own closing is missing.
UNCLOSED = HERMES.replace("}\\n</tool_call>'", "}<|call|>'").replace("</tool_call>", "")

TEMPLATES = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen_xml": QWEN35,
    "gemma4": GEMMA4,
    "harmony": HARMONY,
    "lfm2": LFM2,
    "words": PLAIN,
}
