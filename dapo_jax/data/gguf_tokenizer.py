"""Host: the byte-level BPE tokenizer inside a GGUF file."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from dapo_jax.errors import InputError
from dapo_jax.models.gguf_files import read_metadata

CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4  # values of tokenizer.ggml.token_type

# How models cut text into words before BPE: their original patterns; "default" is that of llama.cpp.
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
WORD_PATTERNS = {  # tokenizer.ggml.pre: patterns applied one after the other
    "smollm": (r"\p{N}", GPT2_WORDS),
    "gpt-2": (GPT2_WORDS,),
    "default": (PUNCTUATION, GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "llama-bpe": (LLAMA3_WORDS,),
    "llama3": (LLAMA3_WORDS,),
    "qwen2": (QWEN2_WORDS,),
}
LLAMA3 = ("llama-bpe", "llama3")  # take a word that is a token whole before trying merges, and begin with BOS


def read_tokenizer_metadata(path: Path) -> dict[str, Any]:
    """The entries below "tokenizer." of a GGUF file, as plain Python values.

    Raises:
        ImportError: without the optional package gguf.
        ValueError: the file cannot be read, or holds no byte-level BPE tokenizer with a known pre-tokenizer.
    """
    metadata = read_metadata(path, "tokenizer.")
    for name, known in {"ggml.model": ["gpt2"], "ggml.pre": list(WORD_PATTERNS)}.items():
        if metadata.get(name) not in known:
            raise InputError(
                f"{path}: tokenizer.{name}={metadata.get(name)!r} must be one of {', '.join(known)}: "
                "use the model's Hugging Face directory instead"
            )
    missing = {"ggml.tokens", "ggml.merges", "ggml.token_type", "ggml.eos_token_id"} - set(metadata)
    if missing:
        raise InputError(
            f"{path} lacks tokenizer.{', tokenizer.'.join(sorted(missing))}: "
            "use a complete GGUF file or the model's Hugging Face directory"
        )
    return metadata


def byte_level_bpe(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that `read_tokenizer_metadata` describes."""
    tokens, pre = metadata["ggml.tokens"], metadata["ggml.pre"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in metadata["ggml.merges"])]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in LLAMA3))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in WORD_PATTERNS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == CONTROL_TOKEN)
            for token, kind in zip(tokens, metadata["ggml.token_type"], strict=True)
            if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN)
        ]
    )
    return tokenizer
