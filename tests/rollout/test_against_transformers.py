"""SmolLM2-135M decodes greedily as transformers does. Needs torch, transformers, accelerate and the model's file."""

import os
from pathlib import Path

import jax
import pytest
from shapes import one_device_mesh

from dapo_jax.data.tokenizer import load_tokenizer
from dapo_jax.learner.decode_weights import unstack_layers
from dapo_jax.models.load import load_params, read_model_architecture
from dapo_jax.rollout.engine_settings import EngineSettings
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.rollout.waves import WaveEngine

MODEL = Path(os.environ.get("DAPO_JAX_CACHE", "~/.cache/dapo_jax")).expanduser() / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = ["The capital of France is", "1 2 3 4 5 6", "Once upon a time, in a village,", "def fibonacci(n):", "Water"]
NEW = 40


@pytest.mark.slow
def test_greedy_decoding_of_smollm2_equals_transformers():
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    pytest.importorskip("accelerate")
    if not MODEL.exists():
        pytest.skip(f"{MODEL} is missing: scripts/quickstart.sh downloads it")
    peer = transformers.AutoModelForCausalLM.from_pretrained(MODEL.parent, gguf_file=MODEL.name, dtype=torch.float32)
    tokenizer, arch = load_tokenizer(MODEL), read_model_architecture(MODEL)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    mesh = one_device_mesh()
    settings = EngineSettings(
        arch=arch,
        mesh=mesh,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
        max_prompt_length=16,
        max_response_length=NEW,
        max_num_seqs=64,
        memory_share=1.0,
        chunk_length=8,
        smallest_rows=1,
        lookahead=0,
        seed=0,
    )
    params = unstack_layers(load_params(MODEL, arch, lambda weight, array: jax.numpy.asarray(array)), arch)
    with jax.set_mesh(mesh):
        found = WaveEngine(settings).generate(
            params, prompts, range(len(prompts)), num_samples=1, purpose=TRAIN, sampling=Sampling.create(0.0, 1.0, -1)
        )
    for prompt, tokens, mask in zip(prompts, found.responses, found.mask, strict=True):
        expected = peer.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=list(tokenizer.eos_ids),
            pad_token_id=tokenizer.pad_id,
        )[0, len(prompt) :].tolist()
        assert tokens[mask].tolist() == expected
