"""Host: translates the options of a verl training script into an equivalent dapo_jax command."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dapo_jax.command.option_uses import unread
from dapo_jax.command.validation import validate
from dapo_jax.config.sections import Config
from dapo_jax.config.values import DEFAULTS, flat, freeze, resolve_aliases, type_problems, with_values
from dapo_jax.errors import InputError
from dapo_jax.hub.names import model_name
from dapo_jax.tools.from_verl import defaults
from dapo_jax.tools.from_verl.shell import UNKNOWN, Script
from dapo_jax.verl.options import converted, find, flag, is_off, ours_of
from dapo_jax.verl.values import ACTOR, ROLLOUT, TRACKERS, ByHand, as_type_of, parsed

OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
TRAINER = re.compile(r"(.*[./])?(main_(?!eval|gen)\w+|\w+_main)(\.py)?|verl\.trainer\.main")  # the last is EasyR1's
CONFIG_FILE = re.compile(r"--config-(name|path|dir)(=.*)?|-cn|-cp|-cd|config=.*")
REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # a reference to another option
WINS = re.compile(  # over the same option by another name
    r".*\.(optim\.(override_optimizer_config\..*|warmup_style)|actor\.tau_\w+)"
)
FSDP_SIZE = f"{ACTOR}.fsdp_config.fsdp_size"
ASSUMED = {  # verl's defaults that conversions read
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ROLLOUT}.multi_turn.enable": False,
    "distillation.enabled": False,
}
EXACT = {  # as verl does it, where it is read
    "algorithm.filter_groups.leftover": "discard",
    "actor.old_logprob": "recompute",
    "actor.count_empty_sequences": True,
}
BASE = freeze(defaults.get_config())


@dataclass
class Translation:
    """A verl run as dapo_jax options."""

    values: dict[str, Any] = field(default_factory=dict)  # by our keys, on top of defaults.py
    problems: list[str] = field(default_factory=list)  # why validation refuses the config
    lost: list[str] = field(default_factory=list)  # options without equivalent that change the run
    by_hand: list[str] = field(default_factory=list)  # options to check by hand
    dropped: list[str] = field(default_factory=list)  # options that are not needed

    def config(self) -> Config:
        return with_values(BASE, self.values)


def overrides(script: Script) -> dict[str, str]:
    """The options of the script's training command, as text. InputError if it has no such command.

    If the command names a config file, that is added to `script.skipped`.
    """
    for words in script.commands:
        at = next((place for place, word in enumerate(words) if TRAINER.fullmatch(word)), None)
        if at is not None:
            found = [OVERRIDE.fullmatch(word) for word in words[at + 1 :]]
            if any(found):
                script.skipped += [
                    f"{word}: only options on the command line are translated, not those in a config file"
                    for word in words[at + 1 :]
                    if CONFIG_FILE.fullmatch(word)
                ]
                return {match[1]: match[2] for match in found if match and match[1] != "config"}
    raise InputError(
        "no command of the script starts verl's trainer with options: it must have one such as `python3 -m "
        "verl.trainer.main_ppo data.train_files=...`, and reach it"
    )


def translate(given: Mapping[str, str]) -> Translation:
    """Translates verl's options.

    Args:
        given: verl's options by name, as text.
    """
    result = Translation()
    given = {key: REFERENCE.sub(lambda match: given.get(match[1], match[0]), text) for key, text in given.items()}
    known = {key: text for key, text in given.items() if text and UNKNOWN not in text and "${" not in text}
    for key in given.keys() - known.keys():
        _take_unknown(key, given[key], result)
    values = {key: parsed(text) for key, text in known.items()}
    values = {**_defaults(values), **values}
    for key, value in sorted(values.items(), key=lambda item: bool(WINS.fullmatch(item[0]))):
        _take(key, value, {**ASSUMED, **values}, result)
    _leave_out_unread(result)
    try:
        validate(resolve_aliases(result.config()))
    except InputError as error:
        lines = str(error).splitlines()
        result.problems = [line.removeprefix("  - ") for line in lines[1:] or lines]
    if not result.config().algorithm.filter_groups.enable:
        result.by_hand.append(
            "dynamic sampling is off, verl's default: to turn it on, set algorithm.filter_groups.enable=True and "
            "algorithm.filter_groups.metric=acc"
        )
    if (name := model_name(str(result.values.get("model.path") or "."))) is not None:
        result.by_hand.append(f"model.path={name} is downloaded from the Hugging Face hub by the run")
    if missing := _exact(result):
        result.by_hand.append(f"to behave exactly as verl, also set {', '.join(missing)}")
    result.by_hand.sort()
    return result


def _defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """verl's defaults for options that are read only with others, or whose value is computed here."""
    defaults: dict[str, Any] = {FSDP_SIZE: -1}
    if values.get("algorithm.filter_groups.enable"):
        defaults["algorithm.filter_groups.max_num_gen_batches"] = 0
    if values.get("data.val_files"):
        validation = "actor_rollout_ref.rollout.val_kwargs"
        defaults |= {f"{validation}.n": 1, f"{validation}.temperature": 0.0}
    if values.get("distillation.enabled"):
        defaults["distillation.distillation_loss.loss_mode"] = "k3"
    if values.get("actor_rollout_ref.model.lora.rank"):
        defaults["actor_rollout_ref.model.lora.alpha"] = 32
    if values.get("algorithm.adv_estimator", "gae") == "gae":
        inherited = ("ppo_epochs", "loss_agg_mode")
        defaults |= {f"critic.{name}": values[key] for name in inherited if (key := f"{ACTOR}.{name}") in values}
    return defaults


def _exact(result: Translation) -> list[str]:
    """The options of EXACT that the config reads, and that are not set yet."""
    config = with_values(BASE, EXACT | result.values)
    off = EXACT if type_problems(config) else unread(resolve_aliases(config))
    return [f"{key}={value}" for key, value in EXACT.items() if key not in {*off, *result.values}]


def _take_unknown(key: str, text: str, result: Translation) -> None:
    """Records an option whose value cannot be read from the script."""
    entry, ours = find(key), " or ".join(ours_of(key))
    why = "is empty in the script" if not text else "needs a command to run" if UNKNOWN in text else f"is {text}"
    if ours:
        result.by_hand.append(f"{key} {why}: set {ours} by hand, or leave it at its default")
    elif text and (entry is None or entry.lost):
        result.lost.append(f"{key} {why}: {entry.note if entry else 'not an option of verl 0.7 or 0.9'}")


def _take(key: str, value: Any, values: Mapping[str, Any], result: Translation) -> None:
    """Translates one option and records the result."""
    entry, text, same = find(key), f"{key}={value}", key.removeprefix("worker.")  # as EasyR1 prefixes our names
    if key.startswith("critic.") and values.get("algorithm.adv_estimator", "gae") != "gae":
        result.dropped.append(f"{text}: the advantage estimator needs no critic")
    elif entry is None and same in DEFAULTS:
        result.values |= as_type_of(same, value)
        if same.endswith(("online_filtering", "use_dynamic_sample")):  # the filter is off in defaults.py
            result.values["algorithm.filter_groups.enable"] = value
    elif entry is None:
        result.lost.append(f"{text}: not an option of verl 0.7 or 0.9")
    elif not entry.ours:
        matters = entry.lost and not is_off(entry, value, values)
        (result.lost if matters else result.dropped).append(f"{text}: {entry.note}")
    else:
        try:
            taken = converted(key, value, values)
        except InputError as error:
            (result.by_hand if isinstance(error, ByHand) else result.lost).append(f"{text}: {error}")
            return
        result.values |= taken
        if entry.by_hand and value is not None:
            result.by_hand.append(f"{text}: {', '.join(ours_of(key))} is {entry.note}")
        elif not taken and not entry.by_hand:
            result.dropped.append(f"{text}: leaves {', '.join(ours_of(key))} unchanged")
        if key == "trainer.logger" and len(taken.get(key, ())) < len(value if isinstance(value, list) else [value]):
            result.by_hand.append(f"{text}: the available trackers are {', '.join(TRACKERS)}")
        if key == FSDP_SIZE and taken != {"mesh.fsdp": 1}:
            devices = values["trainer.n_gpus_per_node"] * values["trainer.nnodes"]
            axis = taken["mesh.fsdp"]
            result.by_hand.append(f"mesh.fsdp={axis} is for the script's {devices} devices: fit it to yours")


def _leave_out_unread(result: Translation) -> None:
    """Removes options that nothing would read, because a run refuses them."""
    config = result.config()
    if type_problems(config):
        return
    for key, setting in unread(resolve_aliases(config)).items():
        if key in result.values:
            result.dropped.append(f"{key}={result.values.pop(key)}: not read without {setting}")
        if flat(BASE)[key] != DEFAULTS[key]:
            result.values[key] = DEFAULTS[key]


def command(values: Mapping[str, Any]) -> str:
    """The command, one option per line."""
    file = Path(defaults.__file__)
    file = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    options = [flag(key, value) for key, value in sorted(values.items())]
    return " \\\n    ".join([f"python -m dapo_jax.train --config {file}", *options])


def config_file(values: Mapping[str, Any], comments: Sequence[str]) -> str:
    """A config file that also contains verl's defaults."""
    changed = {key: value for key, value in flat(BASE).items() if value != DEFAULTS[key]} | dict(values)
    lines = [f"    config.{key} = {value!r}" for key, value in sorted(changed.items()) if value != DEFAULTS[key]]
    return "\n".join(
        [
            *comments,
            "",
            "from dapo_jax.config import default_config",
            "",
            "",
            "def get_config():",
            "    config = default_config()",
            *lines,
            "    return config",
            "",
        ]
    )


def remarks(result: Translation, skipped: Sequence[str]) -> Iterator[str]:
    """Notes on the translation, as comments for a shell or for Python."""
    parts = {
        "REFUSED: correct these options": result.problems,
        "CHANGES THE RUN: no equivalent here": result.lost,
        "Check by hand": result.by_hand,
        "Not seen, because no program, file or connection is open to the script": skipped,
        "Left out: not needed here": result.dropped,
    }
    for title, lines in parts.items():
        if lines:
            yield f"# {title}:"
            yield from (f"#   {line}" for text in _together(lines) for line in text.splitlines())


def _together(lines: Sequence[str]) -> list[str]:
    """Each line once; lines with the same note share it."""
    by_end: dict[str, list[str]] = {}
    for line in dict.fromkeys(lines):
        start, _, end = line.partition(": ")
        by_end.setdefault(end, []).append(start)
    return [
        f"{', '.join(starts)}: {end}" if end else start
        for end, starts in by_end.items()
        for start in (starts if not end else starts[:1])
    ]
