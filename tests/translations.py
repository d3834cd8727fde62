"""What scripts of verl's become: from_verl/translations.yaml has cases with what is recorded of each.

`python tests/translations.py` renews the records: look at the difference before you commit it.
"""

from pathlib import Path
from typing import Any

import yaml
from verl_keys import lines_of

from dapo_jax.tools.from_verl.shell import UNKNOWN, Script
from dapo_jax.tools.from_verl.translate import overrides, translate

FILE = Path(__file__).parent / "from_verl" / "translations.yaml"
HEAD = """\
# To add a case, write what is given below. `python tests/translations.py` renews `becomes`.
# given: options of verl's ("UNKNOWN" is what only a program could compute), or the name of a list in data/,
# script: or the text of a script, with NNODES=4 and the argument trainer.total_epochs=2.
"""


def options_of(case: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """verl's options of a case, and what of its script bash could not evaluate."""
    if "script" in case:
        environment = {"HOME": "/home/me", "PWD": "/here", "NNODES": "4"}
        script = Script(case["script"], environment=environment, arguments=["trainer.total_epochs=2"])
        return overrides(script), script.skipped
    listed = dict(line.split("=", 1) for line in lines_of(case["list"])) if "list" in case else {}
    return listed | {key: text.replace("UNKNOWN", UNKNOWN) for key, text in case.get("given", {}).items()}, []


def record(case: dict[str, Any]) -> dict[str, Any]:
    """The options here, and everything that is said of a case."""
    options, skipped = options_of(case)
    result = translate(options)
    notes = {name: getattr(result, name) for name in ("problems", "lost", "by_hand", "dropped")} | {"skipped": skipped}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in sorted(result.values.items())}
    return {"values": values} | {name: sorted(lines) for name, lines in notes.items() if lines}


def cases() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(FILE.read_text())


if __name__ == "__main__":
    found = {name: case | {"becomes": record(case)} for name, case in cases().items()}
    FILE.write_text(HEAD + yaml.safe_dump(found, sort_keys=False, width=10**6, allow_unicode=True))
