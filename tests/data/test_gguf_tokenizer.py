import builtins

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


def write_gguf(path, *, model="gpt2", pre="smollm", leave_out=(), **optional):
    writer = gguf.GGUFWriter(path, "llama")
    types = [1] * (len(BYTES) + len(WORDS)) + [CONTROL] * 3 + [USER_DEFINED]
    entries = {
        "model": lambda: writer.add_tokenizer_model(model),
        "pre": lambda: writer.add_tokenizer_pre(pre),
        "tokens": lambda: writer.add_token_list(TOKENS),
        "types": lambda: writer.add_token_types(types),
        "merges": lambda: writer.add_token_merges(MERGES),
        "eos": lambda: writer.add_eos_token_id(ID["<|end|>"]),
    }
    for name, add in entries.items():
        if name not in leave_out:
            add()
    return written(writer, path, optional)


def written(writer, path, optional):
    """The file with these entries besides."""
    for name, value in optional.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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


def write_sentencepiece(path, **optional):
    """What llama.cpp's converter writes for Gemma."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(PIECES))
    writer.add_token_scores(list(PIECES.values()))
    writer.add_token_types([CONTROL] * 3 + [2] + [CONTROL] * 2 + [USER_DEFINED] + [6] * 256 + [1] * (len(PIECES) - 263))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    return written(writer, path, optional)


@pytest.mark.parametrize("prefixed", [False, True])
def test_sentencepiece_joins_by_score_and_spells_the_rest_in_bytes(tmp_path, prefixed):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path / "a.gguf", add_space_prefix=prefixed))
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


def test_the_end_of_a_turn_ends_a_response_if_the_template_has_it(tmp_path):
    template = "{{ '<start_of_turn>user\n' + messages[0].content + '<end_of_turn>\n' }}"
    assert load_tokenizer(write_sentencepiece(tmp_path / "a.gguf", chat_template=template)).eos_ids == (1, 5)
    assert load_tokenizer(write_sentencepiece(tmp_path / "b.gguf")).eos_ids == (1,)


def words(tokenizer, text):
    return tokenizer.backend.encode(text, add_special_tokens=False).tokens


def test_metadata_become_the_tokenizers_settings(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}"
    path = write_gguf(
        tmp_path / "a.gguf",
        bos_token_id=ID["<|start|>"],
        eot_token_id=ID["<|eot|>"],
        pad_token_id=ID["<|eot|>"],
        add_bos_token=True,
        chat_template=template,
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_ids == (ID["<|end|>"], ID["<|eot|>"])
    assert tokenizer.pad_id == ID["<|eot|>"] and tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.chat_template == template and tokenizer.add_bos
    expected = [ID["<|start|>"], ID["a"]]
    for prompt in ("a", ({"role": "user", "content": "a"},)):
        assert tokenizer.encode_prompt(prompt, system_prompt=None, chat_template_kwargs={}) == expected


def test_without_optional_metadata_pad_is_eos_and_nothing_is_added(tmp_path):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", eot_token_id=ID["<|end|>"]))
    assert tokenizer.eos_ids == (ID["<|end|>"],) and tokenizer.pad_id == ID["<|end|>"]
    assert not tokenizer.add_bos and tokenizer.chat_template is None


def test_control_tokens_are_special_and_user_defined_tokens_are_text(tmp_path):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf"))
    ids = tokenizer.encode("a<|end|><think>b")
    assert ids == [ID["a"], ID["<|end|>"], ID["<think>"], ID["b"]]
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|><think>b"


@pytest.mark.parametrize(
    "pre", ["smollm", "gpt-2", "default", "llama-bpe", "llama3", "qwen2", "smaug-bpe", "dbrx", "olmo"]
)
def test_any_text_survives_encoding(tmp_path, pre):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", pre=pre, bos_token_id=ID["<|start|>"]))
    for text in ["12 + 7 = us\n\n", "Ünïcödé 数学 🙂 \u200d\x00", " \t mixed\r\nspaces  ", "don't I'LL"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "pre, expected",
    [
        ("smollm", ["1", "2", "Ġus"]),  # every digit alone
        ("gpt-2", ["12", "Ġus"]),
        ("llama-bpe", ["12", "Ġus"]),
        ("qwen2", ["1", "2", "Ġus"]),
        ("smaug-bpe", ["12", "Ġus"]),
        ("dbrx", ["12", "Ġus"]),
    ],
)
def test_pre_tokenizers_cut_digits_as_their_models_do(tmp_path, pre, expected):
    path = write_gguf(tmp_path / "a.gguf", pre=pre, bos_token_id=ID["<|start|>"])
    assert words(load_tokenizer(path), "12 us") == expected


def test_llama3_takes_whole_words_that_are_tokens_and_begins_with_bos(tmp_path):
    llama = load_tokenizer(write_gguf(tmp_path / "a.gguf", pre="llama3", bos_token_id=ID["<|start|>"]))
    assert words(llama, "whole") == ["whole"] and llama.add_bos
    other = load_tokenizer(write_gguf(tmp_path / "b.gguf", pre="gpt-2"))
    assert words(other, "whole") == list("whole")


def test_qwen2_composes_accents(tmp_path):
    tokenizer = load_tokenizer(write_gguf(tmp_path / "a.gguf", pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "bert"}, "tokenizer.ggml.model='bert' must be one of gpt2, llama: use"),
        ({"model": "llama"}, "lacks tokenizer.ggml.scores: use"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre='tekken' must be one of smollm, gpt-2"),
        ({"leave_out": ["pre"]}, "tokenizer.ggml.pre=None must be one of"),
        ({"leave_out": ["merges", "eos"]}, "lacks tokenizer.ggml.eos_token_id, tokenizer.ggml.merges: use"),
        ({"add_bos_token": True}, "there must be a bos_token"),
    ],
)
def test_a_file_without_a_known_complete_tokenizer_is_an_error(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(write_gguf(tmp_path / "a.gguf", **changes))


def test_a_missing_gguf_package_is_named_with_the_cure(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf")
    real_import = builtins.__import__

    def without_gguf(name, *args, **kwargs):
        if name == "gguf":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(ImportError, match=r"needs the package gguf: pip install gguf"):
        load_tokenizer(path)
