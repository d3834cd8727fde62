"""Host: the trainers that the benchmarks of the update and of the step compare with, and their common settings."""

import argparse
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from contenders import Turns, jax_peak, max_rss
from random_models import SHAPES, Integers, config_json, tunix_llama
from workload import as_text, make_lengths, make_prompts, make_responses, num_tokens

LEARNING_RATE = 1e-6
MANY = 10**6  # steps, more than are ever taken
END = 1  # the end-of-sequence token


def score(data_source: str, solution: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """The reward: share of even token ids."""
    return float(np.mean([int(word) % 2 == 0 for word in solution.split()] or [0.0]))


def end_at(lengths: Any, prompt_length: int) -> Callable[[Any, Any], Any]:
    """A logits processor of transformers: row b draws END as token lengths[b] of its response, and not before.

    Args:
        lengths: [B], on the device of the scores.
    """

    def process(token_ids: Any, scores: Any) -> Any:
        scores[:, END] = -math.inf
        last = lengths == token_ids.shape[1] - prompt_length + 1
        scores[last] = -math.inf
        scores[last, END] = 0.0
        return scores

    return process


def integer_tokenizer(vocab_size: int) -> Any:
    """A `tokenizers.Tokenizer` whose text is the token ids."""
    import tokenizers

    vocabulary = {"<pad>": 0, "<eos>": END} | {str(i): i for i in range(2, vocab_size)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return backend


class TRL:
    """TRL's GRPOTrainer, on a CUDA device if there is one. Its step waits for a turn where it begins."""

    whole_step = False  # or the update alone

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        import tempfile

        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
        import trl  # pyright: ignore[reportMissingImports]
        from datasets import Dataset  # pyright: ignore[reportMissingImports]

        self.torch, self.args, self.on_gpu = torch, args, torch.cuda.is_available()
        settings = transformers.AutoConfig.for_model(**config_json(args.shape), pad_token_id=0, eos_token_id=END)
        model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=integer_tokenizer(settings.vocab_size),
            pad_token="<pad>",
            eos_token="<eos>",
            padding_side="left",
        )
        lengths = make_lengths(args)
        prompts = [prompt for seed in range(64) for prompt in make_prompts(args, seed=seed)]
        config = trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=args.micro,
            num_generations=args.group,
            gradient_accumulation_steps=args.batch // args.micro,
            max_completion_length=int(lengths.max()),
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            learning_rate=LEARNING_RATE,
            max_steps=MANY,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=dtype == "bfloat16",
            use_cpu=not self.on_gpu,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )

        def reward(completions: list[str], **_: Any) -> list[float]:
            return [score("", completion, "", {}) for completion in completions]

        self.trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": as_text(prompts)}),
        )
        generate, score_all = self.trainer._generate_single_turn, self.trainer._generate_and_score_completions
        self.apart = 0.0  # seconds of generating and scoring
        ends = end_at(torch.tensor(lengths, device=self.trainer.accelerator.device), args.prompt_length)
        processors = transformers.LogitsProcessorList([ends])
        model.generate = functools.partial(model.generate, logits_processor=processors)
        responses = make_responses(args)

        def generate_or_give(*rest: Any, **named: Any) -> Any:
            found = generate(*rest, **named) if self.whole_step else (responses, None)
            assert [len(response) for response in found[0]] == lengths.tolist()
            return found

        def timed(*rest: Any, **named: Any) -> Any:
            start = time.perf_counter()
            found = score_all(*rest, **named)
            self._synchronize()
            self.apart += time.perf_counter() - start
            return found

        self.trainer._generate_single_turn, self.trainer._generate_and_score_completions = generate_or_give, timed

        def loop(turns: Turns) -> None:
            def begin(*_: Any, **__: Any) -> None:
                self._synchronize()
                turns.wait_for_turn()

            callback = transformers.TrainerCallback()
            callback.on_step_begin = begin
            self.trainer.add_callback(callback)
            self.trainer.train()

        self.turns = Turns(loop)

    def _synchronize(self) -> None:
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def __call__(self, case: str) -> tuple[int, float]:
        self.apart = 0.0
        seconds = self.turns.take()
        return num_tokens(self.args), seconds if self.whole_step else seconds - self.apart

    def peak(self) -> float:
        """Bytes."""
        return self.torch.cuda.max_memory_allocated() if self.on_gpu else max_rss()


class Tunix:
    """Google Tunix' GRPO learner, on a Llama of the same shape. Its step waits for a turn where it takes data."""

    whole_step = False  # or the update alone

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        import jax
        import optax
        from flax import nnx
        from tunix.rl import rl_cluster  # pyright: ignore[reportMissingImports]
        from tunix.rl.grpo import dapo_learner, grpo_learner  # pyright: ignore[reportMissingImports]
        from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

        self.jax, self.args, num_prompts = jax, args, args.batch // args.group
        lengths = make_lengths(args)
        mesh = jax.make_mesh((jax.device_count(), 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        model = tunix_llama(SHAPES[args.shape], dtype)
        micro = max(args.micro // args.group, 1)  # prompts
        cluster = rl_cluster.RLCluster(
            actor=model,
            reference=None,
            tokenizer=Integers(),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh={
                    role: mesh for role in (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
                },
                rollout_engine="vanilla",
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.adamw(LEARNING_RATE),
                    eval_every_n_steps=MANY,
                    max_steps=MANY,
                    mini_batch_size=num_prompts,
                    train_micro_batch_size=micro,
                    rollout_micro_batch_size=num_prompts,
                    compute_logps_micro_batch_size=micro,
                ),
                rollout_config=base_rollout.RolloutConfig(
                    max_tokens_to_generate=int(lengths.max()),
                    max_prompt_length=args.prompt_length,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=None,
                    eos_tokens=[-1],
                    kv_cache_size=args.prompt_length + int(lengths.max()),
                ),
            ),
        )
        generate, update_actor = cluster.generate, cluster.update_actor
        self.updating = 0.0  # seconds
        responses = make_responses(args)

        def generate_or_give(prompts: Any, **named: Any) -> Any:
            if self.whole_step:
                return generate(prompts, **named)
            return base_rollout.RolloutOutput(
                text=as_text(responses),
                logits=[],
                tokens=list(map(np.array, responses)),
                left_padded_prompt_tokens=np.array([Integers().encode(prompt) for prompt in prompts]),
                logprobs=None,
            )

        def wait() -> None:
            jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))

        def timed_update(*rest: Any, **named: Any) -> None:
            start = time.perf_counter()
            update_actor(*rest, **named)
            if not self.whole_step:
                wait()
            self.updating += time.perf_counter() - start

        cluster.generate, cluster.update_actor = generate_or_give, timed_update
        config = dapo_learner.DAPOConfig(num_generations=args.group, overlong_buffer=None)
        config.beta = 0.0  # DAPO's None asks for a reference model

        def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
            return [score("", completion, "", {}) for completion in completions]

        learner = grpo_learner.GRPOLearner(cluster, config, reward_fns=reward)

        def loop(turns: Turns) -> None:
            def batches() -> Any:
                for seed in range(MANY):
                    wait()
                    turns.wait_for_turn()
                    yield {"prompts": np.array(as_text(make_prompts(args, seed=seed)))}

            learner.train(batches())

        self.turns = Turns(loop)

    def __call__(self, case: str) -> tuple[int, float]:
        self.updating = 0.0
        seconds = self.turns.take()
        return num_tokens(self.args), seconds if self.whole_step else self.updating

    def peak(self) -> float:
        """Bytes."""
        return jax_peak(self.jax)
