"""Every program compiles for NVIDIA GPUs and TPUs that are not here. Run by scripts/test_accelerators.sh."""

import json
import os
import re

import jax
import pytest
from accelerators.cases import CASES, FAMILIES, small
from accelerators.programs import parts_of

from dapo_jax.parallel.ahead_of_time import compile_ahead
from dapo_jax.settings import compiler_options

WIDE = re.compile(r"tensor<[^>]*\b(f64|u?i64)>")  # nothing is computed in 64 bits


@pytest.mark.parametrize(
    ("case", "topology"),
    [pytest.param(case, topology, id=f"{topology} {case.name}") for case in CASES for topology in case.platforms],
)
def test_every_program_compiles(case, topology, tmp_path):
    values = small()
    if case.family:
        (tmp_path / "config.json").write_text(json.dumps(FAMILIES[case.family]))
        values.model.path = str(tmp_path)
    values.update_from_flattened_dict(case.changes)
    parts, directory = parts_of(values, topology, devices=case.devices), os.environ["DAPO_JAX_ACCELERATORS"]
    options = compiler_options(parts.config, parts.mesh)
    programs = list(case.programs(parts))  # outside of the mesh, on whose devices nothing can be computed
    with jax.set_mesh(parts.mesh):
        for name, lower in programs:
            try:
                lowered = lower()
                compile_ahead(lowered, parts.mesh, directory=directory, options=options)
            except Exception as error:
                pytest.fail(f"{case.name}: {name} does not compile for {topology}: {error}")
            assert not wide_types(lowered.as_text()), f"{case.name}: {name} computes in 64 bits"


def wide_types(text: str) -> list[str]:
    """Arrays of 64-bit numbers in a lowered program, apart from those in its attributes."""
    while (shorter := re.sub(r"\{[^{}]*\}|<\{[^{}]*\}>", "", text)) != text:
        text = shorter
    return [line for line in text.splitlines() if WIDE.search(line)]
