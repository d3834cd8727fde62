import signal
import threading
import time

import pytest
from ends_within import ends_within

from dapo_jax.data import template_sandbox
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


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**8 * 'ab' }}",
        "{{ ([1] * 10**7) * 10 }}",
        "{{ 9**(9**9) }}",
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% macro f(x, n) %}{{ f(x ~ x, n - 1) if n else x }}{% endmacro %}{{ f('a' * 1000, 60) }}",
        "{% set x = 'a' * 10**6 %}{% set y %}{% for i in range(10**5) %}{{ x }}{% endfor %}{% endset %}",
        "{% set x = 'a' * 10**6 %}{% for i in range(10**5) %}{{ x }}{% endfor %}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ 'a' | indent(10**10) }}",
        "{{ 'a\nb' | indent(width=10**10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '{:10000000000d}'.format(1) }}",
        "{{ '{:{}d}'.format(1, 10**10) }}",
        "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}",
        "{{ ('a' * 10**5) | replace('a', 'b' * 10**5) }}",
        "{{ ('a' * 10**5).join(['b'] * 10**5) }}",
        "{{ (['b' * 10**5] * 10**5) | join }}",
        "{{ (['b'] * 10**5) | join('a' * 10**5) }}",
        "{{ [1] | tojson(indent=10**10) }}",
        "{{ (1).to_bytes(10**10, 'big') }}",
        "{{ ('a' * 10**5).translate({97: 'b' * 10**5}) }}",
        "{{ 1.5 | round(10**9, 'ceil') }}",
        "{{ range(10**10) | list }}",
        "{{ lipsum(10**9) }}",
        "{{ [1, 2] | random }}",
    ],
)
def test_a_template_cannot_make_what_is_too_large(template):
    with ends_within(8), pytest.raises(ValueError, match="the chat template failed .* or the model's template"):
        plain(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(template, monkeypatch):
    monkeypatch.setattr(template_sandbox, "TIME_LIMIT_S", 0.2)
    with ends_within(30), pytest.raises(ValueError, match="TimeoutError: still running after 0.2 s|SecurityError"):
        plain(template)
    assert plain(CHATML)


def test_a_timer_that_runs_goes_on_after_a_rendering(monkeypatch):
    fired = []
    previous = signal.signal(signal.SIGALRM, lambda *_: fired.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 30.0)
        plain(CHATML)
        assert 25 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30 and not fired
        monkeypatch.setattr(template_sandbox, "TIME_LIMIT_S", 0.2)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(ValueError, match="still running"):
            plain("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
        time.sleep(0.05)
        assert len(fired) == 1
        assert plain(CHATML) and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_other_threads_render_too_with_the_limits_of_size():
    results = []

    def work():
        results.append(plain(CHATML))
        with pytest.raises(ValueError, match="SecurityError"):
            plain("{{ 'a' * 10**10 }}")
        results.append("refused")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [plain(CHATML), "refused"]


def test_what_is_large_but_allowed_renders():
    content = "a b\n" * 1_000_000
    assert plain("{{ messages[0].content ~ '!' }}", [{"role": "user", "content": content}]) == content + "!"
    replaced = plain("{{ messages[0].content.replace('\n', '; ') }}", [{"role": "user", "content": content}])
    assert replaced == content.replace("\n", "; ")
    assert plain("{{ '**%s**-%03d' % ('x', 7) }} {{ '{{*{:>5}*}}'.format('y') }}") == "**x**-007 {*    y*}"
    assert plain("{{ ['a', 1] | join(', ') }} {{ '-'.join(['b', 'c']) }} {{ 'de' | join('+') }}") == "a, 1 b-c d+e"
    assert plain("{{ 'ab' * 3 + 'c' }} {{ 2**10 }} {{ 7 % 4 }} {{ 1 ~ 'x' ~ none }} {{ 1.25 | round(1) }}") == (
        "abababc 1024 3 1xNone 1.2"
    )
