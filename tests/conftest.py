"""Every test runs on eight fake CPU devices; the environment is set before JAX is first imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
