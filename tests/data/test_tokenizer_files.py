"""Directories that name their special tokens in other files, against what AutoTokenizer of transformers makes of them.

tokenizer_files.json has the cases: what tokenizer.json adds, whether its post-processor writes the bos token, the other
files, and what transformers makes of them, which `python tests/data/test_tokenizer_files.py` records.
"""

import json
import tempfile
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from dapo_jax.config.sections import DataConfig
from dapo_jax.data.tokenizer import load_tokenizer

FILE = Path(__file__).parent / "tokenizer_files.json"
CASES = json.loads(FILE.read_text())
TEXT = "a <s>b<|im_end|>c<think>d<pad><tool> e<mark>f"
START = "<s>"


def write_case(path, case):
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own = [{"content": token, "special": True} if isinstance(token, str) else token for token in case["own"]]
    backend.add_tokens([AddedToken(**token) for token in own])
    if case["writes_bos"]:
        bos = [(START, backend.token_to_id(START))]
        backend.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=bos)
    backend.save(str(path / "tokenizer.json"))
    for file, content in case["files"].items():
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
    expected = CASES[name]["transformers"]
    tokenizer = load_tokenizer(write_case(tmp_path, CASES[name]))
    ids, end = tokenizer.encode(TEXT), expected["special"]["eos_token"]
    assert ids == expected["ids"] and tokenizer.eos_ids == (end,)
    assert tokenizer.decode(ids) == expected["text"].replace(tokenizer.backend.id_to_token(end), "")
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    found = {name: tokenizer.backend.token_to_id(text) for name, text in tokenizer.special_tokens.items()}
    assert found == expected["special"]
    assert tokenizer.encode_prompts(["a"], DataConfig())[0] == expected["begin"]


def test_the_recorded_tokens_are_those_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    for number, (name, case) in enumerate(CASES.items()):
        (tmp_path / str(number)).mkdir()
        assert by_transformers(write_case(tmp_path / str(number), case)) == case["transformers"], name


if __name__ == "__main__":
    for case in CASES.values():
        with tempfile.TemporaryDirectory() as folder:
            case["transformers"] = by_transformers(write_case(Path(folder), case))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in CASES.items())
    FILE.write_text(f"{{\n{lines}\n}}\n")
