"""Host: how fast a layer with linear attention reads whole sequences, in chunks as in training, or token by token.

    python scripts/benchmarks/benchmark_gated_delta.py [--tokens 2048] [--repeats 5] [--dtype bfloat16]

The layer has the shape of Qwen3.5-0.8B's: hidden 1024, 16 heads of 128, a convolution over four tokens; its weights are
random. Both forms have the same projections, convolution and norm. In chunks: `over_sequences`. Token by token: a scan
of `next_token`, the same function as in decoding, whose backward pass computes 64 tokens at a time again, as that of
the chunks does. They take turns in one process on all cores; "tokens/s" is the median of the repeats after a first
call, which compiles. The last column is the largest difference of the two results, over the largest of them.
"""

import os

if __name__ == "__main__":  # before JAX starts; the imports below take seconds
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dapo_jax.models.architecture import Architecture
from dapo_jax.models.gated_delta import Inputs, empty_state, gated_delta, next_token, over_sequences
from dapo_jax.models.hf_architecture import architecture_from_hf
from dapo_jax.models.token_paths import CHUNK, paths_of
from dapo_jax.models.weights import cast_matrices, init_params

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from markdown_table import markdown_table
from script_ends import command

LAYER = {
    **{"architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 2, "rms_norm_eps": 1e-6},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 16, "full_attention_interval": 2},
    **{"vocab_size": 8, "intermediate_size": 8, "num_attention_heads": 8, "num_key_value_heads": 2},
}


def forms(arch: Architecture, tokens: int, dtype: Any) -> dict[str, Callable[[Any, jax.Array], jax.Array]]:
    """Two functions of a layer's weights and x [1, T, D] that compute the same."""
    delta, ones = arch.delta, jnp.ones((1, tokens), jnp.int32)
    assert delta is not None

    def by_chunks(inputs: Inputs) -> tuple[jax.Array, Any]:
        return over_sequences(inputs, paths_of(ones, 0 * ones, delta.filter_width), delta)

    def by_tokens(inputs: Inputs) -> tuple[jax.Array, Any]:
        def step(held: Any, token: Any) -> tuple[Any, jax.Array]:
            channels, beta, decay = (x[:, None] for x in token)
            read, held = next_token(Inputs(channels, inputs.filter, beta, decay), held, jnp.ones(1, bool), delta)
            return held, read[:, 0]

        @jax.checkpoint
        def steps(held: Any, part: Any) -> tuple[Any, jax.Array]:
            return jax.lax.scan(step, held, part)

        first = (x.swapaxes(0, 1) for x in (inputs.channels, inputs.beta, inputs.decay))
        parts = tuple(x.reshape(-1, CHUNK, *x.shape[1:]) for x in first)
        held, read = jax.lax.scan(steps, empty_state(1, delta, dtype), parts)
        return read.reshape(tokens, *read.shape[2:]).swapaxes(0, 1), held

    def layer_with(recur: Callable[[Inputs], tuple[jax.Array, Any]]) -> Callable[[Any, jax.Array], jax.Array]:
        return lambda layer, x: gated_delta(x, layer, recur, arch)[0]

    return {"chunks": layer_with(by_chunks), "token by token": layer_with(by_tokens)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of one sequence, a multiple of 64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of products")
    args = parser.parse_args(arguments)
    if args.tokens % CHUNK or min(args.tokens, args.repeats) < 1:
        raise ValueError(f"--tokens={args.tokens} must be a multiple of {CHUNK}, and --repeats at least 1")
    arch = architecture_from_hf(LAYER)
    params = cast_matrices(init_params(arch, seed=0), arch, args.dtype)
    layer = {name: leaf[0] for name, leaf in params["layers"].items() if name.startswith("delta_")}
    x = jax.random.normal(jax.random.key(1), (1, args.tokens, arch.hidden_size), jnp.float32)
    cotangent = jax.random.normal(jax.random.key(2), x.shape, jnp.float32)
    rows = []
    for what in ("forward", "forward and backward"):
        calls = {}
        for name, form in forms(arch, args.tokens, jnp.dtype(args.dtype)).items():
            loss = jax.grad(lambda layer, x, form=form: jnp.sum(form(layer, x) * cotangent), argnums=(0, 1))
            calls[name] = jax.jit(form if what == "forward" else loss)
        chunks, recurrent = (jax.device_get(call(layer, x)) for call in calls.values())
        away = jax.tree.map(lambda one, other: abs(one - other).max() / abs(other).max(), chunks, recurrent)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                jax.block_until_ready(call(layer, x))
                seconds[name].append(time.perf_counter() - start)
        speeds = [args.tokens / statistics.median(taken) for taken in seconds.values()]
        ratio, difference = speeds[0] / speeds[1], float(max(jax.tree.leaves(away)))
        named = {f"{name}, tokens/s": f"{speed:,.0f}" for name, speed in zip(calls, speeds, strict=True)}
        rows.append({"pass": what, **named, "ratio": f"{ratio:.1f}", "difference": f"{difference:.1e}"})
    print(markdown_table(rows))


if __name__ == "__main__":
    command(main)
