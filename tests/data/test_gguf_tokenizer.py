import sys

import pytest
from tokenizers import pre_tokenizers

from dapo_jax.data.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["12", "Ġu", "Ġus", "whole"]  # "whole" has no merges
MERGES = ["1 2", "Ġ u", "Ġu s"]
SPECIAL = ["<|start|>", "<|end|>", "<|eot|>", "<think>"]
TOKENS = BYTES + WORDS + SPECIAL
CONTROL, USER_DEFINED = 3, 4
ID = {token: index for index, token in enumerate(TOKENS)}


def written(writer, path, entries):
    """The file with these entries."""
    for name, value in entries.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def load(tmp_path):
    """Loads the tokenizer of a GGUF file with these entries changed; None leaves one out."""

    def load_changed(**changes):
        entries = {
            "tokenizer_model": "gpt2",
            "tokenizer_pre": "smollm",
            "token_list": TOKENS,
            "token_types": [1] * (len(BYTES) + len(WORDS)) + [CONTROL] * 3 + [USER_DEFINED],
            "token_merges": MERGES,
            "eos_token_id": ID["<|end|>"],
            **changes,
        }
        given = {name: value for name, value in entries.items() if value is not None}
        return load_tokenizer(written(gguf.GGUFWriter(tmp_path / "a.gguf", "llama"), tmp_path / "a.gguf", given))

    return load_changed


PIECES = {  # of SentencePiece, with their scores; "hel" has a better one than "lo"
    "<pad>": 0.0,
    "<eos>": 0.0,
    "<bos>": 0.0,
    "<unk>": 0.0,
    "<start_of_turn>": 0.0,
    "<end_of_turn>": 0.0,
    "  ": 0.0,  # user-defined
    **{f"<0x{byte:02X}>": 0.0 for byte in range(256)},
    "he": -1.0,
    "hel": -2.0,
    "lo": -3.0,
    "▁hel": -4.0,
    "el": -5.0,
    **{letter: -10.0 for letter in "▁ehlo\n1"},
}


@pytest.fixture
def load_sentencepiece(tmp_path):
    """The same for what llama.cpp's converter writes for Gemma."""
    entries = {
        "tokenizer_model": "llama",
        "token_list": list(PIECES),
        "token_scores": list(PIECES.values()),
        "token_types": [CONTROL] * 3 + [2] + [CONTROL] * 2 + [USER_DEFINED] + [6] * 256 + [1] * (len(PIECES) - 263),
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unk_token_id": 3,
    }
    path = tmp_path / "a.gguf"
    return lambda **more: load_tokenizer(written(gguf.GGUFWriter(path, "gemma3"), path, entries | more))


def words(tokenizer, text):
    return tokenizer.backend.encode(text, add_special_tokens=False).tokens


@pytest.mark.parametrize("prefixed", [False, True])
def test_sentencepiece_joins_by_score_and_spells_the_rest_in_bytes(load_sentencepiece, prefixed):
    tokenizer = load_sentencepiece(add_space_prefix=prefixed)
    assert tokenizer.add_bos and tokenizer.vocab_size == len(PIECES)
    assert words(tokenizer, "hello") == (["▁hel", "lo"] if prefixed else ["hel", "lo"])
    assert words(tokenizer, "elo")[-2:] == ["e", "lo"]
    assert words(tokenizer, "1 hello")[-3:] == ["1", "▁hel", "lo"]
    assert words(tokenizer, "1é")[-3:] == ["1", "<0xC3>", "<0xA9>"]
    assert words(tokenizer, "1  1")[1 + prefixed] == "  "
    double = [] if prefixed else ["hello 1  hello\n", "spaces  "]  # SentencePiece puts a space after such a token too
    for text in ["hello 1 hello\n", "Ünïcödé 数学 🙂 \u200d\x00", " \t mixed\r\nspaces ", "", *double]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode_prompt("1", system_prompt=None, chat_template_kwargs={})
    assert ids == [2, *tokenizer.encode("1")]


def test_the_end_of_a_turn_ends_a_response_if_the_template_has_it(load_sentencepiece):
    template = "{{ '<start_of_turn>user\n' + messages[0].content + '<end_of_turn>\n' }}"
    assert load_sentencepiece(chat_template=template).eos_ids == (1, 5)
    assert load_sentencepiece().eos_ids == (1,)


def test_metadata_become_the_tokenizers_settings(load):
    template = "{{ bos_token }}{{ messages[0].content }}"
    tokenizer = load(
        bos_token_id=ID["<|start|>"],
        eot_token_id=ID["<|eot|>"],
        pad_token_id=ID["<|eot|>"],
        add_bos_token=True,
        chat_template=template,
    )
    assert tokenizer.eos_ids == (ID["<|end|>"], ID["<|eot|>"])
    assert tokenizer.pad_id == ID["<|eot|>"] and tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.chat_template == template and tokenizer.add_bos
    expected = [ID["<|start|>"], ID["a"]]
    for prompt in ("a", ({"role": "user", "content": "a"},)):
        assert tokenizer.encode_prompt(prompt, system_prompt=None, chat_template_kwargs={}) == expected


def test_without_optional_metadata_pad_is_eos_and_nothing_is_added(load):
    tokenizer = load(eot_token_id=ID["<|end|>"])
    assert tokenizer.eos_ids == (ID["<|end|>"],) and tokenizer.pad_id == ID["<|end|>"]
    assert not tokenizer.add_bos and tokenizer.chat_template is None


def test_control_tokens_are_special_and_user_defined_tokens_are_text(load):
    tokenizer = load()
    ids = tokenizer.encode("a<|end|><think>b")
    assert ids == [ID["a"], ID["<|end|>"], ID["<think>"], ID["b"]]
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|><think>b"


SINGLE, JOINED = ["1", "2", "Ġus"], ["12", "Ġus"]  # every digit alone, or not


@pytest.mark.parametrize(
    "pre, expected",
    [
        *[("smollm", SINGLE), ("gpt-2", JOINED), ("llama-bpe", JOINED), ("qwen2", SINGLE), ("smaug-bpe", JOINED)],
        *[("dbrx", JOINED), ("default", None), ("llama3", None), ("olmo", None)],
    ],
)
def test_any_text_survives_and_digits_are_cut_as_the_models_do(load, pre, expected):
    tokenizer = load(tokenizer_pre=pre, bos_token_id=ID["<|start|>"])
    for text in ["12 + 7 = us\n\n", "Ünïcödé 数学 🙂 \u200d\x00", " \t mixed\r\nspaces  ", "don't I'LL"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert expected in (None, words(tokenizer, "12 us"))


def test_llama3_takes_whole_words_that_are_tokens_and_begins_with_bos(load):
    llama = load(tokenizer_pre="llama3", bos_token_id=ID["<|start|>"])
    assert words(llama, "whole") == ["whole"] and llama.add_bos
    assert words(load(tokenizer_pre="gpt-2"), "whole") == list("whole")


def test_qwen2_composes_accents(load):
    tokenizer = load(tokenizer_pre="qwen2")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokenizer_model": "bert"}, "tokenizer.ggml.model='bert' must be one of gpt2, llama: use"),
        ({"tokenizer_model": "llama"}, "lacks tokenizer.ggml.scores: use"),
        ({"tokenizer_pre": "tekken"}, "tokenizer.ggml.pre='tekken' must be one of smollm, gpt-2"),
        ({"tokenizer_pre": None}, "tokenizer.ggml.pre=None must be one of"),
        (
            {"token_merges": None, "eos_token_id": None},
            "lacks tokenizer.ggml.eos_token_id, tokenizer.ggml.merges: use",
        ),
        ({"add_bos_token": True}, "there must be a bos_token"),
    ],
)
def test_a_file_without_a_known_complete_tokenizer_is_an_error(load, changes, message):
    with pytest.raises(ValueError, match=message):
        load(**changes)


def test_a_missing_gguf_package_is_named_with_the_cure(load, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"needs the package gguf: pip install gguf"):
        load()
