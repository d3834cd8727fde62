"""Programs are compiled once: in the background, when they are needed, or ahead of time for other devices."""

import threading

import jax
import jax.numpy as jnp
import pytest
from shapes import one_device_mesh

from dapo_jax.parallel import compilation
from dapo_jax.parallel.compilation import CACHE, EFFORTS, Programs, compile_ahead
from dapo_jax.parallel.mesh import make_mesh


def lowering(log, add, wait=None):
    def lower():
        if wait is not None:
            wait.wait(20)
        log.append((add, threading.current_thread().name))
        return jax.jit(lambda x: x + add).lower(jnp.float32(0))

    return lower


def test_a_program_is_compiled_once_and_in_the_background_if_it_is_prepared():
    programs, log = Programs(one_device_mesh()), []
    programs.prepare("one", lowering(log, 1))
    assert programs.get("one", lowering(log, 5))(jnp.float32(2)) == 3 and programs.get("one", lowering(log, 5))
    assert [add for add, _ in log] == [1] and log[0][1].startswith("compile")
    assert programs.get("two", lowering(log, 2))(jnp.float32(2)) == 4
    assert log[-1] == (2, threading.current_thread().name)
    programs.close()


def test_what_is_needed_does_not_wait_for_what_may_be():
    programs, log, gate = Programs(one_device_mesh()), [], threading.Event()
    programs.prepare("slow", lowering(log, 1, wait=gate))
    programs.prepare("later", lowering(log, 2))
    assert programs.get("later", lowering(log, 3))(jnp.float32(0)) == 3 and [add for add, _ in log] == [3]
    gate.set()
    assert programs.get("slow", lowering(log, 4))(jnp.float32(0)) == 1
    programs.close()
    assert [add for add, _ in log] == [3, 1]


def test_a_failure_in_the_background_is_tried_again_where_it_is_seen(caplog):
    programs, log = Programs(one_device_mesh()), []

    def fails():
        raise ValueError("out of luck")

    programs.prepare("key", fails)
    assert programs.get("key", lowering(log, 1))(jnp.float32(0)) == 1 and "cannot compile key" in caplog.text
    with pytest.raises(ValueError, match="out of luck"):
        programs.get("other", fails)
    assert programs.get("other", lowering(log, 2))(jnp.float32(0)) == 2
    programs.close()


def lowered(size, **options):
    shape = jax.ShapeDtypeStruct((size, size), jnp.float32)
    return jax.jit(lambda x: x @ x, compiler_options=options).lower(shape)


@pytest.fixture
def compilations(monkeypatch):
    """The number of compiled programs."""
    monkeypatch.delenv(CACHE, raising=False)
    count, compile_now = [], jax.stages.Lowered.compile

    def counted(self, **options):
        count.append(options)
        return compile_now(self, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    return count


def test_what_was_compiled_before_is_not_compiled_again(tmp_path, compilations, monkeypatch):
    """Another program, option, mesh or compiler is."""
    mesh = make_mesh(8, 1, 1)
    first = compile_ahead(lowered(64), mesh, directory=str(tmp_path))
    assert compile_ahead(lowered(64), mesh, directory=str(tmp_path)) == first and len(compilations) == 1
    assert "dot" in first.text and first.bytes >= 2 * 64 * 64 * 4

    def again(size=64, mesh=None, **options):
        compile_ahead(lowered(size, **options), mesh or make_mesh(8, 1, 1), directory=str(tmp_path))
        return len(compilations)

    assert [again(), again(size=32), again(xla_embed_ir_in_executable=True)] == [1, 2, 3]
    assert again(mesh=make_mesh(1, 1, 1, jax.devices()[:1])) == 4
    effort = next(name for name in EFFORTS if name in jax.config.values)
    before = jax.config.values[effort]
    jax.config.update(effort, "O1" if effort == "jax_optimization_level" else -1.0)
    try:
        assert again() == 5
    finally:
        jax.config.update(effort, before)
    monkeypatch.setattr(compilation, "_version", lambda package: "9.9")
    assert again() == 6


def test_nothing_is_kept_without_a_directory_and_kernels_are_shared_in_the_file_that_is_named(
    tmp_path, compilations, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for kernels in (None, tmp_path / "kernels"):
        compile_ahead(lowered(64), make_mesh(8, 1, 1), kernels=kernels)
    assert len(compilations) == 2 and not list(tmp_path.iterdir())
    assert compilations[1]["compiler_options"]["xla_gpu_kernel_cache_file"] == str(tmp_path / "kernels")
