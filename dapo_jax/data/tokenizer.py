"""Host: text to token ids and back, for Hugging Face directories and a toy alphabet."""

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

from dapo_jax.config.sections import DataConfig
from dapo_jax.data import tokenizer_files
from dapo_jax.data.chat_template import Conversation, render
from dapo_jax.data.tokenizer_files import without_panic
from dapo_jax.errors import InputError

MAX_TOKENS = 2**31

Prompt = Sequence[Mapping[str, Any]] | str  # chat messages, or plain text


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers.Tokenizer` and what a model's files say about its use."""

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]  # each of them ends a response
    pad_id: int  # may be one of eos_ids
    special_tokens: Mapping[str, str]  # bos_token, eos_token and the like, as chat templates name them
    add_bos: bool  # True if plain text begins with the bos token
    chat_template: str | None
    origin: str = ""  # the file that it is from; empty for those of this package
    images: frozenset[int] = frozenset()  # tokens in whose place a model would see images, which no prompt may have
    keeps_special: bool = False  # whether special tokens, other than end tokens, have a text in responses

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return 1 + max(self.backend.get_vocab().values())

    @property
    def tags_without_text(self) -> list[str]:
        """Special tokens such as <think> and </think>, which responses lose: a tag and its end."""
        special = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        special -= {*self.special_tokens.values()}
        pairs = ((tag, f"</{tag[1:]}") for tag in sorted(special) if tag.startswith("<"))
        return [] if self.keeps_special else [text for tag, end in pairs if end in special for text in (tag, end)]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Special tokens in the text are recognised; none are added.

        A lone surrogate, which JSON can write, becomes a question mark.
        """
        with without_panic(self.origin):
            return self.backend.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`. An id beyond the vocabulary, which a padded model may sample, has no text.

        Args:
            skip_special_tokens: leave out end tokens, and other special tokens unless `keeps_special`: what verifiers
                read. False gives all of the text.
        """
        if not skip_special_tokens:
            kept = list(ids)
        else:
            kept, skip_special_tokens = [index for index in ids if index not in self.eos_ids], not self.keeps_special
        with without_panic(self.origin):
            return self.backend.decode(kept, skip_special_tokens=skip_special_tokens)

    def encode_prompts(
        self,
        prompts: Sequence[Prompt],
        data: DataConfig,
        *,
        template_kwargs: Sequence[Mapping[str, Any]] | None = None,
        responses: Sequence[str] | None = None,
    ) -> list[list[int]]:
        """Token ids of chat messages, up to the start of the answer, or of plain text.

        `data.system_prompt` precedes messages without a system message; None leaves that to the template. Messages that
        end with one of the assistant are the beginning of its answer, which goes on there. Plain text gets neither
        template nor system prompt. A response ends the conversation.

        Args:
            template_kwargs: of each prompt, on top of `data.chat_template_kwargs`.
        """
        common = json.loads(data.chat_template_kwargs)
        own, said = template_kwargs or [{}] * len(prompts), responses or [None] * len(prompts)
        rows = list(zip(prompts, own, said, strict=True))
        chats = [
            self._conversation(prompt, data.system_prompt, {**common, **kwargs}, response)
            for prompt, kwargs, response in rows
            if not isinstance(prompt, str)
        ]
        texts = iter(self._render(chats))
        found = [
            self._encode_text(prompt + (response or "")) if isinstance(prompt, str) else self.encode(next(texts))
            for prompt, _, response in rows
        ]
        for tokens, (prompt, *_) in zip(found, rows, strict=True):
            if self.images and (seen := self.images.intersection(tokens)):
                raise InputError(
                    f"a prompt has {self.decode([min(seen)], skip_special_tokens=False)}, a token of images, but only "
                    f"the text part of this model is read: leave out images and prompts about them: {prompt!r:.200}"
                )
        return found

    def _conversation(
        self,
        prompt: Sequence[Mapping[str, Any]],
        system_prompt: str | None,
        kwargs: Mapping[str, Any],
        response: str | None,
    ) -> Conversation:
        messages: list[Any] = list(prompt)
        if system_prompt is not None and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": system_prompt}, *messages]
        last = messages[-1] if messages else {}
        begun = last.get("role") == "assistant" and isinstance(last.get("content"), str) and not last.get("tool_calls")
        if response is not None:
            begin = messages.pop() if begun else {"role": "assistant", "content": ""}
            messages.append({**begin, "content": begin["content"] + response})
        goes_on = response is None
        return Conversation(messages, self.special_tokens, kwargs, goes_on and not begun, goes_on and begun)

    def _render(self, conversations: Sequence[Conversation]) -> list[str]:
        if self.chat_template is None and conversations:
            raise InputError(
                "the tokenizer has no chat template, but the prompt is a list of messages: use an instruct "
                "model, give prompts as plain text, or add chat_template.jinja to the model's directory"
            )
        return render(self.chat_template or "", conversations)

    def _encode_text(self, text: str) -> list[int]:
        """Plain text after the bos token, if the model wants one and the text does not begin with it.

        A text that begins with the special token with which the chat template begins is a whole prompt as well.
        """
        ids = self.encode(text)
        if not self.add_bos:
            return ids
        bos = self.encode(self.special_tokens["bos_token"])
        begins = ids[: len(bos)] == bos or (ids[:1] and ids[0] in self._added_ids and ids[0] == self._template_start)
        return ids if begins else bos + ids

    @functools.cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @functools.cached_property
    def _template_start(self) -> int | None:
        """The first token of the chat template's prompts; None without one, or if it refuses a message of a user."""
        try:
            chat = Conversation([{"role": "user", "content": "?"}], self.special_tokens)
            return self.encode(self._render([chat])[0])[0]
        except (InputError, IndexError):
            return None


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory.

    Raises:
        ValueError: `path` is no directory, or lacks something.
    """
    path = Path(path)
    if not path.is_dir():
        raise InputError(
            f"tokenizer path {str(path)!r} must be an existing directory with tokenizer.json: correct the path or "
            "download the model first"
        )
    settings = tokenizer_files.read_settings(path)
    if settings.get("split_special_tokens"):
        raise InputError(
            f"{path}: split_special_tokens of tokenizer_config.json is not supported, since it makes special tokens "
            "of chat templates text like any other: set it to false"
        )
    backend = tokenizer_files.read_backend(path, settings)
    special_tokens = tokenizer_files.special_tokens(settings)
    eos_ids = tokenizer_files.end_ids(path, backend, special_tokens.get("eos_token"))
    pad_id = backend.token_to_id(special_tokens.get("pad_token", ""))
    pad_id = eos_ids[0] if pad_id is None else pad_id
    for name, index in (*(("eos_token_id", index) for index in eos_ids), ("pad_token_id", pad_id)):
        known = isinstance(index, int) and not isinstance(index, bool) and 0 <= index < MAX_TOKENS
        if not known or backend.id_to_token(index) is None:
            raise InputError(f"{path}: {name}={index!r} must be a token of the tokenizer: correct its files")
    origin = str(path / "tokenizer.json")
    add_bos = settings.get("add_bos_token")
    if add_bos is None:  # the post-processor of tokenizer.json decides
        with without_panic(origin):
            first = backend.encode("").tokens[:1]
        add_bos = first != [] and first == [special_tokens.get("bos_token")]
    if add_bos and "bos_token" not in special_tokens:
        raise InputError(f"{path}: add_bos_token is true, so there must be a bos_token: name it or set false")
    template = tokenizer_files.chat_template(path, settings.get("chat_template"))
    images = tokenizer_files.image_ids(path)
    return Tokenizer(backend, eos_ids, pad_id, special_tokens, add_bos, template, origin, images)


def within_rows(tokenizer: Tokenizer, num_rows: int) -> Tokenizer:
    """The tokenizer without the added tokens beyond a model's embeddings, such as the image token of a text-only Gemma.

    Their text is then text like any other.
    """
    if tokenizer.vocab_size <= num_rows:
        return tokenizer
    bos = tokenizer.backend.token_to_id(tokenizer.special_tokens.get("bos_token", ""))
    if bos is not None and bos >= num_rows:
        raise InputError(
            f"{tokenizer.origin}: bos_token={tokenizer.special_tokens['bos_token']!r} has the id {bos}, but the model "
            f"has {num_rows} embeddings: use the tokenizer that belongs to the model"
        )
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
