"""Host: what bfloat16 on a GPU costs in accuracy, emulated on a CPU, for each family of models.

    python scripts/benchmarks/bfloat16_numerics.py [--model DIR] [--families llama,qwen2] [--deviation 0.02]

A policy samples in bfloat16; k3 compares its log-probabilities with those of the training pass. The gradient of DAPO's
loss over responses of a policy in float32 is that of an update: matrices cast once, attention's results kept. Its error
is the norm of the difference to the gradient in float32, over the norm of that. Two ways to write the products of a
layer: float32, as on CPUs and TPUs, and bfloat16, as on GPUs. XLA keeps every rounding
(--xla_allow_excess_precision=false), which a CPU otherwise drops in one program and keeps in another, and adds up in
float32, as a GPU does: a CPU's small products that are written in bfloat16 add up in it. Not emulated: the GPU's
kernels, whose sums have other orders.

Families have small random models with layers of each kind. --model adds the first eight layers of a Llama on the disk.
"""

import os

if __name__ == "__main__":  # before JAX starts; the imports below take seconds
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_allow_excess_precision=false"
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from accelerator_numerics import k3
from accelerator_variants import layers_write

from dapo_jax.config.sections import ActorConfig
from dapo_jax.data.containers import Batch
from dapo_jax.learner.actor import ActorSettings, build_actor
from dapo_jax.learner.micro_batches import MicroBatches
from dapo_jax.learner.rows import rows_of
from dapo_jax.learner.trainable import Passes
from dapo_jax.learner.update import compute_statistics
from dapo_jax.models import attention
from dapo_jax.models.architecture import Architecture
from dapo_jax.models.attention import XLA
from dapo_jax.models.families import FAMILIES
from dapo_jax.models.hf_architecture import architecture_from_hf, read_architecture
from dapo_jax.models.load import load_params
from dapo_jax.models.weights import unflatten, weight_table
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.rollout.engine import Engine
from dapo_jax.rollout.layout import EngineSettings
from dapo_jax.rollout.responses import Request
from dapo_jax.rollout.sampling import TRAIN, Sampling
from dapo_jax.run.sampler import groups_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from markdown_table import markdown_table
from script_ends import command

PROMPTS, PROMPT, SAMPLES, LENGTH = 32, 24, 4, 64  # sizes of a batch
FIRST, DEVIATION = 8, 0.06  # layers of a model on the disk; the standard deviation of random weights
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
DELTA = {
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "shared_expert_intermediate_size": 64,
}
EXPERTS = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}


def random_model(name: str, deviation: float = DEVIATION) -> tuple[Architecture, Any]:
    """A small model of a family with random weights; every kind of its layers."""
    family = FAMILIES[name]
    config = {**SMALL, "architectures": [family.architecture_name(False)], "model_type": name}
    config |= {"num_hidden_layers": max(family.full_every, 4 if family.leaves_out_rotary or family.delta else 2)}
    config |= {"sliding_window": 32 if family.window in ("all", "typed") else None}
    config |= DELTA if family.delta else {}
    arch = architecture_from_hf(config | ({} if family.experts is None else EXPERTS))
    rng = np.random.default_rng(11)
    drawn = {weight: rng.normal(0, deviation, weight.shape) for weight in weight_table(arch)}
    norms = {weight: np.ones(weight.shape) for weight in drawn if weight.initializer == "ones"}
    return arch, unflatten((weight, leaf.astype(np.float32)) for weight, leaf in (drawn | norms).items())


def first_layers(directory: str) -> tuple[Architecture, Any]:
    """The first layers of a model on the disk."""
    whole = read_architecture(directory)
    params = load_params(directory, whole, lambda weight, array: jnp.asarray(array))
    of_layers = {name: leaf[:FIRST] for name, leaf in params["layers"].items()}
    return dataclasses.replace(whole, num_layers=FIRST), {**params, "layers": of_layers}


@contextlib.contextmanager
def rounded_products() -> Iterator[None]:
    """Products that are written in bfloat16 are added up in float32 before."""
    product = attention._product

    def rounded(subscripts: str, x: jax.Array, y: jax.Array, narrow: bool = False) -> jax.Array:
        return product(subscripts, x, y).astype(x.dtype if narrow else jnp.float32)

    with mock.patch.object(attention, "_product", rounded):
        yield


class Policy:
    """A policy whose matrix products have operands of `dtype`, on one device."""

    def __init__(self, arch: Architecture, params: Any, dtype: str) -> None:
        self.arch, self.mesh = arch, make_mesh(1, 1, 1)
        passes = Passes(arch=arch, dtype=jnp.dtype(dtype), remat="attention", attention=XLA)
        self.actor = build_actor(ActorSettings(passes, ActorConfig(), temperature=1.0), self.mesh)
        self.params = jax.device_put(params, self.actor.trainable.shardings)
        self.micro_batches = MicroBatches(num_shards=1, rows_per_device=PROMPTS * SAMPLES, choices=arch.choices)

    def sample(self) -> Batch:
        """Responses to random prompts, with advantages of 1 and -1."""
        rng = np.random.default_rng(5)
        prompts = rng.integers(10, self.arch.vocab_size, (PROMPTS, PROMPT)).tolist()
        settings = EngineSettings(
            arch=self.arch,
            mesh=self.mesh,
            eos_ids=(0,),
            pad_id=0,
            max_prompt_length=PROMPT,
            max_response_length=LENGTH,
            max_num_seqs=0,
            memory_share=1.0,
            chunk_length=LENGTH,
            lookahead=0,
            seed=0,
            choices=self.arch.choices,
        )
        engine, numbers = Engine(settings, None), range(PROMPTS)
        weights = self.actor.decode_weights(self.params)
        rollout = engine.generate(prompts, numbers, Request(weights, SAMPLES, TRAIN, Sampling.create(1.0, 1.0, -1)))
        engine.close()
        texts = [""] * len(rollout.mask)
        batch = rows_of(groups_of(rollout, prompts, numbers, numbers, texts, 0), num_groups=PROMPTS, pad_id=0)
        signs = np.where(np.arange(len(texts)) % 2, 1.0, -1.0)[:, None].astype(np.float32)
        shares = batch.loss_mask / np.float32(batch.loss_mask.sum())
        return dataclasses.replace(batch, advantages=signs * batch.mask, loss_weights=shares)

    def logprobs(self, batch: Batch) -> np.ndarray:
        """[B, R] of the training pass."""
        return compute_statistics(self.actor, self.params, batch, self.micro_batches, self.mesh).logprobs

    def gradient(self, batch: Batch) -> np.ndarray:
        """Of an update of the mini-batch, all weights in one array."""
        trainable = self.actor.trainable
        (piece,) = self.micro_batches.split(batch)
        zeros, operands = trainable.zero_gradients(self.params), trainable.operands(self.params)
        gradients, _ = trainable.accumulate(operands, zeros, piece.micro_batch)
        return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(gradients)])


def compare(arch: Architecture, params: Any) -> dict[str, float]:
    """k3 on each policy's own responses and the gradient's error on those in float32, by how layers write products."""
    found = {}
    reference = Policy(arch, params, "float32")
    with jax.set_mesh(reference.mesh):
        batch = reference.sample()
        exact = reference.gradient(batch)
    for kind in ("float32", "bfloat16"):
        policy = Policy(arch, params, "bfloat16")
        with jax.set_mesh(policy.mesh), layers_write(narrow=kind == "bfloat16"), rounded_products():
            drawn = policy.sample()
            found[f"k3, {kind}"] = k3((policy.logprobs(drawn) - drawn.old_logprobs)[drawn.mask])
            gradient = policy.gradient(dataclasses.replace(batch, old_logprobs=policy.logprobs(batch)))
            found[f"error, {kind}"] = float(np.linalg.norm(gradient - exact) / np.linalg.norm(exact))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, and each row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="names by commas; default: all")
    parser.add_argument("--model", help="a Hugging Face directory, such as SmolLM2-135M-Instruct")
    parser.add_argument("--deviation", type=float, default=DEVIATION, help="of random weights; published models: 0.02")
    given = parser.parse_args(arguments)
    names = filter(None, given.families.split(","))
    models = {name: functools.partial(random_model, name, given.deviation) for name in names}
    if given.model:
        models[f"{Path(given.model).name}, first {FIRST} layers"] = functools.partial(first_layers, given.model)
    rows = []
    for name, made in models.items():
        rows.append({"model": name} | {column: f"{value:.2g}" for column, value in compare(*made()).items()})
        print(rows[-1], file=sys.stderr, flush=True)
    print(markdown_table(rows))


if __name__ == "__main__":
    command(main)
