"""Host: how fast responses are sampled, beside Hugging Face's generate (torch) and Tunix' sampler.

    python scripts/benchmark_rollout.py --repeats 3 --output rollout.json
    python scripts/benchmark_rollout.py --peers "hf=/path/to/torch/env/bin/python" "tunix=/path/to/tunix/env/bin/python"

Every contender is a process of its own with the same random Llama (default: the shape of SmolLM2-135M), the same
prompts and lengths, and no end-of-sequence token; they take turns, and only one computes at a time. A peer is left out
if its python is not given and its packages are not installed beside dapo_jax. The cases:

    fixed N       every response has N tokens
    long tail N   lognormal lengths with a mean of about N / 6, cut at N; tokens after a response's end do not count.
                  Tunix has no lengths by row and is left out

Columns: tokens/s is the median of the repeats after a first call, whose extra time is "compile s"; "of the limit" is
the share of what the device could do at best: for every step the time of the matrix products alone of the rows that are
still alive, measured on the same weights in the same run, or of reading weights and cache at the memory's bandwidth,
whichever is longer. Peak is the most memory that the process has taken so far, earlier cases included.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markdown_table import markdown_table

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                         num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, model_type="llama"),
    "qwen2.5-0.5b": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                         num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, model_type="qwen2"),
    "qwen2.5-1.5b": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                         num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, model_type="qwen2"),
    "qwen2.5-7b": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                       num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False, model_type="qwen2"),
    "tiny": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=256, tie_word_embeddings=True, model_type="llama"),
}  # fmt: skip
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12, "TPU v5 lite": 0.82e12, "TPU v5": 2.77e12}  # bytes/s


def config_json(shape: str) -> dict[str, Any]:
    """config.json of a random model of this shape."""
    model_type = SHAPES[shape]["model_type"]
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[model_type]
    return {**SHAPES[shape], "architectures": [architecture], "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
            "hidden_act": "silu", "max_position_embeddings": 8192, "initializer_range": 0.02}  # fmt: skip


def make_prompts(args: argparse.Namespace) -> list[list[int]]:
    """Distinct prompts, each of which is answered args.group times."""
    rng = np.random.default_rng(7)
    vocabulary = SHAPES[args.shape]["vocab_size"]
    return rng.integers(10, vocabulary, (args.batch // args.group, args.prompt_length)).tolist()


def make_lengths(case: str, batch: int) -> np.ndarray:
    """Tokens of each response."""
    kind, longest = case.rsplit(" ", 1)
    if kind == "fixed":
        return np.full(batch, int(longest))
    drawn = np.random.default_rng(3).lognormal(np.log(int(longest) / 6) - 0.32, 0.8, batch)
    return np.clip(drawn.round().astype(int), 1, int(longest))


class Ours:
    """dapo_jax."""

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        import jax
        import jax.numpy as jnp

        from dapo_jax.learner.actor import unstack_layers
        from dapo_jax.models.architecture import architecture_from_hf
        from dapo_jax.models.weights import cast_matrices, init_params
        from dapo_jax.parallel.mesh import make_mesh

        self.jax, self.args = jax, args
        self.arch = architecture_from_hf(config_json(args.shape))
        self.mesh = make_mesh(-1, 1, 1)
        self.prompts = make_prompts(args)
        self.engines: dict[str, Any] = {}
        with jax.set_mesh(self.mesh):
            relay = jax.jit(lambda p: unstack_layers(cast_matrices(p, self.arch, jnp.dtype(dtype))))
            self.params = jax.block_until_ready(relay(init_params(self.arch, 0)))

    def __call__(self, case: str) -> np.ndarray:
        from dapo_jax.rollout.engine import Engine, EngineSettings
        from dapo_jax.rollout.sampling import TRAIN, Sampling

        lengths, on_cpu = make_lengths(case, self.args.batch), self.jax.default_backend() == "cpu"
        if case not in self.engines:
            self.engines[case] = Engine(EngineSettings(
                arch=self.arch, mesh=self.mesh, eos_ids=(), pad_id=0, max_prompt_length=self.args.prompt_length,
                max_response_length=int(case.rsplit(" ", 1)[1]), max_num_seqs=self.args.batch, memory_share=1.0,
                chunk_length=self.args.chunk, smallest_rows=1 if on_cpu else 8, lookahead=0 if on_cpu else 1, seed=0,
            ))  # fmt: skip
        with self.jax.set_mesh(self.mesh):
            rollout = self.engines[case].generate(
                self.params, self.prompts, range(len(self.prompts)), num_samples=self.args.group, purpose=TRAIN,
                sampling=Sampling.create(1.0, 1.0, -1), limits=lengths,
            )  # fmt: skip
        return rollout.mask.sum(axis=1)

    def limit(self, case: str) -> float:
        """Tokens per second if there were nothing but matrix products, or nothing but memory traffic."""
        jax, jnp, arch = self.jax, self.jax.numpy, self.arch
        from dapo_jax.models.attention import matmul

        @jax.jit
        def products(params: Any, x: Any) -> Any:
            for layer in params["layers"]:
                query = matmul("bd,dnh->bnh", x, layer["query"])
                key, value = matmul("bd,dkh->bkh", x, layer["key"]), matmul("bd,dkh->bkh", x, layer["value"])
                x = matmul("bnh,nhd->bd", query, layer["output"]) + jnp.mean(key) + jnp.mean(value)
                x = matmul("bf,fd->bd", matmul("bd,df->bf", x, layer["gate"]) + matmul("bd,df->bf", x, layer["up"]),
                           layer["down"])  # fmt: skip
            return jnp.max(matmul("bd,vd->bv", x, params["head"] if "head" in params else params["embedding"]), axis=-1)

        lengths = make_lengths(case, self.args.batch)
        alive = (lengths[:, None] > np.arange(lengths.max())).sum(axis=0)  # rows of each step
        bandwidth = next((v for k, v in BANDWIDTH.items() if k in jax.devices()[0].device_kind), None)
        itemsize = self.params["layers"][0]["query"].dtype.itemsize
        weights = sum(x.nbytes for x in jax.tree.leaves(self.params))
        per_token = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * itemsize
        seconds, measured = 0.0, {}
        for length, count in enumerate(alive):
            rows = int(count) if count % 8 == 0 else 1 << (int(count).bit_length() - 1)  # no more than there are
            if rows not in measured:
                hidden = jnp.full((rows, arch.hidden_size), 1e-3, jnp.float32)
                with jax.set_mesh(self.mesh):
                    times = [seconds_of(lambda x=hidden: jax.block_until_ready(products(self.params, x)))
                             for _ in range(8)]  # fmt: skip
                measured[rows] = statistics.median(times[2:])
            step = measured[rows]
            if bandwidth is not None:
                cache = count / self.mesh.size * (self.args.prompt_length + length) * per_token
                step = max(step, (weights + cache) / bandwidth)
            seconds += step
        return float(lengths.sum() / seconds)

    def peak(self) -> float:
        """Bytes."""
        return jax_peak(self.jax)


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

    def __call__(self, case: str) -> np.ndarray:
        torch, lengths = self.torch, make_lengths(case, self.args.batch)
        ends = torch.tensor(lengths + self.args.prompt_length, device=self.device)

        def ended(ids: Any, _scores: Any, **_: Any) -> Any:
            return ids.shape[1] >= ends

        found = self.model.generate(
            self.prompts, attention_mask=torch.ones_like(self.prompts), do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=int(lengths.max()), eos_token_id=None, pad_token_id=0, use_cache=True,
            stopping_criteria=[ended],
        )  # fmt: skip
        assert found.shape[1] == self.args.prompt_length + lengths.max()
        return lengths

    def peak(self) -> float:
        """Bytes."""
        return self.torch.cuda.max_memory_allocated() if self.device == "cuda" else max_rss()


class Tunix:
    """Google Tunix' sampler (VanillaRollout), on a Llama of the same shape."""

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        import jax
        import jax.numpy as jnp
        from flax import nnx
        from tunix.models.llama3 import model as llama  # pyright: ignore[reportMissingImports]
        from tunix.rl.rollout import base_rollout, vanilla_rollout  # pyright: ignore[reportMissingImports]

        self.jax, self.args, self.base_rollout, shape = jax, args, base_rollout, SHAPES[args.shape]
        head_dim = shape["hidden_size"] // shape["num_attention_heads"]
        config = llama.ModelConfig(
            num_layers=shape["num_hidden_layers"], vocab_size=shape["vocab_size"], embed_dim=shape["hidden_size"],
            hidden_dim=shape["intermediate_size"], num_heads=shape["num_attention_heads"], head_dim=head_dim,
            num_kv_heads=shape["num_key_value_heads"], rope_theta=100000, norm_eps=1e-5, weight_tying=True,
        )  # fmt: skip
        model = llama.Llama3(config, rngs=nnx.Rngs(0))
        rng = np.random.default_rng(0)  # its own initial feed-forward layers are zero
        nnx.update(model, jax.tree.map(
            lambda x: jnp.asarray(rng.normal(0, 0.02, x.shape), dtype) if x.ndim >= 2 else x, nnx.state(model)
        ))  # fmt: skip
        longest = max(int(case.rsplit(" ", 1)[1]) for case in args.cases)
        cache = base_rollout.CacheConfig(
            cache_size=args.prompt_length + longest, num_layers=shape["num_hidden_layers"],
            num_kv_heads=shape["num_key_value_heads"], head_dim=head_dim,
        )  # fmt: skip
        self.rollout = vanilla_rollout.VanillaRollout(model, _Integers(), cache_config_or_size=cache)
        self.prompts = [" ".join(map(str, prompt)) for prompt in make_prompts(args) for _ in range(args.group)]

    def __call__(self, case: str) -> np.ndarray:
        lengths = make_lengths(case, self.args.batch)
        if lengths.min() < lengths.max():
            raise NotImplementedError("no lengths by row")
        new = int(lengths[0])
        config = self.base_rollout.RolloutConfig(
            max_tokens_to_generate=new, max_prompt_length=self.args.prompt_length,
            kv_cache_size=self.args.prompt_length + new, temperature=1.0, top_p=1.0, top_k=None, eos_tokens=[-1],
        )  # fmt: skip
        found = self.rollout.generate(self.prompts, config)
        assert all(len(tokens) == new for tokens in found.tokens)
        return lengths

    def peak(self) -> float:
        """Bytes."""
        return jax_peak(self.jax)


class _Integers:
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


CONTENDERS: dict[str, Callable[[argparse.Namespace, str], Any]] = {"dapo_jax": Ours, "hf": HuggingFace, "tunix": Tunix}


def seconds_of(function: Callable[[], Any]) -> float:
    """Wall time."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def jax_peak(jax: Any) -> float:
    """The most bytes that JAX has held on its first device; on a CPU, that the process has."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats else max_rss()


def max_rss() -> float:
    """Peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(args: argparse.Namespace) -> None:
    """A contender: reads the name of a case a line, samples it, and writes what it took."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints does not mix with the replies
    name, dtype = args.serve.split(":")
    contender = CONTENDERS[name](args, dtype)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any] = {}
        try:
            if request.get("limit"):
                reply["limit"] = contender.limit(request["case"])
            else:
                start = time.perf_counter()
                reply["tokens"] = int(contender(request["case"]).sum())
                reply |= {"seconds": time.perf_counter() - start, "peak": contender.peak()}
        except NotImplementedError as error:
            reply["skipped"] = str(error)
        print(json.dumps(reply), file=replies, flush=True)


class Contender:
    """A process that samples when it is asked to."""

    def __init__(self, name: str, dtype: str, python: str, arguments: Sequence[str]) -> None:
        self.name = f"{name} {dtype}"
        self.errors = tempfile.TemporaryFile("w+")
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]),
                       "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the contenders share an accelerator
        self.process = subprocess.Popen(
            [python, __file__, *arguments, "--serve", f"{name}:{dtype}"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.errors, text=True, env=environment,
        )  # fmt: skip

    def ready(self) -> bool:
        """Whether it has started: no if its packages are missing."""
        return bool(self._reply())

    def ask(self, **request: Any) -> dict[str, Any]:
        """Its answer to a request."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        reply = self._reply()
        if not reply:
            raise RuntimeError(f"{self.name} has ended: {self.last_error()}")
        return reply

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def last_error(self) -> str:
        """The last line that it wrote to its error output."""
        self.errors.seek(0)
        return (self.errors.read().strip().splitlines() or ["no message"])[-1]

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def measure(args: argparse.Namespace, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of the table."""
    pythons = {"dapo_jax": sys.executable, "hf": sys.executable, "tunix": sys.executable}
    pythons |= dict(peer.split("=", 1) for peer in args.peers)
    wanted = [("dapo_jax", dtype) for dtype in args.dtypes] + [("hf", args.dtypes[0]), ("tunix", args.dtypes[0])]
    contenders = []
    for name, dtype in wanted:
        contender = Contender(name, dtype, pythons[name], arguments)
        if contender.ready():
            contenders.append(contender)
        else:
            print(f"{name} is left out: {contender.last_error()}", flush=True)
    rows = []
    try:
        for case in args.cases:
            taking_part = [(contender, contender.ask(case=case)) for contender in contenders]
            taking_part = [(contender, first) for contender, first in taking_part if "skipped" not in first]
            times: dict[str, list[float]] = {contender.name: [] for contender, _ in taking_part}
            last = {}
            for _ in range(args.repeats):
                for contender, _ in taking_part:
                    last[contender.name] = contender.ask(case=case)
                    times[contender.name].append(last[contender.name]["seconds"])
            limits = {c.name: c.ask(case=case, limit=True)["limit"] for c, _ in taking_part if c.name[:4] == "dapo"}
            speeds = {name: last[name]["tokens"] / statistics.median(taken) for name, taken in times.items()}
            ours = speeds[contenders[0].name]
            for contender, first in taking_part:
                name = contender.name
                rows.append({
                    "case": case,
                    "contender": name,
                    "tokens/s": speeds[name],
                    "ours / it": ours / speeds[name],
                    "of the limit": speeds[name] / limits[name] if name in limits else None,
                    "limit tokens/s": limits.get(name),
                    "compile s": first["seconds"] - statistics.median(times[name]),
                    "peak GiB": last[name]["peak"] / 2**30,
                    "seconds": times[name],
                })  # fmt: skip
                print(markdown_table(rows[-1:], leave_out=("seconds",)), flush=True)
    finally:
        for contender in contenders:
            contender.close()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=64, help="responses")
    parser.add_argument("--group", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=16, help="tokens between two looks at what has ended (dapo_jax)")
    parser.add_argument("--cases", nargs="+", default=["fixed 64", "fixed 256", "long tail 256"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of dapo_jax; peers: the first")
    parser.add_argument("--peers", nargs="*", default=[], help="NAME=PYTHON of hf and tunix, where not this one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.serve:
        serve(args)
        return
    given = list(sys.argv[1:] if arguments is None else arguments)
    rows = measure(args, given)
    print("\n" + markdown_table(rows, leave_out=("seconds",)))
    if args.output:
        shown = {name: value for name, value in vars(args).items() if name not in ("output", "serve", "peers")}
        args.output.write_text(json.dumps({**shown, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
