import dataclasses
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dapo_jax.models.architecture import Architecture, Layer
from dapo_jax.models.families import FAMILIES
from dapo_jax.models.gguf_architecture import read_gguf_architecture
from dapo_jax.models.gguf_files import TENSOR_NAMES, load_gguf
from dapo_jax.models.hf_architecture import read_architecture
from dapo_jax.models.rope_scaling import LinearRopeScaling, YarnRopeScaling
from dapo_jax.models.safetensors_files import load_safetensors
from dapo_jax.models.transformer import forward, logits, positions_of
from dapo_jax.models.weights import weight_table

gguf = pytest.importorskip("gguf")
F32, F16, BF16, Q8_0, Q4_1 = (
    getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "BF16", "Q8_0", "Q4_1")
)
DATA = Path(__file__).parent / "data"
LLAMA = DATA / "llama_tied"
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
WIDE = Architecture(  # rows are multiples of 32, the block of quantised types
    family="llama",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=3,
    num_kv_heads=1,
    head_dim=32,
    rope_theta=5000.0,
    rms_norm_eps=0.125,
    tie_embeddings=False,
)


def place(weight, array):
    return jnp.asarray(array)


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


def write(path, arch, tensors, type_of=lambda name: F32, **changed_metadata):
    """A GGUF file; `type_of` chooses the type of each matrix, a value None leaves a metadata entry out."""
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
    for name, tensor in tensors.items():
        kind = type_of(name) if tensor.ndim > 1 else F32
        data = gguf.quants.quantize(tensor.astype(np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def golden(name):
    arch = read_architecture(DATA / name)
    return arch, gguf_tensors(arch, load_file(DATA / name / "model.safetensors"))


def random_tensors(arch):
    random = np.random.default_rng(0)
    shapes = {
        weight.hf_name.format(layer=layer): weight.hf_shape
        for weight in weight_table(arch)
        for layer in range(arch.num_layers if weight.stacked else 1)
    }
    return {name: random.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


@functools.partial(jax.jit, static_argnums=3)
def score(params, tokens, mask, arch):
    return logits(params, forward(params, tokens, positions_of(mask), mask, arch), arch)


@pytest.mark.parametrize(
    "name",
    [
        *("llama_tied", "llama_biases", "qwen2_bias_tied", "qwen3_qknorm", "qwen3_yarn", "qwen3_moe"),
        *("smollm3_nope", "olmo3", "gemma2_softcap", "gemma3"),
    ],
)
def test_float32_file_gives_the_parameters_and_logits_of_transformers(tmp_path, name):
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
    reference = np.load(DATA / name / "reference.npz")
    mask = reference["attention_mask"].astype(bool)
    scores = score(params, reference["input_ids"], mask, found)
    np.testing.assert_allclose(scores[mask], reference["logits"][mask], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "bits"), [(F16, 11), (BF16, 8)])
def test_half_precision_files_are_rounded_only(tmp_path, kind, bits):
    arch, tensors = golden("llama_tied")
    params = load_gguf(write(tmp_path / "model.gguf", arch, tensors, lambda name: kind), arch, place)
    exact = load_safetensors(LLAMA, arch, place)
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
    error = np.abs(score(params, tokens, mask, WIDE) - score(exact, tokens, mask, WIDE))
    assert 0 < error.mean() < tolerance
    spread = 2 * max(np.abs(tensor).max() for tensor in tensors.values())
    for found, expected in zip(jax.tree.leaves(params), jax.tree.leaves(exact), strict=True):
        assert np.abs(found - expected).max() <= 0.6 * spread / levels


def test_untied_embeddings_are_seen_by_the_output_tensor(tmp_path):
    tensors = gguf_tensors(WIDE, random_tensors(WIDE))
    assert not read_gguf_architecture(write(tmp_path / "untied.gguf", WIDE, tensors)).tie_embeddings
    del tensors["output.weight"]
    assert read_gguf_architecture(write(tmp_path / "tied.gguf", WIDE, tensors)).tie_embeddings


def test_absent_metadata_takes_the_defaults_of_the_format(tmp_path):
    arch, tensors = golden("llama_tied")
    absent = ("attention.head_count_kv", "attention.key_length", "rope.freq_base", "rope.dimension_count")
    found = read_gguf_architecture(write(tmp_path / "model.gguf", arch, tensors, **dict.fromkeys(absent)))
    assert (found.num_kv_heads, found.head_dim, found.rope_theta) == (4, 12, 1e4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, "general.architecture='gemma' must be one of"),
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type': 'longrope'.*not supported"),
        ({"rope.scaling.type": "linear"}, "no factor for its linear rope scaling"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "no original_max_position_embeddings"),
        (YARN | {"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor=0.5: not supported"),
        (YARN | {"rope.scaling.yarn_log_multiplier": 0.1}, "yarn_log_multiplier=.*: not supported"),
        (YARN | {"rope.scaling.attn_factor": 2.0}, "attn_factor=2.0: must be absent or 1.13863"),
        (YARN | {"rope.scaling.yarn_beta_fast": -1.0}, "beta_fast=-1.0 of its rope scaling: must be a positive"),
        ({"rope.freq_base_swa": 5.0}, "rope.freq_base_swa=5.0: must be rope.freq_base=10000.0"),
        ({"expert_count": 8}, "expert_count=8: no experts"),
        ({"attention.causal": False}, "attention.causal=False: must be True"),
        ({"logit_scale": 0.5}, "logit_scale=0.5: must be absent"),
        ({"attention.value_length": 8}, "attention.value_length=8: must be 16"),
        ({"block_count": 10001}, "block_count=10001: must be at most 10000"),
        ({"rope.scaling.factor": 4.0}, "rope.scaling.factor': 4.0.*not supported"),
        ({"rope.dimension_count": 8}, "rope.dimension_count=8: must be 16"),
        ({"attention.sliding_window": 64}, "attention.sliding_window=64"),
        ({"attention.head_count_kv": [2, 2, 1]}, r"attention.head_count_kv=\[2, 2, 1\]: must be one value"),
        ({"block_count": None, "embedding_length": None}, "block_count is missing; embedding_length is"),
    ],
)
def test_metadata_that_is_not_supported_is_an_error(tmp_path, changes, message):
    arch, tensors = golden("llama_tied")
    with pytest.raises(ValueError, match=message):
        read_gguf_architecture(write(tmp_path / "model.gguf", arch, tensors, **changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_moe", {"expert_gating_func": 2}, "expert_gating_func=2: must be 1"),
        ("qwen3_moe", {"expert_weights_norm": False}, "expert_weights_norm=False: must be True"),
        ("qwen3_moe", {"expert_shared_count": 1}, "expert_shared_count=1: must be 0"),
        ("qwen3_moe", {"expert_used_count": None}, "expert_used_count is missing"),
        ("qwen3_moe", {"expert_used_count": 7}, "num_experts_per_tok=7 must be at most num_experts=6"),
        ("gemma3", {"attention.sliding_window_pattern": [True, False]}, "must be true or false for each of 4 layers"),
        ("gemma3", {"attention.sliding_window_pattern": 0}, "sliding_window_pattern=0: must be a positive integer"),
        ("gemma3", {"attention.sliding_window": 1.5}, "sliding_window=1.5: must be an integer from 0"),
        ("gemma2_softcap", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping=-1.0: must be a positive number"),
    ],
)
def test_metadata_that_a_family_does_not_support_is_an_error(tmp_path, name, changes, message):
    arch, tensors = golden(name)
    with pytest.raises(ValueError, match=message):
        read_gguf_architecture(write(tmp_path / "model.gguf", arch, tensors, **changes))


def test_linear_scaling_is_read_and_spares_the_layers_with_windows(tmp_path):
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    found = read_gguf_architecture(write(tmp_path / "model.gguf", *golden("llama_tied"), **linear))
    assert found.rope_scaling == LinearRopeScaling(8.0)
    found = read_gguf_architecture(write(tmp_path / "gemma.gguf", *golden("gemma3"), **linear))
    assert found.rope_scaling == LinearRopeScaling(8.0) and found.rope_theta == 1e6
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


def test_olmo_without_a_window_is_olmo2(tmp_path):
    found = read_gguf_architecture(write(tmp_path / "a.gguf", *golden("olmo3"), **{"attention.sliding_window": None}))
    assert found.family == "olmo2" and found.pattern == (Layer(),)
    assert read_gguf_architecture(write(tmp_path / "b.gguf", *golden("olmo3"))).family == "olmo3"


@pytest.mark.parametrize(("name", "layers"), [("gemma2_softcap", 46), ("gemma3", 62)])
def test_queries_of_the_27b_gemmas_are_scaled_by_the_share_of_a_head(tmp_path, name, layers):
    found = read_gguf_architecture(write(tmp_path / "model.gguf", *golden(name), block_count=layers))
    assert found.query_scale == (16 / 12) ** 0.5  # 48 hidden, 4 heads of 16


def test_scaling_type_none_is_accepted(tmp_path):
    arch, tensors = golden("llama_tied")
    path = write(tmp_path / "model.gguf", arch, tensors, **{"rope.scaling.type": "none"})
    assert read_gguf_architecture(path).rope_scaling is None


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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
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
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match="model.gguf is a Git LFS pointer"):
        load_gguf(path, arch, place)


def test_without_the_package_gguf_the_error_names_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"needs the package gguf: pip install gguf"):
        read_gguf_architecture("model.gguf")


def test_text_that_is_no_utf8_and_sizes_that_are_none_are_errors(tmp_path):
    whole = write(tmp_path / "whole.gguf", *golden("llama_tied"))
    (tmp_path / "bytes.gguf").write_bytes(whole.read_bytes().replace(b"llama", b"\xff\xfeama", 1))
    with pytest.raises(ValueError, match="bytes.gguf is damaged or incomplete .'utf-8' codec"):
        read_gguf_architecture(tmp_path / "bytes.gguf")
    for value in (0, 2**31, 1.5, "two"):
        path = write(tmp_path / f"{value}.gguf", *golden("llama_tied"), block_count=value)
        with pytest.raises(ValueError, match="block_count=.*: must be a positive integer"):
            read_gguf_architecture(path)
    path = write(tmp_path / "heads.gguf", *golden("llama_tied"), **{"attention.head_count_kv": 3})
    with pytest.raises(ValueError, match="heads.gguf: num_attention_heads=4 must be a multiple of num_key_value"):
        read_gguf_architecture(path)
