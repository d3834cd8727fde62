"""rollout.engine: which engine a run has; a run with slots is that with waves."""

import dataclasses
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from shapes import ARCH, one_device_mesh
from small_policy import engine_settings
from small_run import rows_without_clock, small_config

from dapo_jax.errors import InputError
from dapo_jax.models import paged_attention_gpu, paged_attention_tpu
from dapo_jax.models.paged_attention import attend_gathered
from dapo_jax.rollout import engines
from dapo_jax.rollout.engines import build_engine, page_attention
from dapo_jax.rollout.slots import SlotEngine
from dapo_jax.rollout.waves import WaveEngine
from dapo_jax.training import train


@pytest.mark.parametrize(
    ("wanted", "kind", "reason"),
    [("auto", WaveEngine, "waves.*auto: "), ("waves", WaveEngine, "waves"), ("slots", SlotEngine, "slots")],
)
def test_the_log_says_which_engine_and_why(wanted, kind, reason, caplog):
    caplog.set_level(logging.INFO)
    assert isinstance(build_engine(wanted, engine_settings(one_device_mesh())), kind)
    (line,) = caplog.messages
    assert line.startswith(f"rollout.engine={reason.partition('.')[0]}") and ("auto" in line) == (wanted == "auto")


@pytest.mark.parametrize(
    ("device", "size", "length", "kernel"),
    [
        ("cpu", 20, 7, attend_gathered),
        ("tpu", 64, 48, paged_attention_tpu.attend),
        ("tpu", 192, 16, paged_attention_tpu.attend),
        ("tpu", 96, 32, None),
        ("tpu", 128, 8, None),
        ("gpu", 64, 32, paged_attention_gpu.attend),
        ("gpu", 96, 32, None),
        ("gpu", 128, 48, None),
    ],
)
def test_attention_to_pages_fits_the_devices(device, size, length, kernel, monkeypatch):
    monkeypatch.setattr(engines, "platform", lambda mesh: device)
    arch = dataclasses.replace(ARCH, head_dim=size)
    settings = SimpleNamespace(mesh=None, arch=arch, chunk_length=length)
    if kernel is None:
        with pytest.raises(InputError, match=f"on a {device.upper()}, not {size} and {length}: set"):
            page_attention(settings)  # pyright: ignore[reportArgumentType]
    else:
        assert page_attention(settings) is kernel  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_a_run_with_slots_is_that_with_waves(tmp_path):
    """With evaluation, back-filling and a checkpoint, in float32."""

    for engine in ("waves", "slots"):
        train(small_config(tmp_path / engine, **{"rollout.engine": engine, "model.dtype": "float32"}))
    for row, expected in zip(
        rows_without_clock(tmp_path / "slots"), rows_without_clock(tmp_path / "waves"), strict=True
    ):
        assert row.keys() == expected.keys()
        for name, value in row.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-4, err_msg=name)
