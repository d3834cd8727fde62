"""Programs are compiled once, in the background or when they are needed."""

import threading

import jax
import jax.numpy as jnp
import pytest
from shapes import one_device_mesh

from dapo_jax.parallel.compilation import Programs


def make_programs() -> Programs:
    return Programs(one_device_mesh())


def lowering(log, add, wait=None):
    def lower():
        if wait is not None:
            wait.wait(20)
        log.append((add, threading.current_thread().name))
        return jax.jit(lambda x: x + add).lower(jnp.float32(0))

    return lower


def test_a_program_is_compiled_once_and_in_the_background_if_it_is_prepared():
    programs, log = make_programs(), []
    programs.prepare("one", lowering(log, 1))
    assert programs.get("one", lowering(log, 5))(jnp.float32(2)) == 3 and programs.get("one", lowering(log, 5))
    assert [add for add, _ in log] == [1] and log[0][1].startswith("compile")
    assert programs.get("two", lowering(log, 2))(jnp.float32(2)) == 4
    assert log[-1] == (2, threading.current_thread().name)
    programs.close()


def test_what_is_needed_does_not_wait_for_what_may_be():
    programs, log, gate = make_programs(), [], threading.Event()
    programs.prepare("slow", lowering(log, 1, wait=gate))
    programs.prepare("later", lowering(log, 2))
    assert programs.get("later", lowering(log, 3))(jnp.float32(0)) == 3 and [add for add, _ in log] == [3]
    gate.set()
    assert programs.get("slow", lowering(log, 4))(jnp.float32(0)) == 1
    programs.close()
    assert [add for add, _ in log] == [3, 1]


def test_a_failure_in_the_background_is_tried_again_where_it_is_seen(caplog):
    programs, log = make_programs(), []

    def fails():
        raise ValueError("out of luck")

    programs.prepare("key", fails)
    assert programs.get("key", lowering(log, 1))(jnp.float32(0)) == 1 and "cannot compile key" in caplog.text
    with pytest.raises(ValueError, match="out of luck"):
        programs.get("other", fails)
    assert programs.get("other", lowering(log, 2))(jnp.float32(0)) == 2
    programs.close()
