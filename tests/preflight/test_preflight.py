import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax
import numpy as np
import pytest
from forked import options
from jax.sharding import Mesh
from shapes import BATCHES, mesh_of
from small_run import load_config, small_config

from dapo_jax.config.values import freeze
from dapo_jax.models.weights import count_params
from dapo_jax.parallel.devices import GIB, Limits, limits_of
from dapo_jax.parallel.mesh import Meshes, make_mesh
from dapo_jax.preflight import calibration, report
from dapo_jax.preflight import tables as tables_module
from dapo_jax.preflight.__main__ import main
from dapo_jax.preflight.advice import advise
from dapo_jax.preflight.calibration import Kernel
from dapo_jax.preflight.compiled import CACHE, DECODING, KINDS, OPTIMIZER, PARAMETERS, Compiled, Program, refused
from dapo_jax.preflight.hlo_costs import Collective, Costs
from dapo_jax.preflight.programs import Step
from dapo_jax.preflight.report import CLASSES, preflight, read_shape, realistic_seconds, seconds, totals, usable_memory
from dapo_jax.preflight.tables import tables

ROOT = Path(__file__).parents[2]
DIVIDED = {"mesh.fsdp": 4, "mesh.tensor": 2}
TINY = options(DIVIDED)
STAGES = ["weights", "prefill", "decode", "log-probabilities", "update"]


def test_the_report_for_a_slice_that_is_not_here(tmp_path):
    """The command in its own process: libtpu compiles the tiny recipe for eight chips."""
    pytest.importorskip("libtpu")
    command = [sys.executable, "-m", "dapo_jax.preflight", *TINY, "--topology=v5e:2x4", "--json", str(tmp_path / "r")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "r").read_text())
    check(report)
    assert report["device"]["name"] == "TPU v5e" and report["model"]["dtype"] == "bfloat16"
    assert "It fits" in done.stdout and tables_module.EPISODES not in done.stdout and "| update |" in done.stdout
    assert report["step_seconds"] > 0
    # From fsdp 8 to tensor 2, then whole over fsdp: nothing is gathered by all eight. Some compilers swap one weight.
    moved = {(one["kind"], one["devices"]) for one in report["stages"]["weights"]["collectives"]}
    assert moved - {("collective-permute", 2)} == {("all-to-all", 2), ("all-gather", 4)}


@pytest.mark.slow
def test_the_report_for_a_cpu(monkeypatch, capsys):
    """The command without a topology prints the tables, and the report on its own line."""
    monkeypatch.chdir(ROOT)
    played = {"environment.path": "tests/environments/played.py:OneTurn"}
    main(options({**DIVIDED, **BATCHES, **played, "model.random.num_layers": 1}))
    printed, _, line = capsys.readouterr().out.rstrip().rpartition("\n")
    report = json.loads(line)
    check(report)
    assert (
        tables_module.EPISODES in printed
        and report["step_seconds"] is None
        and printed == tables(report).rstrip()
        and "s products" in printed
    )


@pytest.mark.slow
def test_the_expected_time_at_lengths_is_reported_beside_the_longest_case(monkeypatch):
    monkeypatch.setattr(report, "limits_of", lambda device: Limits("device", 10 * GIB, 1e9, 1e9, 1e9))
    monkeypatch.setattr(report, "rates_of", lambda limits, dtype: (calibration.H100, "at rates of another"))
    changes = {"data.max_prompt_length": 8, "data.max_response_length": 60, "rollout.max_num_seqs": 64}
    config = small_config("unused", **DIVIDED, **changes)
    found = preflight(config, "cpu", lengths="lognormal:median=10,sigma=0.3")
    expected, longest = found["expected"], found["stages"]
    assert expected["response_tokens"]["median"] == pytest.approx(10, abs=1) and expected["prompt_tokens"]["max"] == 8
    assert 0 < expected["step_seconds"] < found["step_seconds"] and found["fits"]
    for name in ("decode", "update"):
        assert 0 < expected["stages"][name]["seconds"]["total"] < longest[name]["seconds"]["total"]
        assert expected["stages"][name]["calls"] == sum(
            program["expected_calls"] for program in found["programs"] if program["stage"] == name
        )
    assert set(expected["efficiency"]) == {"prefill", "decode", "update"}
    assert all(0 < share <= 1 for share in expected["efficiency"].values())
    text = tables(found)
    assert "Expected at lognormal:median=10,sigma=0.3,clip=60,within=0.5,prompt_median=8,prompt_sigma=0.5" in text
    assert "| s, longest case | needed / computed |" in text and "at the expected lengths." in text
    assert "\nAbout: at rates of another. Links count at their peak" in text and "by class of kernels" not in text
    assert "\nSeconds to expect at the expected lengths, by class of kernels" in tables(found, realistic=True)
    for stage in (*longest.values(), *expected["stages"].values()):
        assert stage["realistic"]["total"] > stage["seconds"]["total"] or not stage["calls"]
    assert f"about {expected['realistic_seconds']:.0f} s (at least {expected['step_seconds']:.0f} s) at the exp" in text
    plan = found["assumed"]
    assert "4 steps take about 0.0 h, 0 device-hours (at least 0.0 h, 0 device-hours); with 3 evaluations" in text
    assert tables_module._responses_of_evaluation(found["config"])[0] == 4 * found["config"]["evaluate"]["n"]
    files = {"task": "files", "val_files": ("data/aime-2024.parquet", "mine.jsonl")}
    tasks = json.dumps({"gsm8k": {"files": "hf://openai/gsm8k/main/test@main", "n": 1, "max_prompts": 1000}})
    of_files = {"data": files, "evaluate": {"tasks": tasks, "n": 32, "max_prompts": -1}}
    assert tables_module._responses_of_evaluation(of_files) == (30 * 32 + 1000, ["mine.jsonl"])
    found["config"]["trainer"] |= {"total_training_steps": 36_000, "test_freq": -1, "val_before_train": False}
    found["config"]["evaluate"]["n"] = 36_000 * plan["prompts_sampled"] * found["config"]["rollout"]["n"] // 4
    for kind, word in (("seconds", "at least"), ("realistic", "about")):
        of_stages = {name: stage[kind]["total"] for name, stage in expected["stages"].items()}
        sampling = of_stages["prefill"] + of_stages["decode"]
        hours = 10 * (sum(of_stages.values()) + sampling)  # the last evaluation samples as all steps
        assert f"{word} {hours:,.{int(hours < 10)}f} h, {8 * hours:,.0f} device-hours" in tables(found)


def check(report):
    assert list(report["stages"]) == STAGES
    assert report["mesh"] == {"data": 1, "fsdp": 4, "tensor": 2}
    assert report["training_mesh"] == {"data": 1, "fsdp": 8, "tensor": 1}
    assert report["fits"] and not report["advice"] and "expected" not in report
    stages = report["stages"]
    # bytes on one of eight devices; norms are replicated
    own = report["model"]["parameters"] * 4 / 8
    assert own < stages["update"]["bytes"]["parameters"] < 1.1 * own
    assert stages["update"]["bytes"]["optimizer"] == pytest.approx(2 * stages["update"]["bytes"]["parameters"], abs=8)
    assert report["peak_bytes"] == max(sum(stage["bytes"].values()) for stage in stages.values())
    for name in ("prefill", "decode", "update"):
        assert stages[name]["flops"] > 0 and stages[name]["moved"] > 0 and stages[name]["sent"] > 0
    # forward and backward of all layers, on the rows of one device
    trained = report["assumed"]["prompts_trained"] * report["config"]["rollout"]["n"]
    tokens = trained * report["assumed"]["response_length"]
    layers = (report["model"]["parameters"] - 48 * 128) / 8
    assert stages["update"]["flops"] > 6 * layers * tokens


@pytest.mark.parametrize(("most", "problems"), [(-1, 2 * 64), (100, 100)])
def test_each_data_set_of_reasoning_gym_has_held_out_problems_of_which_the_first_are_asked(most, problems):
    gym = {"task": "reasoning_gym", "reasoning_gym": {"datasets": ["chain_sum", "leg_counting"], "num_heldout": 64}}
    config = {"data": gym, "evaluate": {"tasks": "{}", "n": 4, "max_prompts": most}}
    assert tables_module._responses_of_evaluation(config) == (4 * problems, [])


def test_a_shape_replaces_a_model_that_is_not_on_the_disk(tmp_path):
    def arch(path):
        values = load_config("dapo_qwen2.5_7b_math")
        values.model.path = str(path)
        return read_shape(freeze(values).model)

    published = {"0.5B": 494_032_768, "1.5B": 1_543_714_304, "7B": 7_615_616_512, "32B": 32_763_876_352}
    for size, parameters in published.items():  # counted in the safetensors on the hub
        assert count_params(arch(f"nowhere/Qwen2.5-{size}")) == parameters
    assert arch("nowhere/Qwen2.5-7B-Instruct") == arch("nowhere/Qwen2.5-7B")
    shutil.copy(ROOT / "configs/shapes/Qwen2.5-0.5B/config.json", tmp_path)
    assert arch(tmp_path) == arch("nowhere/Qwen2.5-0.5B")
    with pytest.raises(ValueError, match="nowhere/Other does not exist on this machine"):
        arch("nowhere/Other")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths=lognormal:median=9"], "dapo_jax: --lengths=lognormal:median=9 must have a sigma: write it like"),
        (["--topology=h100"], "dapo_jax: --topology=h100 must be h100:GPUS"),
        (["--topology=v99:2x2"], "dapo_jax: --topology=v99:2x2 must be a TPU slice"),
        (["--config.mesh.data=3"], "mesh.data=3 x mesh.fsdp=4 x mesh.tensor=2 must be the number of devices, 8"),
    ],
)
def test_what_cannot_be_compiled_for_ends_in_one_line(monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(ROOT)
    assert jax.device_count() == 8  # JAX has started with these devices
    with pytest.raises(SystemExit) as ended:
        main([*TINY, *arguments])
    printed = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and len(printed) == 1 and message in printed[0]


def absent(kind, platform):
    """A mesh with one absent device."""
    device = SimpleNamespace(device_kind=kind, platform=platform)
    return cast(Mesh, SimpleNamespace(devices=np.array([[[device]]])))


def test_the_usable_memory_is_what_is_free_here_and_the_share_that_jax_takes_of_an_absent_gpu(monkeypatch):
    mesh = make_mesh(8, 1, 1)
    monkeypatch.setattr(report, "free_bytes", {mesh: 3.0 * GIB}.get)
    assert usable_memory(0.5, mesh, LIMIT) == 3 * GIB
    assert usable_memory(0.5, absent("NVIDIA H100 80GB HBM3", "gpu"), LIMIT) == 5 * GIB
    assert usable_memory(0.5, absent("TPU v5", "tpu"), LIMIT) == 10 * GIB
    with pytest.raises(ValueError, match="the memory of TPU v1 is unknown: choose one of TPU v4, .*H100"):
        usable_memory(0.5, absent("TPU v1", "tpu"), limits_of(SimpleNamespace(device_kind="TPU v1")))


LIMIT = Limits("device", 10 * GIB, 100.0, 10.0, 1.0)
COSTS = Costs(flops=200.0, bytes=30.0, collectives=(Collective("all-reduce", 4, 4, 2, 5.0),))


def test_the_time_is_that_of_the_slower_of_products_and_memory_and_of_collectives():
    assert seconds(COSTS, LIMIT) == {"products": 2.0, "memory": 3.0, "collectives": 5.0, "total": 8.0}
    assert seconds(COSTS, Limits("other", None, None, None, None)) is None


def kernels(*given):
    """The costs of kernels that are launched four times each, given by class, FLOPs and bytes."""
    flops, moved = (4 * sum(kernel[at] for kernel in given) for at in (1, 2))
    collectives = COSTS.collectives
    return Costs(flops, moved, collectives, kernels=tuple((Kernel(*kernel), 4.0) for kernel in given))


H100, RATES = limits_of(SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")), calibration.H100


def test_the_time_to_expect_is_that_of_each_kernel_and_never_less_than_the_bound():
    wide = calibration.WIDE_ATTENTION
    many = [(kind, flops, moved) for kind in RATES.flops for flops in (0.0, 1e12) for moved in (1e6, 1e10)]
    for costs in (kernels(*many), *(kernels(one) for one in many)):
        found, bound = realistic_seconds(costs, H100, RATES), seconds(costs, H100)
        assert found["total"] > bound["total"] and found["collectives"] == bound["collectives"]
        assert sum(found[part] for part in CLASSES[:-1]) == pytest.approx(found["total"])
    computed = ("products", 6.65e12, 1e6), ("attention", 2.56e12, 1e6), (wide, 4.1e12, 1e6)
    found = realistic_seconds(kernels(*computed, ("elementwise", 0.0, 2.73e9)), H100, RATES)
    assert [found[part] for part in CLASSES[:4]] == pytest.approx([0.04, 0.08, 0.004, 4 * 4 * 3.6e-6])
    assert realistic_seconds(COSTS, H100, None) is None


@pytest.mark.parametrize(
    ("kind", "dtype", "words"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", "at what one H100 has reached .*2026-11-26, commit e321cd7"),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", "at the shares of the peaks that one H100 .*, not measured on A100"),
        ("NVIDIA H100 80GB HBM3", "float32", "no kernels in float32 have been measured"),
        ("Tesla T4", "bfloat16", "no kernels on T4 have been measured"),
        ("TPU v5", "bfloat16", "no kernels on TPU v5p have been measured"),
        ("cpu", "bfloat16", "no kernels on cpu have been measured"),
    ],
)
def test_rates_are_those_of_an_h100_for_gpus_like_it_and_say_so(kind, dtype, words):
    rates, source = calibration.rates_of(limits_of(SimpleNamespace(device_kind=kind)), dtype)
    assert re.match(words, source) and (rates is None) == source.startswith("no kernels")


def measured(stage="update", costs: Costs | None = COSTS, calls=2.0, **gib):
    """A compiled program that needs these GiB by kind."""
    sizes = {name.replace("_", " "): size * GIB for name, size in gib.items()}
    program = Program(stage, f"{stage} of something", calls, lambda: pytest.fail(), sizes)
    return Compiled(program, {kind: sizes.get(kind, 0.0) for kind in (*KINDS, "temporaries")}, costs, 0.0)


def test_a_step_adds_up_its_calls_and_its_peak_is_the_largest_program():
    found = totals([measured(parameters=2), measured(parameters=2, temporaries=3, calls=1)], LIMIT, LIMIT.memory)
    update = found["stages"]["update"]
    assert (update["calls"], update["flops"], update["sent"]) == (3, 600.0, 15.0)
    assert update["collectives"] == [{"kind": "all-reduce", "devices": 4, "per_host": 4, "count": 6, "bytes": 15.0}]
    assert found["step_seconds"] == 24.0 and found["peak_bytes"] == 5 * GIB and found["fits"]
    assert found["realistic_seconds"] is None
    launched = kernels(("products", 1e12, 1e6))
    found = totals([measured(costs=launched), measured("decode", launched, 0.5)], H100, H100.memory, RATES)
    assert [stage["kernels"] for stage in found["stages"].values()] == [8, 2]
    once = realistic_seconds(launched, H100, RATES)["total"]
    assert found["step_seconds"] < found["realistic_seconds"] == pytest.approx(2.5 * once)


@pytest.mark.parametrize(
    ("message", "temporaries"),
    [
        ("E1000: the total memory required for HLO temporaries (26.50G) exceeds available HBM (15.75G).", 26.5 * GIB),
        ("Ran out of memory in memory space hbm. Used 31.50G of 15.75G hbm. Exceeded by 15.75G.", 29.5 * GIB),
        ("Ran out of memory in memory space vmem. Used 130M of 128M vmem.", None),
        ("INTERNAL: something else", None),
    ],
)
def test_the_size_of_what_the_compiler_refuses_is_read_from_its_message(message, temporaries):
    assert refused(message, 2 * GIB) == temporaries


def test_what_the_compiler_refuses_does_not_fit():
    assert not totals([measured(parameters=1, costs=None)], LIMIT, LIMIT.memory)["fits"]


XLA_SCORES = {"data.max_response_length": 4096}
RECOMPUTED = {"model.enable_gradient_checkpointing": True}
CACHED = measured("decode", **{CACHE.replace(" ", "_"): 16, "parameters": 2})


def advice_of(taken, changes, *meshes, gib=10, **sizes):
    """What is advised on a step that needs so much, where a device has so many GiB."""
    config, step = small_config("unused", **changes), Step((), 0.0, sizes, rows=128, micro_batches=1)
    training, sampling = (mesh_of(shape) for shape in (meshes * 2)[:2])
    return advise(
        config, read_shape(config.model), Meshes(training, sampling), step, [taken], gib * GIB, attention="xla"
    )


@pytest.mark.parametrize(
    ("taken", "changes", "advice"),
    [
        (measured(temporaries=11), {**XLA_SCORES, "model.attention": "xla"}, "set model.attention=fused"),
        (measured(temporaries=11), {**XLA_SCORES, "model.dtype": "float32"}, "set model.dtype=bfloat16"),
        (measured(temporaries=11), {}, "set model.enable_gradient_checkpointing=True"),
        (measured(temporaries=11), RECOMPUTED, "set actor.ppo_micro_batch_size_per_device=2"),
        (measured(optimizer=11), {}, "set actor.optim.offload=True"),
        (CACHED, {}, "set rollout.max_num_seqs=64"),
        (measured("decode", **{DECODING.replace(" ", "_"): 11}), {}, "set mesh.tensor=2 and mesh.fsdp=2"),
    ],
    ids=["scores", "scores in float32", "kept", "rows", "moments", "cache", "weights"],
)
def test_advice_names_the_setting_to_change_first(taken, changes, advice):
    (line,) = advice_of(taken, changes, (1, 4, 1))
    assert line.split("; ")[1].startswith(advice), line
    assert not advice_of(taken, changes, (1, 4, 1), gib=99)


def test_pages_leave_room_for_what_is_computed():
    (line,) = advice_of(measured("decode", KV_cache=6, parameters=2, temporaries=4), {}, (1, 4, 1), pages=999)
    assert line.split("; ")[1] == "set rollout.kv_memory_share=0.5"


def test_passes_that_do_not_fit_are_divided_by_more_tensor_in_training_alone():
    assert read_shape(small_config("unused").model).num_kv_heads == 2
    for training, proposed in (((1, 8, 1), True), ((1, 4, 2), False)):
        (line,) = advice_of(measured(temporaries=11), RECOMPUTED, training, (1, 4, 2))
        assert ("set mesh.train_tensor=2" in line) == proposed and "mesh.tensor" not in line
        assert ("set mesh.context=2" in line) != proposed


def test_copies_of_the_parameters_are_divided_before_anything_is_offloaded():
    (line,) = advice_of(measured(**{OPTIMIZER: 6, PARAMETERS: 5}), {}, (2, 4, 1))
    assert line.split("; ")[1] == "set mesh.fsdp=8 and mesh.data=1"
