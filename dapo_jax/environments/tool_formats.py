"""Host: how a policy writes calls of tools in its turn, by format, and the schemas by which it is told of them."""

import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from dapo_jax.errors import InputError

KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
OF_KIND = {kind: of for of, kind in KINDS.items()} | {"number": int | float, "null": types.NoneType}
_DECODER = json.JSONDecoder()
_FENCED = re.compile(r"```(?:json)?\s*(\{.*?\})\s*```", re.DOTALL)
_OF_ANY_FORMAT = re.compile(
    r"(<tool_call>.*?(?:</tool_call>|\Z)|```(?:json)?\s*\{.*?\}\s*```|\A\s*(?:<\|python_tag\|>\s*)?\{.*\}\s*\Z)",
    re.DOTALL,
)


class Call(NamedTuple):
    """A call, or what is wrong with it."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""


def _tagged(text: str) -> Iterator[str]:
    """<tool_call>{...}</tool_call>, as Hermes and Qwen write; the last may lack its end."""
    for part in text.split("<tool_call>")[1:]:
        yield part.partition("</tool_call>")[0]


def _objects(text: str) -> Iterator[str]:
    """A turn that is one JSON object or several with semicolons between them, as Llama 3 writes."""
    text = text.strip().removeprefix("<|python_tag|>").lstrip()
    text = text if text.startswith("{") else ""
    while text:
        try:
            end = _DECODER.raw_decode(text)[1]  # an argument may have semicolons
        except (ValueError, RecursionError):
            end = 0
        more, _, rest = text[end:].partition(";")
        yield text[:end] + more
        text = rest.strip()


def _fenced(text: str) -> Iterator[str]:
    """JSON objects between ```json and ```, or a turn that is one JSON object."""
    found = _FENCED.findall(text)
    yield from found or _objects(text)


FORMATS: dict[str, Callable[[str], Iterator[str]]] = {"hermes": _tagged, "llama3": _objects, "json": _fenced}
# In chat templates that teach another form: of Qwen3.5, GLM-4.5, Mistral, gpt-oss and Olmo 3.
OTHERS = ("<function=", "<arg_key>", "[TOOL_CALLS]", "<|channel|>", "<function_calls>")
EXAMPLES = {"hermes": "<tool_call>{}</tool_call>", "llama3": "{}", "json": "```json\n{}\n```"}  # with a call's JSON


def format_of(chat_template: str | None, chosen: str = "auto") -> str:
    """`chosen`, unless it is auto: the format that a chat template teaches; "" if that is none of them."""
    text = chat_template or ""
    if chosen != "auto" or any(mark in text for mark in OTHERS):
        return chosen.replace("auto", "")
    if "<tool_call>" in text:
        return "hermes"
    return "llama3" if "<|python_tag|>" in text else "json"


def calls_in(text: str, tool_format: str) -> list[Call]:
    """The calls that a turn makes, in order."""
    return [_call(one) for one in FORMATS[tool_format](text)]


def parts_of(text: str) -> list[tuple[bool, str]]:
    """The parts of a turn in order, and whether each is a call, in any format; for short turns, as it is quadratic."""
    parts = enumerate(_OF_ANY_FORMAT.split(text))
    return [(bool(number % 2), part) for number, part in parts if part.strip()]


def _is_json(text: str) -> Any:
    """The value, of finite numbers; None if the text is none."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise InputError(f"{text} is not finite")
    return number


def _call(text: str) -> Call:
    found = _is_json(text)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call("", {}, 'a call must be a JSON object with "name" and "arguments"')
    given = found.get("arguments", found.get("parameters", {}))
    given = _is_json(given) if isinstance(given, str) else given
    if not isinstance(given, dict):
        return Call(found["name"], {}, f"the arguments of {found['name']} must be a JSON object")
    return Call(found["name"], given)


def schema(given: str, function: Callable[..., Any], skipped: int = 0) -> dict[str, Any]:
    """A tool as chat templates are told of it: name, description and parameters, from types and docstring.

    Args:
        given: how the user named it, for messages.
        skipped: first parameters that no call names.

    Raises:
        InputError: a parameter has no type, or one that JSON has no value for.
    """
    name, text = function.__name__, inspect.getdoc(function) or ""
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:  # a name in an annotation may be anything
        raise InputError(f"{given}: the types of {name} cannot be read ({error}): correct them") from error
    properties, needed = {}, []
    for parameter in list(inspect.signature(function).parameters.values())[skipped:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InputError(f"{given}: {name} takes {parameter}, but a call names each argument: name the parameters")
        if parameter.name not in hints:
            raise InputError(
                f"{given}: the parameter {parameter.name} of {name} must have a type, as it is part of what the model "
                f"is told: write {parameter.name}: str, or another of {', '.join(kind.__name__ for kind in KINDS)}"
            )
        kind = _schema_of(hints[parameter.name])
        if kind is None:
            raise InputError(
                f"{given}: the parameter {parameter.name} of {name} has the type {hints[parameter.name]}, which must "
                f"be {', '.join(kind.__name__ for kind in KINDS)}, Literal or a union of these: change it"
            )
        described = re.search(rf"^\s*{re.escape(parameter.name)}(?:\s*\([^)]*\))?:\s*(.+)$", text, re.MULTILINE)
        properties[parameter.name] = kind | ({"description": described[1].strip()} if described else {})
        if parameter.default is parameter.empty:
            needed.append(parameter.name)
    description = re.split(r"\n\s*(?:Args|Returns|Raises):", text)[0].strip()
    parameters = {"type": "object", "properties": properties, "required": needed}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _schema_of(kind: Any) -> dict[str, Any] | None:
    """The JSON schema of a type; None if there is none."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (typing.Union, types.UnionType):
        several = [_schema_of(part) for part in parts if part is not types.NoneType]
        nullable = [{"type": "null"}] * (types.NoneType in parts)
        return None if None in several else {"anyOf": [*several, *nullable]}
    if origin is list:
        items = _schema_of(parts[0]) if parts else {}
        return None if items is None else {"type": "array", "items": items}
    kind = dict if origin is dict else kind
    return {"type": KINDS[kind]} if kind in KINDS else None


def misfit(schema: dict[str, Any], arguments: dict[str, Any]) -> str:
    """Why arguments do not fit a tool; "" if they do."""
    function = schema["function"]
    name, known = function["name"], function["parameters"]["properties"]
    if missing := [one for one in function["parameters"]["required"] if one not in arguments]:
        return f"{name} needs the argument {missing[0]}"
    for key, value in arguments.items():
        if key not in known:
            return f"{name} has no argument {key}, only {', '.join(known) or 'none'}"
        if not _fits(value, known[key]):
            wanted = {part: rule for part, rule in known[key].items() if part != "description"}
            return f"the argument {key} of {name} must be {json.dumps(wanted)}"
    return ""


def _fits(value: Any, rule: dict[str, Any]) -> bool:
    if "anyOf" in rule:
        return any(_fits(value, one) for one in rule["anyOf"])
    if "enum" in rule:
        return value in rule["enum"]
    if "type" not in rule:
        return True
    kind = OF_KIND[rule["type"]]
    fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    return fits and all(_fits(one, rule["items"]) for one in (value if "items" in rule else ()))
