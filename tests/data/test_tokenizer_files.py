"""Directories that name their special tokens in other files, against what AutoTokenizer of transformers makes of them.

`python tests/data/test_tokenizer_files.py` records in tokenizer_files.json what it makes.
"""

import json
import tempfile
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from dapo_jax.data.tokenizer import load_tokenizer

RECORDED = Path(__file__).parent / "tokenizer_files.json"
TEXT = "a <s>b<|im_end|>c<think>d<pad><tool> e<mark>f"
END, START, PAD = "<|im_end|>", "<s>", "<pad>"


def flags(content, **given):
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, **given}


def decoder(*tokens, start=256):
    return {str(index): flags(special=True, **token) for index, token in enumerate(tokens, start)}


NAMED = {"bos_token": START, "eos_token": END, "pad_token": PAD}
THREE = decoder({"content": START}, {"content": END}, {"content": PAD})
# By name: what tokenizer.json adds, whether its post-processor writes bos, and other files than generation_config.json.
CASES = {
    "all in tokenizer.json": ([START, END, PAD], False, {"tokenizer_config": NAMED}),
    "added_tokens_decoder": ([], False, {"tokenizer_config": NAMED | {"added_tokens_decoder": THREE}}),
    "some in both": ([START], True, {"tokenizer_config": NAMED | {"added_tokens_decoder": THREE}}),
    "added_tokens.json": (
        [],
        False,
        {"tokenizer_config": NAMED, "added_tokens": {END: 257, START: 256, "<think>": 258}},
    ),
    "special_tokens_map.json": ([], False, {"special_tokens_map": NAMED}),
    "special_tokens_map.json with objects": (
        [START],
        False,
        {"tokenizer_config": {"eos_token": PAD}, "special_tokens_map": {"eos_token": flags(END, lstrip=True)}},
    ),
    "special_tokens_map.json with added_tokens_decoder": (
        [],
        False,
        {"tokenizer_config": NAMED | {"added_tokens_decoder": THREE}, "special_tokens_map": {"eos_token": "<tool>"}},
    ),
    "names alone": ([], False, {"tokenizer_config": NAMED}),
    "end token that is not special": (
        [AddedToken(END, special=False, normalized=False)],
        False,
        {"tokenizer_config": {"eos_token": END}},
    ),
    "end token that is not special in another file": (
        [],
        False,
        {
            "tokenizer_config": {
                "eos_token": END,
                "added_tokens_decoder": {"256": flags(END, special=False), "257": flags("<think>", special=False)},
            }
        },
    ),
    "other flags": (
        [AddedToken("<think>", special=False), AddedToken(END, special=False)],
        False,
        {
            "tokenizer_config": {
                "eos_token": END,
                "added_tokens_decoder": decoder({"content": "<think>", "rstrip": True}),
            }
        },
    ),
    "holes between ids": (
        [],
        False,
        {"tokenizer_config": {"eos_token": END, "added_tokens_decoder": {"300": flags(END), "290": flags("<tool>")}}},
    ),
    "additional_special_tokens": (
        [END],
        False,
        {"tokenizer_config": {"eos_token": END, "additional_special_tokens": ["<think>", "</think>"]}},
    ),
    "extra_special_tokens": (
        [END],
        False,
        {"tokenizer_config": {"eos_token": END, "extra_special_tokens": {"tool_token": "<tool>"}}},
    ),
    "other names": ([END], False, {"tokenizer_config": {"eos_token": END, "mark_token": "<mark>", "unk_token": None}}),
    "ordinary words as names": ([], False, {"tokenizer_config": {"eos_token": "f", "pad_token": "e"}}),
}


def write_case(path, name):
    own, writes_bos, files = CASES[name]
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True) if isinstance(token, str) else token for token in own])
    if writes_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{START} $A", special_tokens=[(START, backend.token_to_id(START))]
        )
    backend.save(str(path / "tokenizer.json"))
    for file, content in files.items():
        (path / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def by_transformers(path):
    from transformers import AutoTokenizer  # pyright: ignore[reportMissingImports]

    auto = AutoTokenizer.from_pretrained(path)
    ids = auto(TEXT, add_special_tokens=False)["input_ids"]
    return {
        "ids": ids,
        "text": auto.decode(ids, skip_special_tokens=True),
        "special": {name: auto.convert_tokens_to_ids(token) for name, token in auto.special_tokens_map.items()},
        "begin": auto("a")["input_ids"],
    }


@pytest.mark.parametrize("name", CASES)
def test_directories_have_the_tokens_of_transformers(tmp_path, name):
    expected = json.loads(RECORDED.read_text())[name]
    tokenizer = load_tokenizer(write_case(tmp_path, name))
    ids, end = tokenizer.encode(TEXT), expected["special"]["eos_token"]
    assert ids == expected["ids"] and tokenizer.eos_ids == (end,)
    assert tokenizer.decode(ids) == expected["text"].replace(tokenizer.backend.id_to_token(end), "")
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert {key: tokenizer.backend.token_to_id(text) for key, text in tokenizer.special_tokens.items()} == {
        **expected["special"]
    }
    assert tokenizer.encode_prompt("a", system_prompt=None, chat_template_kwargs={}) == expected["begin"]


def test_the_recorded_tokens_are_those_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    recorded = json.loads(RECORDED.read_text())
    for number, name in enumerate(CASES):
        (tmp_path / str(number)).mkdir()
        assert by_transformers(write_case(tmp_path / str(number), name)) == recorded[name], name


if __name__ == "__main__":
    found = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[case] = by_transformers(write_case(Path(folder), case))
    lines = ",\n".join(f"{json.dumps(case)}: {json.dumps(values)}" for case, values in found.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n")
