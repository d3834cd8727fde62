"""Scripts are expanded as bash expands them, without running anything."""

import subprocess

import pytest

from dapo_jax.errors import InputError
from dapo_jax.from_verl.shell_scripts import UNKNOWN, Script

ENVIRONMENT = {"HOME": "/home/me", "SET": "one two", "EMPTY": ""}
LINES = [
    "show plain 'single $SET' \"double $SET\" $SET \"a\"b'c' \\$SET",
    'A=${SET:-x}; B=${UNSET:-"${HOME}/d e"}; C=${EMPTY:-c}; D=${EMPTY-d}; show "$A" $B "$C" "$D" end',
    'N=3; M=$((N * (2 + 4) - 1)); show $M $((M / 2)) $((M % 4)) "$(( N*N ))" $((-N))',
    'L=(a "b c" # it\'s a comment\n \'d $SET\' $SET)\nL+=(z)\nshow "${L[@]}" ${#L[@]} "x${L[@]}y" end ${L[1]} $L',
    'E=(); show "${E[@]}" end "$@" "${@}" $1 "$2"',
    "show a \\\n  b # c\nshow d;show e",
    'if [ "$SET" = x ]; then show 1; elif [[ $SET == one* ]]; then show 2; if [ -n "${UNSET:-}" ]; then show 3; fi; '
    "else show 4; fi; show 5",
    'if [ -z "$EMPTY" ]\nthen\n  A=1\nelse\n  A=2\nfi\nif ! [ $A -gt 1 ]; then B=3; fi; show $A $B "$#"',
    'case "$SET" in\n  two) show 1 ;;\n  one | one*)\n    show 2\n    case a in b) show 3 ;; *) show 4;; esac ;;\n'
    "  *) show 5 ;;\nesac\nshow 6",
    'case x in (x) show 1;; esac; [ -n "$SET" ] && A=1; [ -z "$SET" ] && A=2; [ -z "$SET" ] || B=3; show $A $B',
    'if [ -n "$SET" ]; then\n  L=(a b)\n  case c in\n    c) L+=(d) ;;\n  esac\nfi\nshow "${L[@]}"',
    'show "${UNSET:-"a b"}c" "d${UNSET:-e f}"',
    "X=1 show \"k=['a','b']\" 'l=[\"a\",\"b\"]' ~/x",
    'S="$SET"; S+=" three"; show $S "$S" ${UNSET:+no}${SET:+yes} "${NEW:=fresh}" $NEW',
    "show one 2>/dev/null two | cat",
    'show "back\\\\slash \\"quoted\\" \\$x" a=b',
]


@pytest.mark.parametrize("text", LINES)
def test_words_are_those_of_bash(text):
    show = """show() { printf '<%s>' "$@"; printf '\\n'; }\n"""
    done = subprocess.run(
        ["bash", "-c", show + text, "script", "p q", "r"], capture_output=True, text=True, check=True, env=ENVIRONMENT
    )
    script = Script(text, environment=ENVIRONMENT, arguments=["p q", "r"])
    shown = ["".join(f"<{word}>" for word in words[1:]) for words in script.commands if words[0] == "show"]
    assert "\n".join(shown) == done.stdout.rstrip("\n") and script.skipped == []


def test_nothing_is_run(tmp_path):
    target = tmp_path / "made"
    text = f'A=$(touch {target}); B=`touch {target}`\ntouch {target}\nshow $A "$B" > {target}'
    script = Script(text, environment={})
    assert not target.exists()
    assert script.commands[-1] == ["show", UNKNOWN, UNKNOWN]
    assert script.skipped == [f"line 1: $(touch {target}) is not run", f"line 1: `touch {target}` is not run"]


def test_what_only_a_shell_could_decide_is_skipped_and_listed():
    text = """A=1
if [ -f "$B" ]; then
    A=2
    for x in a b; do A=$x; done
else
    case $A in 1) A=3 ;; esac
fi
f() {
    A=4
}
grep -q x y && A=5
source env.sh
for x in a b; do
    A=6
done
if [ "$(hostname)" = a ]; then A=7; fi
case $(hostname) in
    *) A=8 ;;
esac
show $A ${A%x} $C
"""
    script = Script(text, environment={"B": "b"})
    assert script.commands[-1] == ["show", "1", UNKNOWN]
    assert script.skipped == [
        'line 2: if [ -f "$B" ] ... fi',
        "line 8: { ... }",
        "line 11: A=5",
        "line 12: source env.sh",
        "line 13: for x in a b ... done",
        "line 16: $(hostname) is not run",
        'line 16: if [ "$(hostname)" = a ] ... fi',
        "line 17: $(hostname) is not run",
        "line 17: case $(hostname) in ... esac",
        "line 20: ${A%x} is not computed",
        "line 20: C is not set: read as empty",
    ]


@pytest.mark.parametrize("text", ["a='b", 'a="b', "a=$((1 + 2", "a=${b", "a=(b", "a=`b"])
def test_what_is_not_closed_is_refused_with_its_line(text):
    with pytest.raises(InputError, match="line 2: the .* is not closed"):
        Script(f"x=1\n{text}", environment={})


ODD = ["", "#", "\\", "a=", "$", "$(", "${}", "$(())", "((", "a() {", "&&", "x=$((1/0))", "if", "fi", "case x in"]


@pytest.mark.parametrize("text", ODD)
def test_any_text_is_read_or_refused(text):
    try:
        Script(text, environment={})
    except InputError as error:
        assert "is not closed" in str(error)
