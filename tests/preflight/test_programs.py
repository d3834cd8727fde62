import dataclasses
from pathlib import Path

import numpy as np
import pytest
from small_run import small_config

from dapo_jax.config.sections import AlgorithmConfig, RewardConfig, RewardModelConfig
from dapo_jax.learner import trainable, update
from dapo_jax.learner.trained_networks import trained
from dapo_jax.models import paged_attention, paged_attention_gpu
from dapo_jax.models.attention import XLA
from dapo_jax.models.flops import token_flops
from dapo_jax.parallel.compilation import Programs
from dapo_jax.parallel.mesh import num_batch_shards
from dapo_jax.preflight import report, rollout
from dapo_jax.preflight.compiled import GRADIENTS, KINDS, OPTIMIZER, PARAMETERS
from dapo_jax.preflight.hlo_products import PagedKeys
from dapo_jax.preflight.lengths import all_longest, parse_lengths
from dapo_jax.preflight.programs import step_programs
from dapo_jax.preflight.step_batch import StepBatch
from dapo_jax.rollout import programs
from dapo_jax.rollout.programs import Calls
from dapo_jax.run.base_models import read_model
from dapo_jax.run.meshes import make_meshes
from dapo_jax.run.settings import all_micro_batches
from dapo_jax.training.loop import train

ONE_LAYER = {"model.random.num_layers": 1}
ONE_STEP = {
    "mesh.fsdp": 4,
    "mesh.tensor": 2,
    "data.max_prompt_length": 8,
    "data.max_response_length": 4,
    "trainer.total_training_steps": 1,
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "rollout.max_num_seqs": 128,
    "data.arithmetic.num_heldout": 0,
    "actor.use_dynamic_bsz": False,  # the shapes of packed passes follow from the lengths
}


def one_step(**changes):
    return small_config("unused", **{**ONE_LAYER, **ONE_STEP, **changes})


def programs_of(config, **changes):
    arch, tokenizer = read_model(config.model)
    lengths = all_longest(config.data)
    values = {"lengths": lengths, "memory": 1e9, "eos_ids": tokenizer.eos_ids, "pad_id": tokenizer.pad_id}
    return step_programs(config, arch, make_meshes(config, arch), **{**values, **changes})


def texts_of_a_run(config) -> set[tuple[str, str]]:
    """The lowered text of what a run of one step calls."""
    seen = set()
    call, get, make, steps = trainable.WithFrozen.__call__, Programs.get, Calls.empty, update._optimizer_steps

    def called(self, *arguments):
        seen.add(("learner", self.lower(*arguments).as_text()))
        return call(self, *arguments)

    def got(self, key, lower):
        seen.add(("decode", lower().as_text()))
        return get(self, key, lower)

    def seen_by(function, stage):
        def called(*arguments, **static):
            seen.add((stage, function.lower(*arguments, **static).as_text()))
            return function(*arguments, **static)

        return called

    def stepped(functions, *rest):
        return steps(dataclasses.replace(functions, apply=seen_by(functions.apply, "optimizer step")), *rest)

    def made(self, shape=None):
        empty = make(self, shape)
        if shape is None:
            seen.add(("empty", empty.func.lower(**empty.keywords).as_text()))
        return empty

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainable.WithFrozen, "__call__", called)
        patch.setattr(Programs, "get", got)
        patch.setattr(Calls, "empty", made)
        patch.setattr(programs, "prefill", seen_by(programs.prefill, "prefill"))
        patch.setattr(update, "_optimizer_steps", stepped)
        train(config)
    return seen


ADAPTERS = {"actor.old_logprob": "recompute", "actor.use_kl_loss": True, "model.lora.rank": 2}
TEACHER = {"algorithm.distillation.path": "random", "algorithm.distillation.form": "top_k"}

PLAYED = Path(__file__).parents[1] / "environments" / "played.py"
EPISODES = {"environment.path": f"{PLAYED}:OneTurn", "environment.turn_template": "{observation}"}


@pytest.mark.short("full")
@pytest.mark.long("adapters", "teacher")
@pytest.mark.parametrize(
    "changes",
    [{}, ADAPTERS, TEACHER, {"actor.policy_loss.loss_mode": "kl_cov"}, EPISODES],
    ids=["full", "adapters", "teacher", "drawn tokens", "episodes"],
)
def test_a_run_calls_these_programs(tmp_path, changes):
    config = small_config(tmp_path, **{**ONE_LAYER, **ONE_STEP, **changes})
    texts = {program.lower().as_text() for program in programs_of(config).programs}
    missing = [stage for stage, text in texts_of_a_run(config) if text not in texts]
    assert not missing


def test_shorter_responses_read_fewer_keys_of_the_pages(monkeypatch):
    attending = [paged_attention.attend_gathered, paged_attention_gpu.attend, paged_attention_gpu.attend]
    monkeypatch.setattr(rollout, "page_attention", lambda settings: (attending.pop(), ""))
    config = one_step(**{"data.max_response_length": 40, "rollout.decode_chunk_length": 8})
    longest = programs_of(config)
    shorter = programs_of(config, lengths=parse_lengths("lognormal:median=12,sigma=0.5", config.data))
    assert longest.sizes == shorter.sizes == {"slots": 128, "pages": longest.sizes["pages"], "page_tokens": 8}
    whole, _ = (program for program in longest.programs if program.stage == "decode")
    # prompts of 8 tokens, one page, and five chunks of the response
    own, prompts = 128 / 4 * 8 * 2, 128 / 4 * 8
    assert (whole.calls, whole.pairs) == (5, PagedKeys(own, prompts, prompts / config.rollout.n))
    chunks = sum(program.calls * program.pairs.own for program in shorter.programs if program.stage == "decode")
    assert 0 < chunks < whole.calls * whole.pairs.own
    assert shorter.work["decode"].computed < longest.work["decode"].computed
    gathered = programs_of(config)  # where no kernel attends, whole tables are read
    assert {program.pairs for program in gathered.programs if program.stage == "decode"} == {None}
    assert gathered.work["decode"].computed > longest.work["decode"].computed


def test_a_step_of_segments_begins_responses_and_continues_those_of_the_steps_before():
    """8 prompts of 8 tokens, 16 responses of 12 in segments of 5: per step 128 begin, and 2 x 128 continue."""
    carry = {"algorithm.filter_groups.leftover": "carry", "algorithm.filter_groups.leftover_max_staleness": 3}
    config = one_step(**carry, **{"data.max_response_length": 12, "rollout.segment_length": 5})
    step, flops = programs_of(config), token_flops(read_model(config.model)[0])
    assert step.sizes == {"slots": 128, "slot_tokens": 8 + 4, "continued_slots": 128, "continued_slot_tokens": 24 + 4}
    begun = 8 * flops.of_prompts(np.array([8.0]))
    again = 128 * flops.of_prompts(np.array([8.0 + 5, 8 + 10]))
    assert step.work["prefill"].needed == pytest.approx(begun + again)
    drawn = flops.of_responses(np.array([8.0, 8 + 5, 8 + 10]), np.array([[5.0], [5], [2]]))
    assert step.work["decode"].needed == pytest.approx(128 * drawn)
    assert sum(program.name.startswith("continued: prefill") for program in step.programs) == 1


def test_continued_responses_read_their_beginnings_each_alone(monkeypatch):
    monkeypatch.setattr(rollout, "page_attention", lambda settings: (paged_attention_gpu.attend, ""))
    carry = {"algorithm.filter_groups.leftover": "carry", "algorithm.filter_groups.leftover_max_staleness": 2}
    sizes = {"data.max_response_length": 16, "rollout.segment_length": 8, "rollout.decode_chunk_length": 8}
    step = programs_of(one_step(**carry, **sizes))
    begun, continued = (one.pairs for one in step.programs if one.stage == "decode" and one.calls)
    assert begun == PagedKeys(0.0, 32 * 8.0, 32 * 8.0 / 16)
    assert continued == PagedKeys(32 * 16.0, 0.0, 0.0)  # the prompt, and 8 tokens of the response


def test_passes_before_the_filter_and_with_hints_are_counted():
    def calls(name, **changes):
        step = programs_of(one_step(**changes))
        return sum(program.calls for program in step.programs if program.name.startswith(name))

    reference = "reference's log-probabilities"
    once = calls(reference, **{"actor.use_kl_loss": True})
    sampled = {"data.gen_batch_size": 3 * one_step().data.train_batch_size}
    assert calls(reference, **{"algorithm.use_kl_in_reward": True, **sampled}) == 3 * once > 0
    recomputed = calls("log-probabilities", **{"actor.old_logprob": "recompute"})
    assert calls("log-probabilities", **{"algorithm.adv_estimator": "cpo"}) == 2 * recomputed > 0


def test_what_no_program_of_the_preflight_has_is_named():
    assert report.left_out(RewardConfig(), AlgorithmConfig()) == []
    changed = RewardConfig(model=RewardModelConfig(path="reward")), AlgorithmConfig(adv_estimator="remax")
    assert report.left_out(*changed) == ["the reward model, in memory and time", "the greedy responses"]


def test_kinds_of_memory_are_counted_once_and_on_one_device():
    step = programs_of(one_step())
    for program in step.programs:
        arguments = program.lower().compile().memory_analysis()
        assert set(program.inside) | set(program.beside) <= set(KINDS)
        known = sum(program.inside.values())
        assert 0 < known <= arguments.argument_size_in_bytes + arguments.output_size_in_bytes, program.name
    update = next(program for program in step.programs if "optimizer step" in program.name)
    assert update.inside[GRADIENTS] == update.inside[PARAMETERS]
    assert update.inside[OPTIMIZER] == pytest.approx(2 * update.inside[PARAMETERS], abs=8)
    for kind in (PARAMETERS, OPTIMIZER):
        assert len({program.inside.get(kind, 0) + program.beside.get(kind, 0) for program in step.programs}) == 1


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_follow_from_the_lengths(packed):
    """Packed, there are fewer of them for shorter responses; by rows, equally many that are less wide."""
    config = one_step(**{"data.max_response_length": 40, "actor.use_dynamic_bsz": packed})
    longest = programs_of(config)
    shorter = programs_of(config, lengths=parse_lengths("lognormal:median=5,sigma=0.5", config.data))
    assert shorter.work["update"].needed < longest.work["update"].needed
    assert 0 < shorter.work["update"].efficiency <= 1 and 0 < longest.work["update"].efficiency <= 1
    assert shorter.work["update"].computed < longest.work["update"].computed
    if not packed:
        mesh = make_meshes(config, read_model(config.model)[0]).training
        rows = config.actor.ppo_mini_batch_size * config.rollout.n
        passes = rows // (config.actor.ppo_micro_batch_size_per_device * num_batch_shards(mesh))
        assert shorter.micro_batches == longest.micro_batches == 2 * passes
    same = parse_lengths("lognormal:median=40,sigma=0,prompt_median=8,prompt_sigma=0", config.data)
    found = programs_of(config, lengths=same)
    assert [(p.name, p.calls) for p in found.programs] == [(p.name, p.calls) for p in longest.programs]


def test_pairs_are_those_of_a_bin():
    """By rows, a share of the devices has several bins in a pass, each with all pairs of its slots."""
    config = one_step()
    arch = read_model(config.model)[0]
    mesh, networks = make_meshes(config, arch).training, trained(config)
    splits = all_micro_batches(networks, config.model, XLA, arch, mesh)
    (shape,) = StepBatch(config, networks, splits, mesh, all_longest(config.data), draws=False).updates["actor"]
    bins, slots = shape.micro_batch.bins.tokens.shape
    assert bins > num_batch_shards(mesh) and shape.pairs == slots**2


def test_rows_follow_from_the_memory():
    config = one_step(**{"rollout.max_num_seqs": 0, "data.max_response_length": 400})
    rows = [programs_of(config, memory=memory).rows for memory in (2e6, 2e7)]
    assert rows[0] < rows[1]
