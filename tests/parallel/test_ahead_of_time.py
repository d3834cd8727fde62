import jax
import jax.numpy as jnp
import pytest

from dapo_jax.parallel import compilation
from dapo_jax.parallel.compilation import CACHE, EFFORTS, compile_ahead
from dapo_jax.parallel.mesh import make_mesh


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


def test_what_was_compiled_before_is_not_compiled_again(tmp_path, compilations):
    mesh = make_mesh(8, 1, 1)
    first = compile_ahead(lowered(64), mesh, directory=str(tmp_path))
    assert compile_ahead(lowered(64), mesh, directory=str(tmp_path)) == first and len(compilations) == 1
    assert "dot" in first.text and first.bytes >= 2 * 64 * 64 * 4


def test_another_program_option_mesh_or_compiler_is_compiled(tmp_path, compilations, monkeypatch):
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


def test_kernels_are_shared_in_the_file_that_is_named(tmp_path, compilations):
    compile_ahead(lowered(64), make_mesh(8, 1, 1), kernels=tmp_path / "kernels")
    assert compilations[0]["compiler_options"]["xla_gpu_kernel_cache_file"] == str(tmp_path / "kernels")


def test_nothing_is_kept_without_a_directory(tmp_path, compilations, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        compile_ahead(lowered(64), make_mesh(8, 1, 1))
    assert len(compilations) == 2 and not list(tmp_path.iterdir())
