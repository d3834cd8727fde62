"""Host: which columns of a row are its prompt, its answer and the rest, in verl's schema or any other."""

import functools
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dapo_jax.errors import InputError

MISSING = object()
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
_OF_VERL = {"data_source", "ability", "reward_model", "extra_info", *TEMPLATE_COLUMNS}
# Usual names of such columns, the likeliest first.
_PROMPTS = ("question", "problem", "instruction", "query", "input", "prompt", "task", "text")
_ANSWERS = ("ground_truth", "final_answer", "answer", "target", "label", "solution", "result", "output", "response")


@dataclass(frozen=True)
class Columns:
    """The options of these names in the section data."""

    prompt_key: str = "prompt"
    prompt_template: str = ""
    answer_key: str = "reward_model.ground_truth"

    def prompt_of(self, record: Mapping[str, Any]) -> str:
        """The column with the prompt, if there is no template: prompt_key, or `messages` in place of `prompt`."""
        usual = self.prompt_key == Columns.prompt_key and record.get("prompt") is None
        return "messages" if usual and record.get("messages") is not None else self.prompt_key

    def others(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that a reward function finds in extra_info."""
        prompt = None if self.prompt_template else self.prompt_of(record)
        return {key: value for key, value in record.items() if key not in _OF_VERL and key != prompt}


def value_at(record: Any, path: str) -> Any:
    """The value at a dotted path of keys, which may have dots too, and places in lists: a.text.0; MISSING without."""
    if isinstance(record, list):
        record = {str(place): value for place, value in enumerate(record)}
    if not isinstance(record, dict):
        return MISSING
    head, _, rest = path.partition(".")
    if path not in record and rest and head in record:
        return value_at(record[head], rest)
    return record.get(path, MISSING)


@functools.cache
def template_parts(template: str) -> list[tuple[str, str | None]]:
    """The texts of data.prompt_template, each with the column that follows it, if any. InputError for another form.

    Columns are looked up, never formatted: a template reaches no attributes and runs no code.
    """
    rule = f"data.prompt_template={template!r} must be text with columns in braces, such as '{{question}}'"
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise InputError(f"{rule} ({error}): write {{{{ and }}}} for braces that are text") from error
    if any(column == "" or form or conversion for _, column, form, conversion in parts):
        cure = "write {{ and }} for braces that are text, as in \\boxed{{}}"
        raise InputError(f"{rule}, each a name without a format: {cure}")
    if all(column is None for _, column, _, _ in parts):
        raise InputError(f"{rule}, and has none, so that all prompts would be the same: name one")
    return [(text, column) for text, column, _, _ in parts]


def suggestion(record: Mapping[str, Any], missing: set[str]) -> str:
    """The columns of a row in another schema, and the options that read them.

    Args:
        missing: what the row lacks of prompt, answer and source.
    """
    names = ", ".join(map(str, list(record)[:20]))
    if "question" in record and "####" in str(record.get("answer")):
        return f"{names}: this looks like GSM8K as published, which hf://openai/gsm8k/main/train reads"
    paths = [
        *record,
        *(f"{column}.{key}" for column, value in record.items() if isinstance(value, dict) for key in value),
    ]
    prompt, answer = (
        next((path for name in names for path in paths if path.rpartition(".")[2].lower() == name), "COLUMN")
        for names in (_PROMPTS, _ANSWERS)
    )
    options = {
        "prompt": f"data.prompt_template='{{{prompt}}}'",
        "answer": f"data.answer_key={answer} (or '' if the reward needs none)",
        "source": "reward.function=FILE.py:FUNCTION or a verifier's name",
    }
    return f"{names}: set {', '.join(option for part, option in options.items() if part in missing)}"
