"""Host: what sets the supported families of models apart; a family that needs no more is one entry of FAMILIES."""

from dataclasses import dataclass

LANGUAGE_MODEL, REWARD_MODEL = "ForCausalLM", "ForSequenceClassification"  # how Hugging Face's names end


@dataclass(frozen=True)
class Family:
    """Names of a family, and how its layers differ from Llama's."""

    hf_name: str  # how the names of its Hugging Face architectures begin
    gguf_name: str | None = None  # general.architecture of its GGUF files; None: it has none of its own
    gguf_interleaved: bool = False  # llama.cpp's converter interleaves the halves of each head's query and key rows
    qkv_bias: bool = False  # biases of the query, key and value projections
    qk_norm: bool = False  # a norm of each head's queries and keys
    window_by_default: bool = False  # `sliding_window` counts unless the config says otherwise


FAMILIES: dict[str, Family] = {  # by Hugging Face's model_type
    "llama": Family("Llama", "llama", gguf_interleaved=True),
    "mistral": Family("Mistral", window_by_default=True),  # stored as llama in GGUF files
    "qwen2": Family("Qwen2", "qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3", "qwen3", qk_norm=True),
}
