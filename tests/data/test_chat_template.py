import datetime
import json
import re
import signal
import threading
from pathlib import Path

import jinja2
import numpy as np
import pytest
from ends_within import ends_within
from packaging.version import Version

from dapo_jax.data import chat_template
from dapo_jax.data.chat_template import Conversation, render
from dapo_jax.errors import InputError

USER = [{"role": "user", "content": "12 + 7 ="}]
SYSTEM = {"role": "system", "content": "Be brief."}
FOLDER = Path(__file__).parent / "templates"  # with the constructs of published templates
RENDERED = json.loads((FOLDER / "rendered.json").read_text())
CHATML, GEMMA2, GEMMA3 = ((FOLDER / f"{name}.jinja").read_text() for name in ("chatml", "gemma2", "gemma3"))


def plain(template, messages=USER, add_generation_prompt=True, special_tokens=(("bos_token", "<s>"),), **arguments):
    chat = Conversation(messages, dict(special_tokens), arguments, add_generation_prompt)
    return render(template, [chat])[0]


@pytest.mark.parametrize("case", RENDERED, ids=lambda case: case["template"])
def test_constructs_of_published_templates_render(case):
    given = {name: value for name, value in case.items() if name not in ("template", "arguments", "text")}
    template = (FOLDER / f"{case['template']}.jinja").read_text()
    assert plain(template, **given, **case.get("arguments", {})) == case["text"]


def test_whitespace_special_tokens_and_arguments_are_as_templates_expect():
    template = "{%- for m in messages %}\n {{ m.content }}\n  {% if false %}\n  {% endif %}\n{% endfor %}"
    assert plain(template) == " 12 + 7 =\n"
    template = "{{ bos_token }}{% if thinking is defined and thinking is false %}<think></think>{% endif %}"
    assert plain(template) == "<s>" and plain(template, thinking=False) == "<s><think></think>"
    assert plain("{{ messages[0] | tojson(indent=1) }}", [{"role": "é"}]) == '{\n "role": "é"\n}'


def test_gemma_2_has_no_system_role_and_says_so():
    refused = "System role not supported. If the model has no system role, leave data.system_prompt null, and put"
    with pytest.raises(InputError, match=refused):
        plain(GEMMA2, [SYSTEM, *USER])
    with pytest.raises(InputError, match="Roles must alternate. Change the messages"):
        plain(GEMMA2, [*USER, *USER])


def test_todays_date_never_changes_and_can_be_given():
    default = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    template = default + "{{ date_string }}"
    assert plain(template) == "26 Jul 2024"
    assert plain(template, date_string="01 Jan 2030") == "01 Jan 2030"


def continued(template, content):
    messages = [*USER, {"role": "assistant", "content": content}]
    return render(template, [Conversation(messages, {"bos_token": "<s>"}, {}, False, continues=True)])[0]


def test_a_conversation_that_ends_with_the_assistants_beginning_is_continued_there():
    head = "<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\n12 + 7 =<|im_end|>\n<|im_start|>assistant\n"
    assert continued(CHATML, "Sum: ") == f"{head}Sum: " and continued(CHATML, "") == head
    assert continued(GEMMA3, " It is \n") == plain(GEMMA3) + "It is"  # which trims what messages say
    for template in ("{{ messages[0].content }}", "{{ messages[-1].content | replace('i', 'I') }}"):
        with pytest.raises(InputError, match="does not write the assistant's last message as it is"):
            continued(template, "It is")


def test_the_oldest_jinja_allowed_is_the_first_without_known_ways_out_of_its_sandbox():
    [floor] = re.findall(r'"jinja2>=([0-9.]+)"', (Path(__file__).parents[2] / "setup.py").read_text())
    assert Version("3.1.6") <= Version(floor) <= Version(jinja2.__version__)  # CVE-2024-56326, CVE-2025-27516


@pytest.mark.parametrize("template", (FOLDER / "forbidden.txt").read_text().splitlines())
def test_a_template_can_neither_reach_python_nor_change_its_input(template):
    messages = [dict(USER[0])]
    with pytest.raises(ValueError, match="SecurityError"):
        plain(template, messages)
    assert messages == USER


SHORT = "{{ messages[0].content }}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def chat(content, **arguments):
    return Conversation([{"role": "user", "content": content}], {"bos_token": "<s>"}, arguments)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 10**7 ~ 'a' }}", "OverflowError: a text of more than 10000000 characters"),
        (ENDLESS, "TimeoutError: still running after 0.2 s"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "TimeoutError"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ range(10**10) | list }}", "OverflowError: Range too big"),
        ("{{ lipsum(10**9) }}", "UndefinedError: 'lipsum'"),
        ("{{ [1, 2] | random }}", "No filter named 'random'"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ nothing.of.this }}", "UndefinedError"),
    ],
)
def test_a_template_that_fails_makes_too_much_or_does_not_end_is_an_error_that_says_why(template, reason, monkeypatch):
    monkeypatch.setattr(chat_template, "TIME_LIMIT_S", 0.2 if "TimeoutError" in reason else 30)
    message = f"the chat template failed .*{reason}.* the model's template"
    with ends_within(), pytest.raises(InputError, match=message):
        render(template, [chat("")])


def test_a_time_limit_around_it_stays():
    before = signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert render(SHORT, [chat("a")]) == ["a"]
        assert 900 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_values_without_a_type_in_json_are_written_as_it_writes_them_and_others_refused():
    template = "{{ bos_token }}{{ messages[0].content }}{{ tools | tojson }}{{ x is none }}"
    chats = [chat(f'é🙂\n"{number}\\', tools=[{"a": 1.5}], x=None if number % 2 else number) for number in range(2)]
    assert render(template, chats) == ['<s>é🙂\n"0\\[{"a": 1.5}]False', '<s>é🙂\n"1\\[{"a": 1.5}]True']
    given = {"day": datetime.date(2024, 1, 2), "rows": np.arange(3)}
    assert render("{{ day }} {{ rows }}", [chat("", **given)]) == ["2024-01-02 [0, 1, 2]"]
    assert render(SHORT, []) == []
    with pytest.raises(InputError, match="must be plain JSON"):
        render(SHORT, [chat(object())])


def test_the_conversation_that_fails_is_named_and_any_thread_may_render():
    template = "{% if messages[0].content == 'no' %}{{ raise_exception('Never.') }}{% endif %}" + SHORT
    chats = [chat("a"), Conversation([{"role": "system", "content": "no"}], {}), chat("b")]
    with pytest.raises(InputError, match=r"roles \['system'\]: TemplateError: Never.. If the model has no system"):
        render(template, chats)
    texts = []
    thread = threading.Thread(target=lambda: texts.extend(render(template, chats[::2])))
    thread.start()
    thread.join()
    assert texts == ["a", "b"]


def test_arguments_that_the_template_never_reads_are_warned_of_once(caplog):
    template = SHORT + "{% if thinking is defined %}!{% endif %}{% set mine = 1 %}{# once #}"
    for _ in range(3):
        assert render(template, [chat("a", thinking=1), chat("b", thinkin=1, mine=2)]) == ["a!", "b"]
    assert ["never reads mine, thinkin, given by" in text for text in caplog.messages] == [True]
