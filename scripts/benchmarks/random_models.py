"""Host: the random models of the benchmarks, and their matrix products. It imports no JAX: peers may have none."""

from typing import Any

import numpy as np

FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
    "model_type",
)
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(FIELDS, values, strict=True))
    for name, values in {
        "smollm2-135m": (576, 1536, 30, 9, 3, 49152, True, "llama"),
        "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151936, True, "qwen2"),
        "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151936, True, "qwen2"),
        "qwen2.5-7b": (3584, 18944, 28, 28, 4, 152064, False, "qwen2"),
        "tiny": (32, 64, 2, 4, 2, 256, True, "llama"),
        # of the accelerator report: with heads that all kernels take, and for small sizes
        "report-wide": (256, 512, 4, 4, 2, 1024, False, "qwen2"),
        "report-narrow": (64, 96, 2, 4, 2, 256, False, "qwen2"),
        "report-stand-in-0.5b": (64, 96, 2, 4, 2, 256, True, "qwen2"),
        "report-stand-in-1.5b": (96, 96, 2, 6, 2, 256, True, "qwen2"),
    }.items()
}
MOST_POSITIONS = 8192  # tokens of a prompt and its response


def config_json(shape: str) -> dict[str, Any]:
    """config.json of a random model of this shape."""
    model_type = SHAPES[shape]["model_type"]
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[model_type]
    return {
        **SHAPES[shape],
        "architectures": [architecture],
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "hidden_act": "silu",
        "max_position_embeddings": MOST_POSITIONS,
        "initializer_range": 0.02,
    }


def forward_products(params: Any, x: Any, head_rows: int) -> Any:
    """Only the matrix products of a forward pass: of x [rows, D] in all layers, of its first rows in the head.

    Args:
        params: decoding weights, layers in a list.
    """
    import jax.numpy as jnp

    from dapo_jax.models.attention import matmul

    for layer in params["layers"]:
        query = matmul("bd,dnh->bnh", x, layer["query"])
        key, value = matmul("bd,dkh->bkh", x, layer["key"]), matmul("bd,dkh->bkh", x, layer["value"])
        x = matmul("bnh,nhd->bd", query, layer["output"]) + jnp.mean(key) + jnp.mean(value)
        x = matmul(
            "bf,fd->bd", matmul("bd,df->bf", x, layer["gate"]) + matmul("bd,df->bf", x, layer["up"]), layer["down"]
        )
    head = params["head"] if "head" in params else params["embedding"]
    return jnp.max(matmul("bd,vd->bv", x[:head_rows], head), axis=-1) + jnp.mean(x)


def tunix_llama(shape: dict[str, Any], dtype: str) -> Any:
    """Tunix' Llama of this shape with random weights."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from tunix.models.llama3 import model as llama  # pyright: ignore[reportMissingImports]

    model = llama.Llama3(
        llama.ModelConfig(
            num_layers=shape["num_hidden_layers"],
            vocab_size=shape["vocab_size"],
            embed_dim=shape["hidden_size"],
            hidden_dim=shape["intermediate_size"],
            num_heads=shape["num_attention_heads"],
            head_dim=shape["hidden_size"] // shape["num_attention_heads"],
            num_kv_heads=shape["num_key_value_heads"],
            rope_theta=100000,
            norm_eps=1e-5,
            weight_tying=True,
        ),
        rngs=nnx.Rngs(0),
    )
    rng = np.random.default_rng(0)  # its own initial feed-forward layers are zero
    nnx.update(
        model,
        jax.tree.map(
            lambda x: jnp.asarray(rng.normal(0, 0.02, x.shape), dtype) if x.ndim >= 2 else x, nnx.state(model)
        ),
    )
    return model


class Integers:
    """A tokenizer whose text is the token ids, for Tunix."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self) -> int:
        return 0  # none is added

    def eos_id(self) -> int:
        return 1

    def pad_id(self) -> int:
        return 0
