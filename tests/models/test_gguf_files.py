import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import shapes
from models.checkpoints import DATA, place, score
from safetensors.numpy import load_file

from dapo_jax.models.architecture import Layer
from dapo_jax.models.families import FAMILIES
from dapo_jax.models.gguf_architecture import read_gguf_architecture
from dapo_jax.models.gguf_files import TENSOR_NAMES, load_gguf
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.rope_scaling import LinearRopeScaling, YarnRopeScaling
from dapo_jax.models.safetensors_files import load_safetensors
from dapo_jax.models.weights import weight_table

gguf = pytest.importorskip("gguf")
F32, F16, BF16, Q8_0, Q4_1 = (
    getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "BF16", "Q8_0", "Q4_1")
)
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
# Rows are multiples of 32, the block of quantised types.
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_heads": 3, "head_dim": 32}
WIDE = dataclasses.replace(shapes.ARCH, **SIZES, num_kv_heads=1)


def interleave(rows, heads):
    """What llama.cpp's converter does to the query and key rows, and their biases, of a llama."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(arch, hf_tensors):
    """The tensors of a Hugging Face checkpoint under their GGUF names, in GGUF's row order, norms as factors."""
    tensors, heads = {}, {"query": arch.num_heads, "key": arch.num_kv_heads}
    for weight in weight_table(arch):
        name = weight.path[-1]
        for layer in weight.layers or range(1):
            tensor = stored(hf_tensors, weight, layer)
            if FAMILIES[arch.family].gguf_interleaved and name.removesuffix("_bias") in heads:
                tensor = interleave(tensor, heads[name.removesuffix("_bias")])
            if name.endswith("norm"):
                tensor = tensor + np.float32(arch.norm_offset)
            tensors[TENSOR_NAMES[name].format(layer=layer)] = tensor
    return tensors


def stored(hf_tensors, weight, layer):
    name = weight.hf_name.replace("{layer}", str(layer))
    if "{expert}" not in name:
        return hf_tensors[name]
    return np.stack([hf_tensors[name.replace("{expert}", str(expert))] for expert in range(weight.num_experts)])


def facts(arch):
    """What llama.cpp's converter says of an architecture besides its sizes."""
    metadata = {"attn_logit_softcapping": arch.attention_cap, "final_logit_softcapping": arch.logit_cap}
    metadata["attention.sliding_window"] = arch.window
    if arch.experts is not None:
        metadata["expert_count"] = arch.experts.number
        metadata["expert_used_count"] = arch.experts.per_token
        metadata["expert_feed_forward_length"] = arch.experts.intermediate_size
    scaling = arch.rope_scaling
    if scaling is not None:
        metadata["rope.scaling.type"] = "linear" if isinstance(scaling, LinearRopeScaling) else "yarn"
        metadata["rope.scaling.factor"] = scaling.factor
        metadata["rope.scaling.original_context_length"] = getattr(scaling, "original_max_position_embeddings", None)
    return metadata


def write(path, arch, tensors, type_of=lambda name: F32, add=lambda writer: None, **changed_metadata):
    """A GGUF file; `type_of` chooses the type of each matrix, a value None leaves a metadata entry out.

    `add` may write more, such as a tokenizer.
    """
    metadata = {
        "block_count": arch.num_layers,
        "embedding_length": arch.hidden_size,
        "feed_forward_length": arch.intermediate_size,
        "attention.head_count": arch.num_heads,
        "attention.head_count_kv": arch.num_kv_heads,
        "attention.key_length": arch.head_dim,
        "attention.layer_norm_rms_epsilon": arch.rms_norm_eps,
        "rope.freq_base": arch.rope_theta,
        "rope.dimension_count": arch.head_dim,
    }
    family = FAMILIES[arch.family].gguf_name
    writer = gguf.GGUFWriter(path, changed_metadata.pop("architecture", family))
    for name, value in (metadata | facts(arch) | changed_metadata).items():
        if value is not None:
            kind = {int: "uint32", float: "float32", str: "string", list: "array", bool: "bool"}[type(value)]
            getattr(writer, f"add_{kind}")(f"{family}.{name}", value)
    add(writer)
    for name, tensor in tensors.items():
        kind = type_of(name) if tensor.ndim > 1 else F32
        data = gguf.quants.quantize(tensor.astype(np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    return finished(writer, path)


def finished(writer, path):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def golden(name):
    arch = read_architecture(DATA / name)
    return arch, gguf_tensors(arch, load_file(DATA / name / "model.safetensors"))


def random_tensors(arch):
    normal = np.random.default_rng(0).normal
    return {
        weight.hf_name.format(layer=layer): normal(0, 0.2, weight.hf_shape).astype(np.float32)
        for weight in weight_table(arch)
        for layer in weight.layers or range(1)
    }


NAMES = ["llama_tied", "llama_biases", "qwen2_bias_tied", "qwen3_qknorm", "qwen3_yarn", "qwen3_moe", "smollm3_nope"]


@pytest.mark.parametrize("name", [*NAMES, "olmo3", "gemma2_softcap", "gemma3"])
def test_float32_file_gives_the_architecture_and_the_parameters_of_safetensors(tmp_path, name):
    """And so its logits, which test_transformer.py compares with transformers'."""
    arch, tensors = golden(name)
    pattern = {"olmo3": [True, True, True, False], "gemma3": 4}  # llama.cpp would take 4 and 6
    changed = {"attention.sliding_window_pattern": pattern[name]} if name in pattern else {}
    path = write(tmp_path / "model.gguf", arch, tensors, **changed)
    found = read_gguf_architecture(path)
    rounded = {"rms_norm_eps": pytest.approx(arch.rms_norm_eps), "initializer_range": found.initializer_range}
    assert dataclasses.asdict(found) == dataclasses.asdict(arch) | rounded
    params, exact = load_gguf(path, found, place), load_safetensors(DATA / name, arch, place)
    rounding = 1e-7 if arch.norm_offset else 0.0  # of 1 + w
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=rounding), params, exact)


@pytest.mark.parametrize(("kind", "bits"), [(F16, 11), (BF16, 8)])
def test_half_precision_files_are_rounded_only(tmp_path, kind, bits):
    arch, tensors = golden("llama_tied")
    params = load_gguf(write(tmp_path / "model.gguf", arch, tensors, lambda name: kind), arch, place)
    exact = load_safetensors(DATA / "llama_tied", arch, place)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2.0**-bits, atol=1e-7), params, exact)


@pytest.mark.parametrize(("kind", "levels", "tolerance"), [(Q8_0, 254, 0.05), (Q4_1, 15, 0.5)])
def test_quantised_files_are_within_half_a_level(tmp_path, kind, levels, tolerance):
    """Each block of 32 weights is a scale times integers (plus an offset in Q4_1); embeddings stay Q8_0."""
    tensors = gguf_tensors(WIDE, random_tensors(WIDE))
    exact_path = write(tmp_path / "exact.gguf", WIDE, tensors)
    path = write(tmp_path / "model.gguf", WIDE, tensors, lambda name: Q8_0 if "embd" in name else kind)
    params, exact = (load_gguf(file, WIDE, place) for file in (path, exact_path))
    tokens = np.random.default_rng(1).integers(0, WIDE.vocab_size, (2, 9), np.int32)
    mask = np.ones_like(tokens, bool)
    error = np.abs(np.asarray(score(params, tokens, mask, WIDE)) - score(exact, tokens, mask, WIDE))
    assert 0 < error.mean() < tolerance
    spread = 2 * max(np.abs(tensor).max() for tensor in tensors.values())
    for found, expected in zip(jax.tree.leaves(params), jax.tree.leaves(exact), strict=True):
        assert np.abs(found - expected).max() <= 0.6 * spread / levels


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
ABSENT = ("attention.head_count_kv", "attention.key_length", "rope.freq_base", "rope.dimension_count")


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama_tied", dict.fromkeys(ABSENT), {"num_kv_heads": 4, "head_dim": 12, "rope_theta": 1e4}),
        ("llama_tied", {"rope.scaling.type": "none"}, {"rope_scaling": None}),
        ("llama_tied", LINEAR, {"rope_scaling": LinearRopeScaling(8.0)}),
        ("gemma3", LINEAR, {"rope_scaling": LinearRopeScaling(8.0), "rope_theta": 1e6}),
        ("olmo3", {}, {"family": "olmo3"}),
        ("olmo3", {"attention.sliding_window": None}, {"family": "olmo2", "pattern": (Layer(),)}),
        # queries of the 27B Gemmas are scaled by the share of a head: here 48 hidden, 4 heads of 16
        ("gemma2_softcap", {"block_count": 46}, {"query_scale": (16 / 12) ** 0.5}),
        ("gemma3", {"block_count": 62}, {"query_scale": (16 / 12) ** 0.5}),
    ],
)
def test_metadata_is_read(tmp_path, name, changes, expected):
    found = read_gguf_architecture(write(tmp_path / "model.gguf", *golden(name), **changes))
    assert {key: getattr(found, key) for key in expected} == expected


REFUSED = json.loads(Path(__file__).with_name("refused_gguf_metadata.json").read_text())


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_metadata_that_is_not_supported_is_an_error(tmp_path, name, changes, message):
    arch, tensors = golden(name)
    with pytest.raises(ValueError, match=message):
        read_gguf_architecture(write(tmp_path / "model.gguf", arch, tensors, **changes))


def test_rope_scaling_spares_the_layers_with_windows(tmp_path):
    found = read_gguf_architecture(write(tmp_path / "gemma.gguf", *golden("gemma3"), **LINEAR))
    assert [kind.theta for kind in found.layers] == [1e4] * 4
    found = read_gguf_architecture(write(tmp_path / "olmo.gguf", *golden("olmo3"), **YARN))
    assert isinstance(found.rope_scaling, YarnRopeScaling) and found.rope_scaling.factor == 4.0
    assert [kind.theta for kind in found.layers] == [5e5, 5e5, 5e5, None]


def test_windows_follow_the_familys_pattern_or_the_files(tmp_path):
    def windows(name, **changes):
        path = write(tmp_path / "model.gguf", *golden(name), **changes)
        return [kind.window for kind in read_gguf_architecture(path).layers]

    assert windows("gemma3") == [16] * 4  # the sixth would have none
    assert windows("gemma3", **{"attention.sliding_window": None}) == [None] * 4
    assert windows("gemma2_softcap", **{"attention.sliding_window": None}) == [4096, None, 4096, None]
    assert windows("gemma2_softcap", **{"attention.sliding_window_pattern": 3}) == [16, 16, None, 16]
    assert windows("olmo3") == [16, 16, 16, None]
    assert windows("olmo3", **{"attention.sliding_window": 0}) == [None] * 4


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("rope_freqs.weight", np.ones(8), "tensor rope_freqs.weight: scaled rotary"),
        ("token_embd.weight", None, "tensor token_embd.weight is missing"),
        ("blk.1.ffn_up.weight", None, r"tensor blk.1.ffn_up.weight of shape \(80, 48\) is missing"),
        ("blk.1.ffn_up.weight", np.ones((48, 80)), r"ffn_up.* has shape \(48, 80\), expected \(80, 48\)"),
        ("blk.0.attn_q.weight", np.ones((62, 48)), r"attn_q.* has shape \(62, 48\), expected \(64, 48\)"),
        ("blk.0.ffn_gate_inp.weight", np.ones((8, 48)), r"ffn_gate_inp.weight of shape \(8, 48\) is unknown"),
    ],
)
def test_missing_unknown_and_misshapen_tensors_are_errors(tmp_path, name, tensor, message):
    arch, tensors = golden("llama_tied")
    tensors = {key: value for key, value in (tensors | {name: tensor}).items() if value is not None}
    path = write(tmp_path / "model.gguf", arch, tensors)
    with pytest.raises(ValueError, match=message):
        load_gguf(path, read_gguf_architecture(path), place)


def test_a_type_that_cannot_be_dequantised_is_an_error(tmp_path):
    arch, tensors = golden("llama_tied")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.astype(np.int8 if name == "blk.1.ffn_up.weight" else np.float32))
    finished(writer, path)
    with pytest.raises(ValueError, match="tensor blk.1.ffn_up.weight has type I8"):
        load_gguf(path, arch, place)


def test_a_damaged_file_or_a_git_lfs_pointer_is_an_error(tmp_path):
    arch, tensors = golden("llama_tied")
    path = write(tmp_path / "model.gguf", arch, tensors)
    content = path.read_bytes()
    for length in (0, 3, 4, 10, 24, 1000, 2000, len(content) // 2, len(content) - 100):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="model.gguf is damaged or incomplete"):
            read_gguf_architecture(path)
    path.write_bytes(content.replace(b"llama", b"\xff\xfeama", 1))
    with pytest.raises(ValueError, match="model.gguf is damaged or incomplete .'utf-8' codec"):
        read_gguf_architecture(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match="model.gguf is a Git LFS pointer"):
        load_gguf(path, arch, place)


def test_without_the_package_gguf_the_error_names_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"needs the package gguf: pip install gguf"):
        read_gguf_architecture("model.gguf")
