"""Every test runs on eight fake CPU devices; the environment is set before JAX is first imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Compiling is most of the tests' time: one XLA pass less, the same arithmetic.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
