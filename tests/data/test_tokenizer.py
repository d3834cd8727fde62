import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from dapo_jax.config.sections import DataConfig
from dapo_jax.data.tokenizer import character_tokenizer, load_tokenizer, within_rows

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}<end>{% endfor %}"
    "{% if think is defined %}{{ think }}{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = ({"role": "user", "content": "hi"},)
TEXTS = ["12 + 7 =\n", "  two  spaces", "Ünïcödé 数学 🙂 \u200d", "", "tab\tand\r\nlines"]


def write_directory(path, *, adds_bos=False, **files):
    """A Hugging Face directory with a byte-level tokenizer of 256 bytes and four special tokens."""
    vocab = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<start>", "<end>", "<stop>", "<pad>"])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 256)])
    backend.enable_truncation(3)
    backend.enable_padding(length=3)
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


SETTINGS = {
    "bos_token": {"content": "<start>", "lstrip": False},
    "eos_token": "<end>",
    "pad_token": "<pad>",
    "unk_token": None,
    "add_bos_token": True,
    "chat_template": TEMPLATE,
}


@pytest.fixture
def directory(tmp_path):
    return write_directory(tmp_path, generation_config={"eos_token_id": [257, 258]}, tokenizer_config=SETTINGS)


@pytest.fixture
def tokenizer(directory):
    return load_tokenizer(str(directory))


def encode(tokenizer, prompt, system_prompt=None, response=None, **chat_template_kwargs):
    data = DataConfig(system_prompt=system_prompt, chat_template_kwargs=json.dumps(chat_template_kwargs))
    return tokenizer.encode_prompts([prompt], data, responses=None if response is None else [response])[0]


def text_of(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_a_directory_gives_its_special_tokens(tokenizer):
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.vocab_size) == ((257, 258), 259, 260)
    assert tokenizer.special_tokens == {"bos_token": "<start>", "eos_token": "<end>", "pad_token": "<pad>"}
    assert tokenizer.add_bos and tokenizer.chat_template == TEMPLATE


def test_text_survives_encoding_whatever_its_length(tokenizer):
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(text)) == len(text.encode())


def test_encoding_adds_no_special_token_but_knows_those_in_the_text(tmp_path):
    tokenizer = load_tokenizer(write_directory(tmp_path, config={"eos_token_id": 257}, adds_bos=True))
    ids = tokenizer.encode("a<end>b")
    assert ids[1] == 257 and len(ids) == 3
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(np.array(ids, np.int32), skip_special_tokens=False) == "a<end>b"


def test_a_tokenizer_that_reads_special_tokens_as_text_is_refused(tmp_path):
    write_directory(tmp_path, tokenizer_config=SETTINGS | {"split_special_tokens": True})
    with pytest.raises(ValueError, match="split_special_tokens of tokenizer_config.json is not supported"):
        load_tokenizer(tmp_path)
    write_directory(tmp_path, tokenizer_config=SETTINGS | {"split_special_tokens": False})
    assert load_tokenizer(tmp_path).encode("<end>") == [257]


def test_messages_go_through_the_template_up_to_the_answer(tokenizer):
    ids = encode(tokenizer, USER)
    assert ids[0] == 256 and ids.count(256) == 1 and ids.count(257) == 1
    assert text_of(tokenizer, ids) == "<start>[user]hi<end>[assistant]"
    assert text_of(tokenizer, encode(tokenizer, USER, think="no")) == "<start>[user]hi<end>no[assistant]"


def test_system_prompt_is_put_before_messages_that_have_none(tokenizer):
    own = ({"role": "system", "content": "own"}, *USER)
    assert text_of(tokenizer, encode(tokenizer, USER, "ours")).startswith("<start>[system]ours<end>[user]")
    assert encode(tokenizer, own, "ours") == encode(tokenizer, own)
    assert "[system]<end>" in text_of(tokenizer, encode(tokenizer, USER, ""))


def test_a_response_ends_the_conversation_and_no_answer_is_begun(tokenizer):
    ids = encode(tokenizer, USER, "ours", response="yo", think="no")
    assert text_of(tokenizer, ids) == "<start>[system]ours<end>[user]hi<end>[assistant]yo<end>no"
    assert text_of(tokenizer, encode(tokenizer, USER, response="")) == "<start>[user]hi<end>[assistant]<end>"
    assert USER == ({"role": "user", "content": "hi"},)
    plain = [256, *tokenizer.encode("hi")]  # text gets the bos token, no template, and a response at once
    assert encode(tokenizer, "hi", "ours") == encode(tokenizer, "hi", response="") == plain
    assert encode(tokenizer, "hi", "ours", response=" yo") == [256, *tokenizer.encode("hi yo")]


def test_text_that_begins_with_the_bos_token_or_as_the_template_does_gets_no_other(directory):
    tokenizer = load_tokenizer(directory)
    assert encode(tokenizer, "<start>hi") == encode(tokenizer, "hi") == [256, *tokenizer.encode("hi")]
    assert encode(tokenizer, "<stop>hi") == [256, 258, *tokenizer.encode("hi")]
    (directory / "chat_template.jinja").write_text("<stop>{{ messages[0].content }}")
    tokenizer = load_tokenizer(directory)
    assert encode(tokenizer, "<stop>hi") == encode(tokenizer, USER) and encode(tokenizer, "<stop>hi")[0] == 258
    assert encode(tokenizer, "<end>hi")[:2] == [256, 257]


def test_messages_that_end_with_the_assistants_are_the_beginning_of_its_answer(tokenizer):
    begun = (*USER, {"role": "assistant", "content": "It "})
    whole = (*USER, {"role": "assistant", "content": "It is."})
    assert text_of(tokenizer, encode(tokenizer, begun)) == "<start>[user]hi<end>[assistant]It "
    assert encode(tokenizer, begun, response="is.") == encode(tokenizer, USER, response="It is.")
    calls = (*USER, {**whole[1], "tool_calls": [{"name": "f"}]})  # what follows a call is another turn
    assert text_of(tokenizer, encode(tokenizer, calls)).endswith("[assistant]It is.<end>[assistant]")


def test_responses_have_no_end_token_and_other_special_tokens_if_they_are_kept(tmp_path):
    added = {"258": {"content": "<stop>", "special": False}, "260": {"content": "<tag>", "special": True}}
    added |= {"261": {"content": "</tag>", "special": True}, "262": {"content": "<plain>", "special": False}}
    settings = {"eos_token": "<stop>", "bos_token": "<start>", "added_tokens_decoder": added}
    tokenizer = load_tokenizer(write_directory(tmp_path, config={"eos_token_id": 0}, tokenizer_config=settings))
    ids = [*tokenizer.encode("<tag>a</tag><plain><stop>"), 0]
    assert tokenizer.eos_ids == (0, 258) and tokenizer.decode(ids) == "a<plain>"
    assert tokenizer.tags_without_text == ["<tag>", "</tag>"]
    kept = dataclasses.replace(tokenizer, keeps_special=True)
    assert kept.decode(ids) == "<tag>a</tag><plain>" and kept.tags_without_text == []


LOOPS = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
NO_TOKEN = {"special_tokens": {}, "pair": [], "single": [{"SpecialToken": {"id": "<q>", "type_id": 0}}]}


@pytest.mark.parametrize(
    "part", [{"pre_tokenizer": LOOPS}, {"post_processor": {"type": "TemplateProcessing", **NO_TOKEN}}]
)
def test_a_panic_of_the_library_is_an_error_that_names_the_file(part, directory):
    file = directory / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | part))
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer.json makes the tokenizers library panic \(.*download it again"):
        load_tokenizer(directory).encode("x" * 60)


def test_ids_that_files_give_a_token_otherwise_are_warned_of(tmp_path, caplog):
    path = write_directory(tmp_path, tokenizer_config={"eos_token": "<end>"}, added_tokens={"<new>": 300})
    assert load_tokenizer(path).encode("<new>") == [260]
    assert "'<new>' 300, now 260" in caplog.text
    (tmp_path / "added_tokens.json").write_text('{"<new>": "x"}')
    with pytest.raises(ValueError, match="added_tokens.json texts to ids"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "add_bos_token, adds_bos, expected",
    [(None, False, False), (None, True, True), (False, True, False), (True, False, True)],
)
def test_bos_is_the_post_processors_choice_unless_configured(tmp_path, add_bos_token, adds_bos, expected):
    settings = {"bos_token": "<start>", "add_bos_token": add_bos_token}
    path = write_directory(tmp_path, config={"eos_token_id": 257}, tokenizer_config=settings, adds_bos=adds_bos)
    assert load_tokenizer(path).add_bos is expected


def test_a_template_file_wins_over_one_in_json_and_that_over_the_configured_one(directory):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "first"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": named}))
    assert load_tokenizer(directory).chat_template == "first"
    for given, used in ("json", "json"), (named[::-1], "first"):
        (directory / "chat_template.json").write_text(json.dumps({"chat_template": given}))
        assert load_tokenizer(directory).chat_template == used
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": 7}))
    with pytest.raises(ValueError, match="chat_template.json: chat_template='7' must be text"):
        load_tokenizer(directory)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")
    tokenizer = load_tokenizer(directory)
    assert text_of(tokenizer, encode(tokenizer, USER)) == "hi!"


@pytest.mark.parametrize(
    "files, eos_ids",
    [
        ({"generation_config": {"eos_token_id": [258, 257]}, "config": {"eos_token_id": 256}}, (258, 257, 256)),
        ({"generation_config": {"eos_token_id": 0}, "config": {"text_config": {"eos_token_id": 256}}}, (0, 256)),
        ({"config": {"eos_token_id": 257}, "tokenizer_config": {"eos_token": "<stop>"}}, (257, 258)),
        ({"generation_config": {"temperature": 1}, "config": {"eos_token_id": [257]}}, (257,)),
        ({"config": {}, "tokenizer_config": {"eos_token": "<stop>"}}, (258,)),
        ({"generation_config": {"eos_token_id": []}, "config": {"eos_token_id": 257}}, (257,)),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": {"content": "<end>"}}}, (257,)),
    ],
)
def test_eos_ids_are_those_of_all_files_and_pad_falls_back_to_the_first(tmp_path, files, eos_ids):
    tokenizer = load_tokenizer(write_directory(tmp_path, **files))
    assert tokenizer.eos_ids == eos_ids and tokenizer.pad_id == eos_ids[0]


def test_a_bos_token_that_is_not_named_is_refused(tmp_path):  # what else may be missing: bad_input.yaml
    files = {"config": {"eos_token_id": 257}, "tokenizer_config": {"add_bos_token": True}}
    with pytest.raises(ValueError, match="there must be a bos_token"):
        load_tokenizer(write_directory(tmp_path, **files))
    with pytest.raises(ValueError, match="absent' must be an existing directory"):
        load_tokenizer(tmp_path / "absent")


@pytest.fixture
def gemma(tmp_path):
    """A directory like that of a Gemma: spaces as ▁, bytes for unknown characters, an image token beyond the table."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdeor\nu", "▁a", "ab"]
    vocab, merges = {token: index for index, token in enumerate(tokens)}, [("▁", "a"), ("a", "b")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([*special, "<image_soft_token>"])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "image_token": "<image_soft_token>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    (tmp_path / "chat_template.jinja").write_text(GEMMA_TEMPLATE, encoding="utf-8")
    return tmp_path


GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def test_a_gemma_has_two_end_tokens_one_bos_token_and_bytes_for_unknown_characters(gemma):
    tokenizer = load_tokenizer(gemma)
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.add_bos) == ((1, 5), 0, True)
    ids = encode(tokenizer, ({"role": "user", "content": " ab  "},))
    assert text_of(tokenizer, ids) == "<bos><start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n"
    assert ids.count(2) == 1 and ids.count(4) == 2 and encode(tokenizer, "ab") == [2, *tokenizer.encode("ab")]
    told = encode(tokenizer, ({"role": "user", "content": "a"},), response="b")
    assert text_of(tokenizer, told).endswith("<start_of_turn>model\nb<end_of_turn>\n")
    for text in [*TEXTS, " a b  ab", "é", "\x00"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    euro = tokenizer.encode("€")
    assert len(euro) == 3 and "€" not in tokenizer.decode(euro[:2])


def test_added_tokens_beyond_the_embeddings_are_text_like_any_other(gemma):
    tokenizer = load_tokenizer(gemma)
    num_rows = tokenizer.vocab_size - 1
    assert tokenizer.encode("<image_soft_token>") == [num_rows]
    within = within_rows(tokenizer, num_rows)
    moved = dataclasses.replace(tokenizer, special_tokens={"bos_token": "<image_soft_token>"})
    with pytest.raises(ValueError, match=f"bos_token='<image_soft_token>' has the id {num_rows}, but the model has"):
        within_rows(moved, num_rows)
    assert within.vocab_size == num_rows and max(within.encode("<image_soft_token>")) < num_rows
    assert within.decode(within.encode("<image_soft_token>a<end_of_turn>b")) == "<image_soft_token>ab"
    assert within.encode(" ab<end_of_turn>é") == tokenizer.encode(" ab<end_of_turn>é")
    assert within_rows(tokenizer, num_rows + 1) is tokenizer
    assert within_rows(tokenizer, num_rows - 1).vocab_size == num_rows  # of the model's own tokens none is left out


def test_the_character_tokenizer_has_one_token_for_each_character_and_joins_messages_by_newlines():
    tokenizer = character_tokenizer()
    text = "what is 12 + 3*4 - 5 = ?\n\nabc, xyz. ok:"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and len(set(ids)) == len(set(text))
    assert tokenizer.decode(ids) == text
    assert max(ids) < tokenizer.vocab_size and tokenizer.pad_id not in tokenizer.eos_ids
    assert tokenizer.encode("a<eos>") == [*tokenizer.encode("a"), *tokenizer.eos_ids]
    assert text_of(tokenizer, tokenizer.encode("aÉb")) == "a<unk>b"
    assert encode(tokenizer, USER, "add.") == tokenizer.encode("add.\nhi")
    assert encode(tokenizer, USER, response="5") == tokenizer.encode("hi\n5")
