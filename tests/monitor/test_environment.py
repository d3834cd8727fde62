import os

import jax

from dapo_jax.monitor.environment import environment, recorded_environment, write_environment


def test_a_run_says_what_it_ran_on_and_with(tmp_path):
    write_environment(tmp_path)
    found = recorded_environment(tmp_path)
    assert found == environment()
    assert found["versions"]["jax"] == jax.__version__ and {"python", "jaxlib", "optax"} <= found["versions"].keys()
    assert (found["devices"], found["processes"]) == ("8 x cpu", 1)
    assert found["host"].endswith(f", {os.cpu_count()} cores") and not found["host"].startswith(",")
