"""Host: text to token ids and back, for Hugging Face directories, GGUF files and a toy alphabet."""

import dataclasses
import functools
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from dapo_jax.data import gguf_tokenizer
from dapo_jax.data.chat_template import render
from dapo_jax.errors import InputError
from dapo_jax.models.model_files import read_object, unreadable

MAX_TOKENS = 2**31


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers.Tokenizer` and what a model's files say about its use."""

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]  # each of them ends a response
    pad_id: int  # may be one of eos_ids
    special_tokens: Mapping[str, str]  # bos_token, eos_token and the like, as chat templates name them
    add_bos: bool  # True if plain text begins with the bos token
    chat_template: str | None

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return 1 + max(self.backend.get_vocab().values())

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens in the text are recognised; none are added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. An id beyond the vocabulary, which a padded model may sample, has no text."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode_prompt(
        self,
        prompt: Sequence[Mapping[str, Any]] | str,
        *,
        system_prompt: str | None,
        chat_template_kwargs: Mapping[str, Any],
        response: str | None = None,
    ) -> list[int]:
        """Token ids of chat messages, up to the start of the answer, or of plain text.

        `system_prompt` precedes messages without a system message; None leaves that to the template.
        Plain text gets neither template nor system prompt. A `response` ends the conversation.
        """
        if isinstance(prompt, str):
            bos = self.encode(self.special_tokens["bos_token"]) if self.add_bos else []
            return bos + self.encode(prompt + (response or ""))
        if self.chat_template is None:
            raise InputError(
                "the tokenizer has no chat template, but the prompt is a list of messages: use an instruct "
                "model, give prompts as plain text, or add chat_template.jinja to the model's directory"
            )
        messages = list(prompt)
        if system_prompt is not None and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": system_prompt}, *messages]
        if response is not None:
            messages.append({"role": "assistant", "content": response})
        text = render(
            self.chat_template,
            messages,
            special_tokens=self.special_tokens,
            add_generation_prompt=response is None,
            **chat_template_kwargs,
        )
        return self.encode(text)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or a GGUF file.

    Raises:
        ValueError: `path` is neither, or lacks something.
    """
    path = Path(path)
    if path.is_dir():
        tokenizer = _from_directory(path)
    elif path.suffix == ".gguf" and path.is_file():
        tokenizer = _from_gguf(path)
    else:
        raise InputError(
            f"tokenizer path {str(path)!r} must be an existing directory with tokenizer.json or an existing "
            ".gguf file: correct the path or download the model first"
        )
    for name, index in (*(("eos_token_id", index) for index in tokenizer.eos_ids), ("pad_token_id", tokenizer.pad_id)):
        known = isinstance(index, int) and not isinstance(index, bool) and 0 <= index < MAX_TOKENS
        if not known or tokenizer.backend.id_to_token(index) is None:
            raise InputError(f"{path}: {name}={index!r} must be a token of the tokenizer: correct its files")
    for name in ("bos_token", "eos_token", "pad_token"):
        text = tokenizer.special_tokens.get(name)
        if text is not None and tokenizer.backend.token_to_id(text) is None:
            raise InputError(f"{path}: {name}={text!r} must be a token of the tokenizer: correct its files")
    if tokenizer.add_bos and "bos_token" not in tokenizer.special_tokens:
        raise InputError(f"{path}: add_bos_token is true, so there must be a bos_token: name it or set false")
    return tokenizer


def within_rows(tokenizer: Tokenizer, num_rows: int) -> Tokenizer:
    """The tokenizer without the added tokens beyond a model's embeddings, such as the image token of a text-only Gemma.

    Their text is then text like any other.
    """
    if tokenizer.vocab_size <= num_rows:
        return tokenizer
    description = json.loads(tokenizer.backend.to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["id"] < num_rows]
    return dataclasses.replace(tokenizer, backend=tokenizers.Tokenizer.from_str(json.dumps(description)))


def character_tokenizer() -> Tokenizer:
    """One token per character, for tiny models without files. Messages are joined by newlines."""
    alphabet = string.digits + "+-*= " + string.ascii_lowercase + "?.,:\n"
    return piece_tokenizer(alphabet, r"[\s\S]", "{{ messages | map(attribute='content') | join('\\n') }}")


def piece_tokenizer(pieces: Iterable[str], pattern: str, chat_template: str) -> Tokenizer:
    """One token for each of `pieces`.

    Args:
        pieces: may repeat.
        pattern: regular expression whose matches divide a text into pieces; a match that is none is unknown.
    """
    special_tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*special_tokens.values(), *pieces]))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(special_tokens.values()))
    return Tokenizer(
        backend=backend,
        eos_ids=(vocab["<eos>"],),
        pad_id=vocab["<pad>"],
        special_tokens=special_tokens,
        add_bos=False,
        chat_template=chat_template,
    )


def _from_directory(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{directory} has no tokenizer.json: save the model's fast tokenizer there by AutoTokenizer")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise unreadable(file, error) from error
    backend.no_truncation()
    backend.no_padding()
    settings = _read_json(directory / "tokenizer_config.json")
    special_tokens = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            special_tokens[name] = text
    eos_ids = _directory_eos_ids(directory, backend, special_tokens)
    pad_id = backend.token_to_id(special_tokens.get("pad_token", ""))
    add_bos = settings.get("add_bos_token")
    if add_bos is None:  # the post-processor of tokenizer.json decides
        first = backend.encode("").tokens[:1]
        add_bos = first != [] and first == [special_tokens.get("bos_token")]
    return Tokenizer(
        backend=backend,
        eos_ids=eos_ids,
        pad_id=eos_ids[0] if pad_id is None else pad_id,
        special_tokens=special_tokens,
        add_bos=add_bos,
        chat_template=_directory_chat_template(directory, settings.get("chat_template")),
    )


def _read_json(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _directory_eos_ids(
    directory: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
) -> tuple[int, ...]:
    """From the first file that names them: generation_config.json, config.json, tokenizer_config.json."""
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(directory / name).get("eos_token_id")
        if eos not in (None, []):
            return tuple(eos) if isinstance(eos, list) else (eos,)
    eos = backend.token_to_id(special_tokens.get("eos_token", ""))
    if eos is None:
        raise InputError(
            f"{directory} names no end-of-sequence token: give eos_token_id in generation_config.json or "
            "config.json, or eos_token in tokenizer_config.json"
        )
    return (eos,)


def _directory_chat_template(directory: Path, configured: Any) -> str | None:
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


def _from_gguf(path: Path) -> Tokenizer:
    metadata = gguf_tokenizer.read_tokenizer_metadata(path)
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids: dict[str, Any] = {name: metadata.get(f"ggml.{key}_token_id") for name, key in keys.items()}
    try:
        backend, eos_ids = gguf_tokenizer.build_tokenizer(metadata), gguf_tokenizer.eos_ids(metadata)
        special_tokens = {name: metadata["ggml.tokens"][i] for name, i in ids.items() if i is not None}
    except Exception as error:  # the library raises nothing more precise
        raise unreadable(path, error) from error
    chat_template = metadata.get("chat_template")
    if not isinstance(chat_template, str | None):
        raise InputError(f"{path}: tokenizer.chat_template={str(chat_template)[:60]!r} must be text: download it again")
    return Tokenizer(
        backend=backend,
        eos_ids=eos_ids,
        pad_id=eos_ids[0] if ids["pad_token"] is None else ids["pad_token"],
        special_tokens=special_tokens,
        add_bos=gguf_tokenizer.begins_with_bos(metadata),
        chat_template=chat_template,
    )
