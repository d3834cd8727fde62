"""Law: samples and kept groups do not depend on the number of processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from ports import free_port
from waiting import LIMIT_S

from dapo_jax.parallel import processes
from dapo_jax.parallel.processes import gather

WORKER = Path(__file__).with_name("process_worker.py")
FILTER = "algorithm.filter_groups"


VARIANTS = (
    {f"{FILTER}.leftover": "requeue", f"{FILTER}.backfill": "stream"},
    {
        f"{FILTER}.leftover": "carry",
        f"{FILTER}.leftover_max_staleness": 3,
        "rollout.segment_length": 2,
        "data.max_response_length": 6,
        "rollout.engine": "slots",
    },
    # rows become fewer and the cache grows
    {f"{FILTER}.leftover": "carry", "mesh.fsdp": 2, "mesh.tensor": 2, "data.max_response_length": 80},
)
VARIANTS += ({**VARIANTS[-1], "rollout.engine": "slots", "rollout.decode_chunk_length": 8, "rollout.max_num_seqs": 16},)
BATCHES = 3


def collected(tmp_path, *, processes, devices):
    """What each process reports on its batches, by variant."""
    port = str(free_port())
    changes = [json.dumps({"model.random.num_layers": 1, **variant}) for variant in VARIANTS]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(WORKER.parents[2])}
    running = [
        subprocess.Popen(
            [sys.executable, WORKER, port, str(processes), str(i), tmp_path / f"{processes}.{i}", *changes],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode == 0 for process in running), [error[-3000:] for _, error in outputs]
    return [
        [json.loads(line.removeprefix("FOUND ")) for line in out.splitlines() if line.startswith("FOUND ")]
        for out, _ in outputs
    ]


@pytest.mark.slow
def test_processes_sample_and_keep_alike(tmp_path):
    one = collected(tmp_path, processes=1, devices=8)[0]
    first, second = collected(tmp_path, processes=2, devices=4)
    assert len(one) == BATCHES * len(VARIANTS) and first == second
    for found, expected in zip(first, one, strict=True):
        assert found.pop("logprob") == pytest.approx(expected.pop("logprob"), abs=1e-3)
        assert found == expected
    assert first[-BATCHES:] == first[-2 * BATCHES : -BATCHES], "slots draw the tokens of waves"


def test_messages_of_any_length_take_few_programs(monkeypatch):
    """JAX compiles and caches a gather for each length that is sent, 1.4 MB each."""
    lengths = set()

    def process_allgather(array):
        lengths.add(array.shape)
        return np.stack([array, array])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", process_allgather)
    for length in (*range(0, 3000, 7), 4094, 4095, 4096, 1_000_000):
        assert gather("é" * length) == ["é" * length] * 2
    assert gather(None) == [None] * 2 and len(lengths) < 12
