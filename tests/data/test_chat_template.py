import pytest

from dapo_jax.data.chat_template import render

USER = [{"role": "user", "content": "12 + 7 ="}]
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def plain(template, messages=USER, **variables):
    return render(template, messages, special_tokens={"bos_token": "<s>"}, **variables)


def test_generation_prompt_is_added_unless_declined():
    head = "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\n12 + 7 =<|im_end|>\n"
    assert plain(CHATML) == head + "<|im_start|>assistant\n"
    assert plain(CHATML, add_generation_prompt=False) == head


def test_whitespace_around_blocks_is_trimmed_as_templates_expect():
    template = "{%- for m in messages %}\n {{ m.content }}\n  {% if false %}\n  {% endif %}\n{% endfor %}"
    assert plain(template) == " 12 + 7 =\n"


def test_special_tokens_and_keyword_arguments_reach_the_template():
    template = "{{ bos_token }}{% if thinking is defined and thinking is false %}<think></think>{% endif %}"
    assert plain(template) == "<s>"
    assert plain(template, thinking=False) == "<s><think></think>"


def test_constructs_of_published_templates_render():
    template = """{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and not message.content.startswith('<tool>') %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}{% break %}
    {%- endif %}
{%- endfor %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{{- [system, ns.last, tools is none, users | length] | tojson }}"""
    chat = [{"role": "system", "content": " Be <b>. "}, *USER, {"role": "assistant", "content": "é"}, *USER]
    assert plain(template, chat) == '["Be <b>.", 2, true, 2]'
    assert plain("{{ messages[0] | tojson(indent=1) }}", [{"role": "é"}]) == '{\n "role": "é"\n}'


# Templates with the constructs of published ones: Gemma 2 and 3, Qwen3, SmolLM3, OLMo 2.
TURNS = """{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate") }}
    {%- endif -%}
    {%- if message['content'] is string -%}{%- set text = message['content'] -%}
    {%- elif message['content'] is iterable -%}{%- set text = message['content'][0]['text'] -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
    {{- (prefix if loop.first else '') + text | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
GEMMA2 = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% set prefix = '' %}" + TURNS
)
GEMMA3 = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}"
    "{%- set messages = messages[1:] -%}{%- else -%}{%- set prefix = '' -%}{%- endif -%}" + TURNS
)
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": " 19\n"}


def test_gemma_2_has_no_system_role_and_says_so():
    text = "<s><start_of_turn>user\n12 + 7 =<end_of_turn>\n<start_of_turn>model\n"
    assert plain(GEMMA2) == text
    answered = plain(GEMMA2, [*USER, ANSWER], add_generation_prompt=False)
    assert answered == text + "19<end_of_turn>\n"
    with pytest.raises(ValueError, match="System role not supported. If the model has no system role, leave data.sys"):
        plain(GEMMA2, [SYSTEM, *USER])
    with pytest.raises(ValueError, match="Roles must alternate. Change the messages"):
        plain(GEMMA2, [*USER, *USER])


def test_gemma_3_merges_the_system_message_into_the_first_turn_of_the_user():
    text = "<s><start_of_turn>user\nBe brief.\n\n12 + 7 =<end_of_turn>\n<start_of_turn>model\n"
    assert plain(GEMMA3, [SYSTEM, *USER]) == text
    assert plain(GEMMA3, [SYSTEM, *USER, ANSWER, *USER]).count("Be brief.") == 1
    assert plain(GEMMA3) == plain(GEMMA2)
    parts = [{"role": "user", "content": [{"type": "text", "text": "12 + 7 ="}]}]
    assert plain(GEMMA3, parts) == plain(GEMMA3)


QWEN3 = """{%- if tools %}{{- '<|im_start|>system\n' }}
    {%- for tool in tools %}{{- "\n" ~ (tool | tojson) }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\n<think>\n' + (reasoning or '').strip('\n') + '\n</think>\n\n' + content }}
        {%- else %}{{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""


def test_constructs_of_qwen3_render():
    user = "<|im_start|>user\n12 + 7 =<|im_end|>\n"
    assert plain(QWEN3) == user + "<|im_start|>assistant\n"
    assert plain(QWEN3, enable_thinking=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert plain(QWEN3, [SYSTEM, *USER]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n" + user)
    assert plain(QWEN3, tools=[{"name": "<add>"}]).startswith('<|im_start|>system\n\n{"name": "<add>"}<|im_end|>')
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n19"}
    last = plain(QWEN3, [*USER, thought], add_generation_prompt=False)
    assert last == user + "<|im_start|>assistant\n<think>\nhm\n</think>\n\n19<|im_end|>\n"
    earlier = plain(QWEN3, [*USER, thought, *USER])
    assert earlier == user + "<|im_start|>assistant\n19<|im_end|>\n" + user + "<|im_start|>assistant\n"
    results = [{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}]
    said = "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
    assert said in plain(QWEN3, [*USER, thought, *results])


SMOLLM3 = """{%- macro turn(role, text) -%}{{ '<|im_start|>' ~ role ~ '\n' ~ text ~ '<|im_end|>\n' }}{%- endmacro -%}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{%- if messages[0].role == "system" -%}
    {%- set system_message = messages[0].content -%}
    {%- if "/no_think" in system_message -%}{%- set mode = "/no_think" -%}
    {%- elif "/think" in system_message -%}{%- set mode = "/think" -%}
    {%- endif -%}
    {%- set custom = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- '<|im_start|>system\n' -}}
{%- if custom and "/system_override" in custom -%}{{- custom.replace("/system_override", "").rstrip() -}}
{%- else -%}
    {%- set today = strftime_now("%d %B %Y") -%}
    {{- "Today Date: " ~ today ~ "\nReasoning Mode: " + mode + "\n" -}}
    {%- if custom -%}{{- custom -}}{%- endif -%}
    {%- if xml_tools or python_tools or tools -%}
        {%- set ns = namespace(text="") -%}
        {%- for tool in (xml_tools or tools) -%}{%- set ns.text = ns.text ~ (tool | string) -%}{%- endfor -%}
        {{- ns.text -}}
    {%- endif -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}{{ turn("user", content) }}
    {%- elif message.role == "assistant" -%}{% generation %}
        {%- if mode == "/think" -%}{{ turn("assistant", content.lstrip("\n")) }}
        {%- else -%}{{ turn("assistant", "<think>\n\n</think>\n" + content.lstrip("\n")) }}
        {%- endif -%}
    {% endgeneration %}
    {%- elif message.role == "tool" -%}{{ turn("user", content) }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\n' ~ ('' if mode == "/think" else '<think>\n\n</think>\n') }}
{%- endif -%}"""


def test_constructs_of_smollm3_render():
    head = "<|im_start|>system\nToday Date: 26 July 2024\nReasoning Mode: {}\n{}<|im_end|>\n"
    user = "<|im_start|>user\n12 + 7 =<|im_end|>\n"
    assert plain(SMOLLM3) == head.format("/think", "") + user + "<|im_start|>assistant\n"
    quiet = plain(SMOLLM3, enable_thinking=False)
    assert quiet == head.format("/no_think", "") + user + "<|im_start|>assistant\n<think>\n\n</think>\n"
    assert plain(SMOLLM3, [{"role": "system", "content": "Be brief. /no_think"}, *USER]).startswith(
        head.format("/no_think", "Be brief.") + user
    )
    told = {"role": "system", "content": "Only this. /system_override"}
    assert plain(SMOLLM3, [told, *USER]).startswith("<|im_start|>system\nOnly this.<|im_end|>\n")
    answered = plain(SMOLLM3, [*USER, {"role": "assistant", "content": "19"}], add_generation_prompt=False)
    assert answered == head.format("/think", "") + user + "<|im_start|>assistant\n19<|im_end|>\n"


def test_constructs_of_olmo_render():
    template = (
        "{{ bos_token }}{% for message in messages %}{% if message.get('functions', none) is not none %}f{% endif %}"
        "{% if message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + eos_token }}"
        "{% if not loop.last %}{{ '\n' }}{% endif %}"
        "{% else %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
    )
    text = render(template, [*USER, {"role": "assistant", "content": "19"}, *USER], special_tokens=OLMO_TOKENS)
    turn = "<|user|>\n12 + 7 =\n<|assistant|>\n"
    assert text == f"<|endoftext|>{turn}19<|endoftext|>\n{turn}"


OLMO_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def test_todays_date_never_changes_and_can_be_given():
    default = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    template = default + "{{ date_string }}"
    assert plain(template) == "26 Jul 2024"
    assert plain(template, date_string="01 Jan 2030") == "01 Jan 2030"


@pytest.mark.parametrize(
    "template, message",
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            r"roles \['user'\]: TemplateError: roles must alternate",
        ),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.of.this }}", "UndefinedError"),
    ],
)
def test_failures_of_a_template_are_value_errors_that_say_why(template, message):
    with pytest.raises(ValueError, match=message):
        plain(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'other'}) }}",
        "{{ (messages[0].content | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ (1).__class__.__base__.__subclasses__() }}",
    ],
)
def test_a_template_can_neither_reach_python_nor_change_its_input(template):
    messages = [dict(USER[0])]
    with pytest.raises(ValueError, match="SecurityError"):
        plain(template, messages)
    assert messages == USER
