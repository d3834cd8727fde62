"""Every test runs on eight fake CPU devices; the environment is set before JAX is first imported."""

import atexit
import dataclasses
import fcntl
import gc
import importlib.metadata
import os
import pickle
import resource
import shutil
import tempfile
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# Compiling is most of the tests' time: fewer passes, the same arithmetic.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_FLAGS += " --xla_cpu_parallel_codegen_split_count=1"  # the workers are parallel
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"  # the older emitters compile in half the time; gone since
    # XLA ends a process whose devices wait 40 s for each other, as they may on a busy machine.
    _FLAGS += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
# A worker has it from the process that started it; compilers of accelerators know no flags of CPUs.
if "PYTEST_XDIST_WORKER" not in os.environ and "DAPO_JAX_ACCELERATORS" not in os.environ:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
    # The same program is compiled once in a session, however many runs and processes it is part of.
    _CACHE = tempfile.mkdtemp(prefix="jax_cache_")
    atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# No test reaches the Hugging Face hub or this user's cache of it: hub_server.py stands in.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
os.environ["HF_HOME"] = "/nonexistent/huggingface"
os.environ.pop("HF_HUB_OFFLINE", None)

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

MAPPINGS = Path("/proc/self/maps")  # of memory, a line for each


# The part of the short lane's CPU seconds that one test may take, with the processes it starts: ten seconds where the
# lane takes 360, on a machine of any speed. .ci/run sets it, nobody else.
CPU_SHARE = float(os.environ.get("DAPO_JAX_TEST_CPU_SHARE", "inf"))
CPU_SECONDS = {}  # of each test of the short lane, without fixtures


@pytest.hookimpl(tryfirst=True)  # before the choice by marks
def pytest_collection_modifyitems(items):
    """Gives the marks slow or full to the cases that a test's marks short and long do not name."""
    for item in items:
        short, long = item.get_closest_marker("short"), item.get_closest_marker("long")
        if short is not None and not _names(short, item):
            item.add_marker(pytest.mark.slow if long is None or _names(long, item) else pytest.mark.full)
        elif short is None and long is not None and not _names(long, item):
            item.add_marker(pytest.mark.full)


def _names(mark, item):
    return any(text in item.callspec.id for text in mark.args)


def _cpu_seconds():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    before = _cpu_seconds()
    try:
        return (yield)
    finally:
        if not any(item.get_closest_marker(name) for name in ("slow", "full")):
            item.user_properties.append(("cpu_seconds", _cpu_seconds() - before))


def pytest_runtest_logreport(report):
    taken = dict(report.user_properties).get("cpu_seconds")
    if report.when == "call" and taken is not None:
        CPU_SECONDS[report.nodeid] = taken


@pytest.hookimpl(tryfirst=True)  # before the summary
def pytest_sessionfinish(session):
    """Names the tests of the short lane that take too much of it, and fails."""
    if hasattr(session.config, "workerinput"):  # only the process that has every report
        return
    total = sum(CPU_SECONDS.values())
    for test, taken in CPU_SECONDS.items():
        if taken > CPU_SHARE * total:
            share = f"{taken / total:.1%} of the short lane's CPU seconds, {CPU_SHARE:.1%} are allowed"
            print(f"\nFAILED {test} took {taken:.1f} s, {share}: shorten it or mark it slow")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def of_frozen(actor, frozen):
    """The same functions with other weights than the adapters."""

    def bound(function):
        return dataclasses.replace(function, frozen=frozen)

    trainable = dataclasses.replace(actor.trainable, accumulate=bound(actor.trainable.accumulate))
    return dataclasses.replace(
        actor, trainable=trainable, decode_weights=bound(actor.decode_weights), statistics=bound(actor.statistics)
    )


def return_mappings(most):
    """A compiled program holds three or more, a worker compiles thousands, and XLA aborts at Linux' 65,530."""
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > most:
        import jax

        gc.unfreeze()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _mappings_of_modules_are_returned():
    yield
    return_mappings(20_000)
    gc.freeze()  # a million objects of traced programs, which a collection would walk over again and again


@pytest.fixture(autouse=True)
def _mappings_of_slow_tests_are_returned():
    """A dozen runs of a whole training in one module, with thousands each, reach the limit before it ends."""
    start = time.perf_counter()
    yield
    if time.perf_counter() - start > 5:
        return_mappings(35_000)


@pytest.fixture(scope="session", autouse=True)
def traced_policies():
    """The functions of policies, which the runs of one process share where settings and mesh are equal."""
    from dapo_jax.config.sections import ActorConfig
    from dapo_jax.run import networks as run

    build_actor, built = run.build_actor, {}
    default = ActorConfig()
    optim = {
        name: getattr(default.optim, name) for name in ("lr", "lr_warmup_steps", "lr_scheduler_type", "min_lr_ratio")
    }
    sizes = [name for name in vars(default) if name.startswith(("ppo_", "loss_", "count_", "old_", "use_dynamic"))]

    def shared(settings, mesh, frozen=None, *, decode_mesh=None):
        options = settings.options  # without what the functions do not read
        changes = {name: getattr(default, name) for name in sizes}
        options = dataclasses.replace(options, optim=dataclasses.replace(options.optim, **optim), **changes)
        key = repr(dataclasses.replace(settings, options=options)), mesh, decode_mesh
        if key not in built:
            built[key] = build_actor(settings, mesh, frozen, decode_mesh=decode_mesh)
        return of_frozen(built[key], frozen)

    run.build_actor = shared
    yield built
    run.build_actor = build_actor


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The workdir, last parameters and rows of an undisturbed run of four steps, each saved. Run in copies of it."""
    import jax
    from small_run import rows_without_clock, small_config

    from dapo_jax.training.loop import train

    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent  # one run for all workers
    folder, params = place / "undisturbed", place / "undisturbed.params"
    with open(place / "undisturbed.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not params.exists():
            models = train(small_config(folder, **{"trainer.save_freq": 1, "trainer.max_ckpt_to_keep": 9}))
            params.write_bytes(pickle.dumps(jax.device_get(models.actor.params)))
    return folder, pickle.loads(params.read_bytes()), rows_without_clock(folder)
