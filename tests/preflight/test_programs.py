import pytest
from small_run import small_config

from dapo_jax.base_models import read_model
from dapo_jax.learner import trainable
from dapo_jax.meshes import make_meshes
from dapo_jax.preflight.programs import CACHE, GRADIENTS, KINDS, OPTIMIZER, PARAMETERS, step_programs
from dapo_jax.rollout import waves
from dapo_jax.rollout.programs import Programs
from dapo_jax.train import train

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
}


def programs_of(config, **changes):
    arch, tokenizer = read_model(config)
    meshes = make_meshes(config, arch)
    length = config.data.max_response_length
    values = {"response_length": length, "memory": 1e9, "eos_ids": tokenizer.eos_ids, "pad_id": tokenizer.pad_id}
    return step_programs(config, arch, meshes, **{**values, **changes})


def texts_of_a_run(config) -> set[tuple[str, str]]:
    """The lowered text of what a run of one step calls."""
    seen = set()
    call, get, start_wave = trainable.WithFrozen.__call__, Programs.get, waves.start_wave

    def called(self, *arguments):
        seen.add(("learner", self.lower(*arguments).as_text()))
        return call(self, *arguments)

    def got(self, key, lower):
        seen.add(("decode", lower().as_text()))
        return get(self, key, lower)

    def started(*arguments, **static):
        seen.add(("prefill", start_wave.lower(*arguments, **static).as_text()))
        return start_wave(*arguments, **static)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainable.WithFrozen, "__call__", called)
        patch.setattr(Programs, "get", got)
        patch.setattr(waves, "start_wave", started)
        train(config)
    return seen


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"actor.old_logprob": "recompute", "actor.use_kl_loss": True, "model.lora.rank": 2}, marks=pytest.mark.slow
        ),
        pytest.param(
            {
                "actor.policy_loss.loss_mode": "kl_cov",
                "actor.use_dynamic_bsz": True,
                "actor.ppo_max_token_len_per_device": 30,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["full", "adapters", "drawn_tokens"],
)
def test_a_run_calls_these_programs(tmp_path, changes):
    config = small_config(tmp_path, **ONE_STEP, **changes)
    texts = {program.lower().as_text() for program in programs_of(config).programs}
    missing = [stage for stage, text in texts_of_a_run(config) if text not in texts]
    assert not missing


def test_kinds_of_memory_are_counted_once_and_on_one_device():
    config = small_config("unused", **ONE_STEP)
    step = programs_of(config)
    for program in step.programs:
        arguments = program.lower().compile().memory_analysis()
        assert set(program.inside) | set(program.beside) <= set(KINDS)
        known = sum(program.inside.values())
        assert 0 < known <= arguments.argument_size_in_bytes + arguments.output_size_in_bytes, program.name
    update = next(program for program in step.programs if "optimizer step" in program.name)
    assert update.inside[GRADIENTS] == update.inside[PARAMETERS]
    assert update.inside[OPTIMIZER] == pytest.approx(2 * update.inside[PARAMETERS], abs=8)
    everywhere = [
        {kind: program.inside.get(kind, 0) + program.beside.get(kind, 0) for kind in (PARAMETERS, OPTIMIZER)}
        for program in step.programs
    ]
    assert all(found == everywhere[0] for found in everywhere)


def test_calls_of_the_windows_between_are_shared_out():
    config = small_config("unused", **{**ONE_STEP, "data.max_response_length": 400})

    def decoding(every):
        step = programs_of(config, every_window=every)
        found = [program for program in step.programs if program.name.startswith("decode ") and program.calls]
        return sum(p.calls for p in found), sum(p.calls * p.inside[CACHE] for p in found), len(found)

    calls, moved, windows = decoding(True)
    assert windows > 2
    assert decoding(False) == (pytest.approx(calls), pytest.approx(moved), 2)


def test_rows_follow_from_the_memory():
    config = small_config("unused", **{**ONE_STEP, "rollout.max_num_seqs": 0, "data.max_response_length": 400})
    rows = [programs_of(config, memory=memory).rows for memory in (2e6, 2e7)]
    assert rows[0] < rows[1]
