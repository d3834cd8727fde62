"""A sequence-classification directory with random weights and a character tokenizer, as Hugging Face saves it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dapo_jax.data.tokenizer import character_tokenizer
from dapo_jax.models.hf_architecture import architecture_from_hf
from dapo_jax.models.weights import weight_table

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if mark is defined %}{{ mark }}{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_reward_model(directory: Path, **changes: Any) -> Path:
    """`changes` are to config.json; the weights depend on the sizes alone."""
    tokenizer = character_tokenizer()
    hf = {
        "model_type": "llama",
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "vocab_size": -(-tokenizer.vocab_size // 8) * 8,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        **changes,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf))
    settings = {"eos_token": "<eos>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    rng, tensors = np.random.default_rng(0), {}
    for weight in weight_table(architecture_from_hf({**hf, "id2label": {"0": "LABEL_0"}})):
        for layer in range(hf["num_hidden_layers"]) if weight.stacked else [0]:
            values = rng.normal(weight.initializer == "ones", 0.2, weight.hf_shape)
            tensors[weight.hf_name.format(layer=layer)] = values.astype(np.float32)
    save_file(tensors, directory / "model.safetensors")
    return directory
