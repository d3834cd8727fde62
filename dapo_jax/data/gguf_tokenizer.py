"""Host: the tokenizer inside a GGUF file: byte-level BPE, or SentencePiece's BPE with bytes for unknown characters."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from dapo_jax.errors import InputError
from dapo_jax.models.gguf_files import read_metadata

UNKNOWN_TOKEN, CONTROL_TOKEN, USER_DEFINED_TOKEN, BYTE_TOKEN = 2, 3, 4, 6  # values of tokenizer.ggml.token_type
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space

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
    "smaug-bpe": (LLAMA3_WORDS,),  # SmolLM3
    "dbrx": (LLAMA3_WORDS,),  # OLMo 2
    "olmo": (GPT2_WORDS,),
    "qwen2": (QWEN2_WORDS,),
}
LLAMA3 = ("llama-bpe", "llama3")  # take a word that is a token whole before trying merges, and begin with BOS


TURN_ENDS = ("<end_of_turn>", "<|eot_id|>", "<|im_end|>")


def read_tokenizer_metadata(path: Path) -> dict[str, Any]:
    """The entries below "tokenizer." of a GGUF file, as plain Python values.

    Raises:
        ImportError: without the optional package gguf.
        ValueError: the file cannot be read, or holds no BPE tokenizer whose words are known.
    """
    metadata = read_metadata(path, "tokenizer.")
    known = {"ggml.model": ["gpt2", "llama"]}  # byte-level and SentencePiece
    known |= {} if is_sentencepiece(metadata) else {"ggml.pre": list(WORD_PATTERNS)}
    for name, values in known.items():
        if metadata.get(name) not in values:
            raise InputError(
                f"{path}: tokenizer.{name}={metadata.get(name)!r} must be one of {', '.join(values)}: "
                "use the model's Hugging Face directory instead"
            )
    ranks = "ggml.scores" if is_sentencepiece(metadata) else "ggml.merges"
    missing = {"ggml.tokens", ranks, "ggml.token_type", "ggml.eos_token_id"} - set(metadata)
    if missing:
        raise InputError(
            f"{path} lacks tokenizer.{', tokenizer.'.join(sorted(missing))}: "
            "use a complete GGUF file or the model's Hugging Face directory"
        )
    return metadata


def is_sentencepiece(metadata: dict[str, Any]) -> bool:
    """True for a BPE tokenizer of SentencePiece, False for a byte-level one."""
    return metadata.get("ggml.model") == "llama"


def begins_with_bos(metadata: dict[str, Any]) -> bool:
    """Whether plain text begins with the bos token: what the file says, or the habit of its kind."""
    return metadata.get("ggml.add_bos_token", is_sentencepiece(metadata) or metadata.get("ggml.pre") in LLAMA3)


def eos_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a response: end of sequence, and end of turn if the file or its chat template names one."""
    tokens, turn = metadata["ggml.tokens"], metadata.get("ggml.eot_token_id")
    if turn is None:
        template = str(metadata.get("chat_template") or "")
        turn = next((tokens.index(text) for text in TURN_ENDS if text in template and text in tokens), None)
    return tuple(dict.fromkeys(index for index in (metadata["ggml.eos_token_id"], turn) if index is not None))


def build_tokenizer(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that `read_tokenizer_metadata` describes."""
    tokenizer = _sentencepiece_bpe(metadata) if is_sentencepiece(metadata) else _byte_level_bpe(metadata)
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == CONTROL_TOKEN)
            for token, kind in zip(metadata["ggml.tokens"], metadata["ggml.token_type"], strict=True)
            if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN)
        ]
    )
    return tokenizer


def _sentencepiece_bpe(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece joins the two neighbours whose union has the best score, so the merges follow from the scores."""
    tokens, kinds = metadata["ggml.tokens"], metadata["ggml.token_type"]
    scores = dict(zip(tokens, metadata["ggml.scores"], strict=True))
    vocab = {token: index for index, token in enumerate(tokens)}
    no_text = (UNKNOWN_TOKEN, CONTROL_TOKEN, BYTE_TOKEN)
    pieces = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in no_text}
    merges = []
    for piece in sorted(pieces, key=lambda piece: (-scores[piece], vocab[piece])):
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        merges += [(left, right) for left, right in halves if left in pieces and right in pieces]
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN_TOKEN), None)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown))
    prefixed = metadata.get("ggml.add_space_prefix", True)
    begin = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    return tokenizer


def _byte_level_bpe(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
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
    return tokenizer
