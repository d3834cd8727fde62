"""A GGUF file like that of SmolLM2-135M-Instruct, with a small model."""

import dataclasses

import numpy as np
import shapes
from tokenizers import pre_tokenizers

from dapo_jax.hub.smollm2 import TENSORS
from dapo_jax.models.weights import weight_table

# Rows are multiples of 32, the block of quantised types; the float32 nearest to 1e-5 is what the file can hold.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "Ġu", "Ġus", "<|unknown|>", "<|start|>", "<|end|>", "<x>"]
ID = {token: index for index, token in enumerate(TOKENS)}
ARCH = dataclasses.replace(
    shapes.ARCH,
    **SIZES,
    vocab_size=len(TOKENS),
    rms_norm_eps=float(np.float32(1e-5)),
    rope_theta=1e5,
    tie_embeddings=True,
    initializer_range=0.02,
)
TEMPLATE = "{% for message in messages %}<|start|>{{ message.content }}<|end|>{% endfor %}{{ eos_token }}"


def write(path):
    """Writes the file; returns the tensors of the Hugging Face directory that it must become."""
    import gguf

    writer, rng, expected = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0), {}
    for key, value in {
        "block_count": ARCH.num_layers,
        "context_length": 777,
        "embedding_length": ARCH.hidden_size,
        "feed_forward_length": ARCH.intermediate_size,
        "attention.head_count": ARCH.num_heads,
        "attention.head_count_kv": ARCH.num_kv_heads,
        "rope.dimension_count": ARCH.head_dim,
        "vocab_size": ARCH.vocab_size,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", ARCH.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", ARCH.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in TOKENS])
    writer.add_token_merges(["1 2", "Ġ u", "Ġu s"])
    writer.add_bos_token_id(ID["<|start|>"])
    writer.add_eos_token_id(ID["<|end|>"])
    writer.add_unk_token_id(ID["<|unknown|>"])
    writer.add_pad_token_id(ID["<|end|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = {theirs: ours for ours, theirs in TENSORS.items()}
    heads = {"attn_q": ARCH.num_heads, "attn_k": ARCH.num_kv_heads}
    for weight in weight_table(ARCH):
        for layer in weight.layers or [None]:
            tensor = rng.normal(0, 0.2, weight.hf_shape).astype(np.float32)
            full = weight.hf_name.replace("{layer}", str(layer))
            name = names[full.removesuffix(".weight").removeprefix(f"model.layers.{layer}.")]
            kinds = gguf.GGMLQuantizationType
            kind = kinds.F32 if tensor.ndim == 1 else kinds.Q8_0 if layer is None else kinds.Q4_1
            stored = gguf.quants.quantize(tensor, kind)
            expected[full] = gguf.quants.dequantize(stored, kind)
            if name in heads:  # llama.cpp's converter interleaves the halves of each head's rows
                halves = tensor.reshape(heads[name], 2, -1, tensor.shape[-1])
                stored = gguf.quants.quantize(halves.swapaxes(1, 2).reshape(tensor.shape), kind)
            writer.add_tensor(f"{'' if layer is None else f'blk.{layer}.'}{name}.weight", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
