"""Host: how fast responses are sampled, compared with Hugging Face's generate (torch) and Tunix's sampler.

    python scripts/benchmarks/benchmark_rollout.py --repeats 3 --output rollout.json
    python scripts/benchmarks/benchmark_rollout.py --peers hf=TORCH_ENV/bin/python tunix=TUNIX_ENV/bin/python

Each contender is a separate process with the same random Llama (default: the shape of SmolLM2-135M), the same prompts
and lengths, and no end-of-sequence token. They take turns; only one computes at a time. A peer is left out if its
Python is not given and its packages are not installed next to dapo_jax. Tokens after a response's end do not count.
Tunix has no lengths per row and takes part only in equal ones.

Columns: "tokens/s" is the median of the repeats after a first call, which compiles and takes "first s". "of the limit"
is the share of what the device could do at best: for every step, the time of the matrix products of the rows that are
still alive, measured on the same weights in the same run, or the time of reading weights and cache at memory bandwidth,
whichever is longer. "peak" is the most memory that the process has taken so far, earlier lengths included.
"""

if __name__ == "__main__":  # the imports below take seconds
    from dapo_jax.command.interrupts import end_at_once

    end_at_once("benchmark_rollout")

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from contenders import (
    device_limits,
    jax_peak,
    make_parser,
    max_rss,
    seconds_of,
    serve,
    start_contenders,
    take_turns,
    write_output,
)
from random_models import SHAPES, Integers, config_json, forward_products, tunix_llama
from workload import LENGTHS, as_numbers, as_text, make_prompts, response_lengths

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, for what its folders share

from markdown_table import markdown_table
from script_ends import command

LONG_TAIL = "lognormal:median=31,sigma=0.8,clip=256"


class Ours:
    """dapo_jax.

    Args:
        slots: responses that are sampled at once; None = all.
    """

    def __init__(self, args: argparse.Namespace, dtype: str, slots: int | None = None) -> None:
        import jax
        import jax.numpy as jnp

        from dapo_jax.learner.decode_weights import unstack_layers
        from dapo_jax.models.hf_architecture import architecture_from_hf
        from dapo_jax.models.weights import cast_matrices, init_params
        from dapo_jax.parallel.mesh import make_mesh

        self.jax, self.args, self.slots = jax, args, slots or args.batch
        self.arch = architecture_from_hf(config_json(args.shape))
        self.mesh = make_mesh(-1, 1, 1)
        self.prompts = make_prompts(args)
        self.engines: dict[str, Any] = {}
        with jax.set_mesh(self.mesh):
            relay = jax.jit(lambda p: unstack_layers(cast_matrices(p, self.arch, jnp.dtype(dtype)), self.arch))
            self.params = jax.block_until_ready(relay(init_params(self.arch, 0)))

    def __call__(self, case: str) -> tuple[int, float]:
        from dapo_jax.rollout.layout import EngineSettings
        from dapo_jax.rollout.responses import Request
        from dapo_jax.rollout.sampling import TRAIN, Sampling
        from dapo_jax.run.sampler import build_engine

        start = time.perf_counter()
        lengths, on_cpu = response_lengths(case, self.args), self.jax.default_backend() == "cpu"
        if case not in self.engines:
            self.engines[case] = build_engine(
                EngineSettings(
                    arch=self.arch,
                    mesh=self.mesh,
                    eos_ids=(),
                    pad_id=0,
                    max_prompt_length=self.args.prompt_length,
                    max_response_length=int(lengths.max()),
                    max_num_seqs=self.slots,
                    memory_share=1.0,
                    chunk_length=self.args.chunk,
                    lookahead=0 if on_cpu else 1,
                    seed=0,
                    least_page=1 if on_cpu else 16,
                ),
            )
        with self.jax.set_mesh(self.mesh):
            request = Request(self.params, self.args.group, TRAIN, Sampling.create(1.0, 1.0, -1))
            numbers = range(len(self.prompts))
            rollout = self.engines[case].generate(self.prompts, numbers, request, limits=lengths)
        return int(rollout.mask.sum()), time.perf_counter() - start

    def limit(self, case: str) -> dict[str, float]:
        """Tokens per second of matrix products alone, or of memory traffic alone."""
        lengths = response_lengths(case, self.args)
        seconds = least_seconds(self.params, self.arch, self.mesh, lengths, self.args.prompt_length)
        return {"limit": float(lengths.sum() / seconds)}

    def peak(self) -> float:
        """Bytes."""
        return jax_peak(self.jax)


def least_seconds(params: Any, arch: Any, mesh: Any, lengths: np.ndarray, prompt_length: int) -> float:
    """Seconds of sampling responses of these lengths, the longer at each step of its products and of its reading.

    Args:
        params: decoding weights.
    """
    import jax
    import jax.numpy as jnp

    products = jax.jit(lambda params, x: forward_products(params, x, len(x)))
    alive = (lengths[:, None] > np.arange(lengths.max())).sum(axis=0)  # rows of each step
    bandwidth = device_limits().bandwidth
    itemsize = params["layers"][0]["query"].dtype.itemsize
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    per_token = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * itemsize
    seconds, measured = 0.0, {}
    for length, count in enumerate(alive):
        rows = int(count) if count % 8 == 0 else 1 << (int(count).bit_length() - 1)  # no more than there are
        if rows not in measured:
            hidden = jnp.full((rows, arch.hidden_size), 1e-3, jnp.float32)
            with jax.set_mesh(mesh):
                times = [seconds_of(lambda x=hidden: jax.block_until_ready(products(params, x))) for _ in range(8)]
            measured[rows] = statistics.median(times[2:])
        step = measured[rows]
        if bandwidth is not None:
            cache = count / mesh.size * (prompt_length + length) * per_token
            step = max(step, (weights + cache) / bandwidth)
        seconds += step
    return seconds


class HuggingFace:
    """transformers' generate, on a CUDA device if there is one."""

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]

        self.torch, self.args = torch, args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        config = transformers.AutoConfig.for_model(**config_json(args.shape))
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        self.model = self.model.to(self.device).eval()
        self.prompts = torch.tensor(make_prompts(args)).repeat_interleave(args.group, dim=0).to(self.device)

    def __call__(self, case: str) -> tuple[int, float]:
        start = time.perf_counter()
        torch, lengths = self.torch, response_lengths(case, self.args)
        ends = torch.tensor(lengths + self.args.prompt_length, device=self.device)

        def ended(ids: Any, _scores: Any, **_: Any) -> Any:
            return ids.shape[1] >= ends

        found = self.model.generate(
            self.prompts,
            attention_mask=torch.ones_like(self.prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=int(lengths.max()),
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
            stopping_criteria=[ended],
        )
        assert found.shape[1] == self.args.prompt_length + lengths.max()
        return int(lengths.sum()), time.perf_counter() - start

    def peak(self) -> float:
        """Bytes."""
        return self.torch.cuda.max_memory_allocated() if self.device == "cuda" else max_rss()


class Tunix:
    """Google Tunix' sampler (VanillaRollout), on a Llama of the same shape."""

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        import jax
        from tunix.rl.rollout import base_rollout, vanilla_rollout  # pyright: ignore[reportMissingImports]

        self.jax, self.args, self.base_rollout, shape = jax, args, base_rollout, SHAPES[args.shape]
        head_dim = shape["hidden_size"] // shape["num_attention_heads"]
        longest = max(int(response_lengths(case, args).max()) for case in args.lengths)
        cache = base_rollout.CacheConfig(
            cache_size=args.prompt_length + longest,
            num_layers=shape["num_hidden_layers"],
            num_kv_heads=shape["num_key_value_heads"],
            head_dim=head_dim,
        )
        self.rollout = vanilla_rollout.VanillaRollout(tunix_llama(shape, dtype), Integers(), cache_config_or_size=cache)
        self.prompts = [prompt for prompt in as_text(make_prompts(args)) for _ in range(args.group)]

    def __call__(self, case: str) -> tuple[int, float]:
        start = time.perf_counter()
        lengths = response_lengths(case, self.args)
        if lengths.min() < lengths.max():
            raise NotImplementedError("no lengths per row")
        new = int(lengths[0])
        config = self.base_rollout.RolloutConfig(
            max_tokens_to_generate=new,
            max_prompt_length=self.args.prompt_length,
            kv_cache_size=self.args.prompt_length + new,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            eos_tokens=[-1],
        )
        found = self.rollout.generate(self.prompts, config)
        assert all(len(tokens) == new for tokens in found.tokens)
        return int(lengths.sum()), time.perf_counter() - start

    def peak(self) -> float:
        """Bytes."""
        return jax_peak(self.jax)


CONTENDERS: dict[str, Callable[[argparse.Namespace, str], Any]] = {
    "dapo_jax": Ours,
    "hf": HuggingFace,
    "tunix": Tunix,
}


def measure(args: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of the table."""
    wanted = [("dapo_jax", dtype) for dtype in args.dtypes] + [("hf", args.dtypes[0]), ("tunix", args.dtypes[0])]
    contenders = start_contenders(__file__, wanted, args, arguments)
    rows = []
    try:
        for lengths in args.lengths:
            case = as_numbers(lengths, args)
            results = take_turns(contenders, case, args.repeats)
            for result in results:
                limit = result.contender.ask(case=case, limit=True)["limit"] if result.contender.ours else None
                rows.append({"lengths": lengths, **result.row(results[0], limit)})
                print(markdown_table(rows[-1:], leave_out=("seconds",)), flush=True)
    finally:
        for contender in contenders:
            contender.close()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--chunk", type=int, default=0, help="tokens between two checks for finished responses; 0: dapo_jax chooses"
    )
    parser.add_argument("--lengths", nargs="+", default=["64", "256", LONG_TAIL], help=LENGTHS)
    args = parser.parse_args(arguments)
    if args.serve:
        serve(args.serve, lambda name, dtype: CONTENDERS[name](args, dtype))
        return
    numbers = [as_numbers(lengths, args) for lengths in args.lengths]
    rows = measure(args, [*(sys.argv[1:] if arguments is None else arguments), "--lengths", *numbers])
    print("\n" + markdown_table(rows, leave_out=("seconds",)))
    write_output(args, rows=rows)


if __name__ == "__main__":
    command(main)
