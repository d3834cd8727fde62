"""A case whose programs and compilers are as when it last compiled is not compiled again.

compiled.json has the digest of each test with which it passed. A run that compiles something new adds it: commit that.
The tests need the compilers that scripts/test_accelerators.sh installs; elsewhere they are left out.
"""

import hashlib
import inspect
import json
import os
from pathlib import Path

import pytest

collect_ignore = [] if "DAPO_JAX_ACCELERATORS" in os.environ else ["test_compiles.py"]
RECORD = Path(__file__).with_name("compiled.json")
passed: dict[str, str] = {}  # of the process that reports, whichever ran the test


@pytest.fixture
def unchanged(request, record_property):
    """A function that skips the test if it has passed with programs of these keys and the body it has now.

    Constants of the file are not compared: after a change of one, set DAPO_JAX_COMPILE_ALL.
    """

    def skip(keys):
        name = request.node.name
        whole = "\n".join([inspect.getsource(request.function), *keys])
        digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
        if json.loads(RECORD.read_text()).get(name) == digest and "DAPO_JAX_COMPILE_ALL" not in os.environ:
            pytest.skip("compiled before, and unchanged since")
        record_property("digest", digest)

    return skip


def pytest_runtest_logreport(report):
    digest = dict(report.user_properties).get("digest")
    if report.when == "call" and report.passed and digest is not None:
        passed[report.nodeid.partition("::")[2]] = digest


def pytest_sessionfinish(session):
    if passed and not hasattr(session.config, "workerinput"):
        record = json.loads(RECORD.read_text()) | passed
        RECORD.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n")
        print(f"\n{len(passed)} more compile: commit {RECORD}")
