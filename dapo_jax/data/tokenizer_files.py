"""Host: the tokenizer files of a Hugging Face directory, read by the rules of transformers' AutoTokenizer."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from dapo_jax.data.model_files import is_size, read_if_there, read_object, unreadable
from dapo_jax.errors import InputError

# The names under which a tokenizer of transformers holds special tokens of its own.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an AddedToken

logger = logging.getLogger(__name__)

IMAGE_TOKENS = "image_token", "video_token", "boi_token", "eoi_token", "vision_start_token", "vision_end_token"


@contextmanager
def without_panic(origin: str) -> Iterator[None]:
    """An InputError for a panic of the tokenizers library, which is no Exception, on the tokenizer from `origin`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"{origin or 'the tokenizer'} makes the tokenizers library panic ({str(error)[:200]}): one of its patterns "
            "takes too long on some text, or its parts contradict each other; download it again or correct it"
        ) from error


def read_settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json. Without added_tokens_decoder there, special_tokens_map.json wins over it."""
    settings = read_if_there(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings = settings | read_if_there(directory / "special_tokens_map.json")
    return settings


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like with their texts, as chat templates name them."""
    extra = settings.get("extra_special_tokens")
    named = {name: token for name, token in settings.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def read_backend(directory: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """tokenizer.json with the tokens that only other files add: added_tokens_decoder of tokenizer_config.json, or
    added_tokens.json, and what `settings` names as special tokens.

    As in transformers, a token that is not in the vocabulary gets the next free id, in the order of the ids that the
    files say; a warning has those that get another id than that.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{directory} has no tokenizer.json: save the model's fast tokenizer there by AutoTokenizer")
    try:
        with without_panic(str(file)):
            backend = tokenizers.Tokenizer.from_file(str(file))
    except InputError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise unreadable(file, error) from error
    backend.no_truncation()
    backend.no_padding()
    own = backend.get_added_tokens_decoder()
    special = _special_tokens(settings)
    try:
        said = _said(directory, settings, special)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{directory}: added_tokens_decoder of tokenizer_config.json must map ids to objects with content and "
            f"flags, added_tokens.json texts to ids ({error}): download them again"
        ) from error
    new = [token for _, token in sorted(said.items()) if repr(token) not in set(map(repr, own.values()))]
    named = special_tokens(settings)
    for token in new:
        token.special = token.special or token.content in [named.get(name) for name in NAMES]
    present = {token.content for token in [*own.values(), *new]}
    new += [token for text, token in special.items() if text not in present]
    with without_panic(str(directory)):
        backend.add_tokens(new)
    moved = {token.content: index for index, token in said.items() if backend.token_to_id(token.content) != index}
    if moved:
        logger.warning(
            "%s: other files give tokens ids that tokenizer.json does not (%s): used with its ids, as by AutoTokenizer",
            directory,
            ", ".join(f"{text!r} {index}, now {backend.token_to_id(text)}" for text, index in [*moved.items()][:5]),
        )
    return backend


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, AddedToken]:
    """By their text, the tokens that `settings` names as special or lists as such."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    listed = [*extra.values()] if isinstance(extra, dict) else extra if isinstance(extra, list) else []
    given = [*(token for name, token in settings.items() if name.endswith("_token")), *listed]
    tokens: dict[str, AddedToken] = {}
    for token in given:
        if isinstance(token, str) and token:
            tokens.setdefault(token, AddedToken(token, special=True))
        elif isinstance(token, dict) and isinstance(token.get("content"), str) and token["content"]:
            tokens.setdefault(token["content"], _added(token | {"special": True}))
    return tokens


def _said(directory: Path, settings: Mapping[str, Any], special: Mapping[str, AddedToken]) -> dict[int, AddedToken]:
    """The added tokens of other files than tokenizer.json, by the ids that these files say."""
    if "added_tokens_decoder" in settings:
        return {int(index): _added(token) for index, token in settings["added_tokens_decoder"].items()}
    listed = read_if_there(directory / "added_tokens.json")
    return {
        int(index): AddedToken(text, special=text in special, normalized=text not in special)
        for text, index in listed.items()
    }


def _added(token: Mapping[str, Any]) -> AddedToken:
    return AddedToken(token["content"], **{flag: bool(token[flag]) for flag in FLAGS if flag in token})


def end_ids(directory: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[Any, ...]:
    """All that any file says, each once: generation_config.json, config.json, then eos_token of the tokenizer."""
    found: list[Any] = []
    config = read_if_there(directory / "config.json")
    text_config = config.get("text_config")
    for values in (
        read_if_there(directory / "generation_config.json"),
        config,
        text_config if isinstance(text_config, dict) else {},
        {"eos_token_id": None if eos_token is None else backend.token_to_id(eos_token)},
    ):
        eos = values.get("eos_token_id")
        new = eos if isinstance(eos, list) else [] if eos is None else [eos]
        found += [index for index in new if index not in found]
    if not found:
        raise InputError(
            f"{directory} names no end-of-sequence token: give eos_token_id in generation_config.json or "
            "config.json, or eos_token in tokenizer_config.json"
        )
    return tuple(found)


def image_ids(directory: Path) -> frozenset[int]:
    """The tokens of images and videos that config.json names."""
    config = read_if_there(directory / "config.json")
    found = (config.get(f"{name}_{kind}") for name in IMAGE_TOKENS for kind in ("index", "id"))
    return frozenset(index for index in found if index is not None and is_size(index))


def chat_template(directory: Path, configured: Any) -> str | None:
    """The first there is: chat_template.jinja, chat_template.json, then `configured` in tokenizer_config.json.

    Of several named templates it is the default one.
    """
    file, source = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise unreadable(file, error) from error
    if (file := directory / "chat_template.json").is_file():
        configured, source = read_object(file).get("chat_template"), file
    if isinstance(configured, list) and all(isinstance(entry, dict) for entry in configured):
        configured = {entry.get("name"): entry.get("template") for entry in configured}.get("default")
    if not isinstance(configured, str | None):
        raise InputError(
            f"{source}: chat_template={str(configured)[:60]!r} must be text, or a list of "
            "objects with name and template: download it again, or write chat_template.jinja"
        )
    return configured
