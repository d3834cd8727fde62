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
