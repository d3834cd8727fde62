"""Writes what is missing of tests/models/data, with transformers: `python tests/models/write_references.py`.

Needs torch and transformers. In float32 on a CPU: greedy continuations of left-padded prompts with the log-probability
of each token, and the gradient of the mean negative log-probability of a sequence, as its dot products with fixed
random directions (gradients of all tensors would be as large as the checkpoints).
"""

from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
NESTED = DATA.with_name("nested") / "qwen3_5"
LENGTHS, NEW, SEQUENCES = (40, 3, 21), 40, (2, 48)  # tokens of the prompts, new tokens, shape of what is differentiated
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS += ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
DIRECTIONS, RANK, SCALE = 4, 3, 2.0


def prompts(vocab_size: int) -> list[list[int]]:
    """Prompts of LENGTHS tokens, none of them special."""
    rng = np.random.default_rng(7)
    return [rng.integers(3, vocab_size, length).tolist() for length in LENGTHS]


def sequences(vocab_size: int) -> np.ndarray:
    """What is differentiated, [2, 48] int32."""
    return np.random.default_rng(8).integers(3, vocab_size, SEQUENCES, np.int32)


def projected(name: str, gradient: np.ndarray) -> np.ndarray:
    """Dot products [DIRECTIONS] of a tensor's gradient with directions of length 1 that follow from its name."""
    rng = np.random.default_rng(list(name.encode()))
    directions = rng.normal(size=(DIRECTIONS, gradient.size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return directions @ np.asarray(gradient, np.float64).reshape(-1)


def adapter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The values of an adapter's tensor, float32: A is [RANK, inputs], B [outputs, RANK]."""
    return np.random.default_rng(list(name.encode())).normal(size=shape).astype(np.float32) * 0.1


def write(directory: Path) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    vocab_size = model.config.vocab_size
    found = {**_greedy(torch, model, prompts(vocab_size)), **_gradients(torch, model, sequences(vocab_size))}
    if recurs(model):
        found |= _exact(torch, transformers, directory, found)
    np.savez_compressed(directory / "transformers.npz", **found)
    print(directory.name, found["responses"][:, :6].tolist())


def recurs(model: Any) -> bool:
    """Whether some layers have linear attention."""
    return "linear_attention" in (getattr(model.config, "layer_types", None) or ())


def _greedy(torch: Any, model: Any, given: list[list[int]]) -> dict[str, np.ndarray]:
    if recurs(model) and len(given) > 1:  # there transformers' padding changes what comes after it
        rows = [_greedy(torch, model, [prompt]) for prompt in given]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    width = max(map(len, given))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in given])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in given])
    # neither an end of sequence nor padding: all rows are as long
    model.generation_config.eos_token_id = None
    drawn = model.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    whole = torch.cat([mask, torch.ones_like(drawn[:, width:])], dim=1)
    with torch.no_grad():
        positions = (whole.cumsum(-1) - 1).clamp(min=0)
        scores = model(drawn, attention_mask=whole, position_ids=positions).logits[:, width - 1 : -1]
    logprobs = torch.log_softmax(scores, -1).gather(-1, drawn[:, width:, None])[..., 0]
    return {"responses": drawn[:, width:].numpy().astype(np.int32), "logprobs": logprobs.numpy()}


def _exact(torch: Any, transformers: Any, directory: Path, found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """In float64, as recurrent models are less exact in float32 than others.

    The logits of reference.npz, each row alone, all gradients, and how far those in float32 are from them. transformers
    casts parts of a model to float32; meanwhile that means float64.
    """
    to, single = torch.Tensor.to, torch.Tensor.float

    def widened(self: Any, *given: Any, **named: Any) -> Any:
        given = tuple(torch.float64 if one is torch.float32 else one for one in given)
        return to(self, *given, **{name: torch.float64 if one is torch.float32 else one for name, one in named.items()})

    reference = np.load(directory / "reference.npz")
    exact = np.zeros(reference["logits"].shape)
    torch.Tensor.to, torch.Tensor.float = widened, torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        options = {"dtype": torch.float64, "experts_implementation": "eager"}
        kind = transformers.AutoModelForCausalLM if found else transformers.AutoModelForImageTextToText
        model = kind.from_pretrained(directory, **options).eval()
        for row, tokens, mask in zip(exact, reference["input_ids"], reference["attention_mask"] > 0, strict=True):
            with torch.no_grad():
                row[mask] = model(torch.tensor(tokens[mask][None], dtype=torch.long)).logits[0].numpy()
        gradients = _gradients(torch, model, sequences(model.config.vocab_size)) if found else {}
    finally:
        torch.Tensor.to, torch.Tensor.float = to, single
        torch.set_default_dtype(torch.float32)
    apart = {
        kind: [np.abs(found[name] - gradients[name]).max() for name in gradients if name.startswith(kind)]
        for kind in ("weight ", "lora ")
    }
    errors = {f"error of {kind}": np.array(max(numbers)) for kind, numbers in apart.items() if numbers}
    return {"exact": exact.astype(np.float32), **gradients, **errors}


def _gradients(torch: Any, model: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Projected gradients of all tensors ("weight NAME"), and of adapters on all matrices of TARGETS ("lora NAME")."""
    ids = torch.tensor(tokens, dtype=torch.long)

    def loss(weights: dict[str, Any]) -> Any:
        scores = torch.func.functional_call(model, weights, (ids,)).logits[:, :-1]
        return torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), ids[:, 1:].reshape(-1))

    weights = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    found = _stored_names(dict(zip(weights, torch.autograd.grad(loss(weights), list(weights.values())), strict=True)))
    result = {f"weight {name}": projected(name, gradient.numpy()) for name, gradient in found.items()}
    stems = [
        name.removesuffix(".weight") for name in weights if name.endswith(tuple(f"{one}.weight" for one in TARGETS))
    ]
    adapters: dict[str, Any] = {}
    changed = {name: weight.detach() for name, weight in weights.items()}
    for stem in stems:
        outputs, inputs = changed[f"{stem}.weight"].shape
        shapes = {f"{stem}.lora_A.weight": (RANK, inputs), f"{stem}.lora_B.weight": (outputs, RANK)}
        a, b = (
            torch.tensor(adapter(name, shape)).to(torch.get_default_dtype()).requires_grad_()
            for name, shape in shapes.items()
        )
        adapters |= dict(zip(shapes, (a, b), strict=True))
        changed[f"{stem}.weight"] = changed[f"{stem}.weight"] + SCALE * b @ a
    gradients = torch.autograd.grad(loss(changed), list(adapters.values()))
    for name, gradient in zip(adapters, gradients, strict=True):
        result[f"lora {name}"] = projected(name, gradient.numpy())
    return result


def _stored_names(gradients: dict[str, Any]) -> dict[str, Any]:
    """Gradients by the names of the checkpoint, in which each expert has tensors of its own, but for gpt-oss."""
    found = {}
    for name, gradient in gradients.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts") or f"{stem}.gate_up_proj_bias" in gradients:
            found[name] = gradient
            continue
        for expert, part in enumerate(gradient):
            if last == "down_proj":
                found[f"{stem}.{expert}.down_proj.weight"] = part
            else:
                gate, up = part.chunk(2, dim=0)
                found[f"{stem}.{expert}.gate_proj.weight"] = gate
                found[f"{stem}.{expert}.up_proj.weight"] = up
    return found


SIZES = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": False}
MADE = {  # checkpoints that this script makes: the class of their config, and what it says besides
    "olmo2": ("Olmo2Config", {}),
    "qwen3_moe_mixed": ("Qwen3MoeConfig", {**EXPERTS, "mlp_only_layers": [0, 1, 2]}),
    "qwen2_window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
}


def make(name: str) -> None:
    """A random checkpoint with the logits [3, 72, V] of left-padded rows, as the others have them."""
    import torch
    import transformers

    kind, more = MADE[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SIZES, **more))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(DATA / name)
    model = transformers.AutoModelForCausalLM.from_pretrained(DATA / name, dtype=torch.float32).eval()
    tokens = torch.randint(3, SIZES["vocab_size"], (3, 72))
    mask = torch.arange(72) >= torch.tensor([[0], [9], [40]])
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        scores = model(tokens, attention_mask=mask.long(), position_ids=positions).logits
    arrays = {"input_ids": tokens.to(torch.int32), "attention_mask": mask.to(torch.int32), "logits": scores}
    np.savez_compressed(DATA / name / "reference.npz", **{key: value.numpy() for key, value in arrays.items()})


def write_mxfp4(path: Path) -> None:
    """Random blocks and scales, and the tensor [E, K, N] of numbers that they stand for."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks, scales = rng.integers(0, 256, (2, 3, 2, 16), np.uint8), rng.integers(120, 134, (2, 3, 2), np.uint8)
    numbers = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    np.savez_compressed(path, blocks=blocks, scales=scales, numbers=numbers)


def write_nested(directory: Path) -> None:
    """The exact logits of a model that also takes images."""
    import torch
    import transformers

    np.savez_compressed(directory / "transformers.npz", **_exact(torch, transformers, directory, {}))


if __name__ == "__main__":
    if not (mxfp4 := DATA.parent / "mxfp4.npz").exists():
        write_mxfp4(mxfp4)
    for path in sorted({*DATA.iterdir(), *(DATA / name for name in MADE)}):
        if not path.exists():
            make(path.name)
        if not (path / "transformers.npz").exists():
            write(path)
    if not (NESTED / "transformers.npz").exists():
        write_nested(NESTED)
