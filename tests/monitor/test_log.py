"""Host: the package logger writes to the file and the console, and to nobody's handlers but its own."""

import logging
import re

import pytest

from dapo_jax.monitor.log import close_logging, log_bytes, log_failure, rewind_log, setup_logging

LOGGER = logging.getLogger("dapo_jax.somewhere")


@pytest.fixture(autouse=True)
def closed_logging():
    yield
    close_logging()


def messages(path):
    return [line.split(": ")[1] for line in path.read_text().splitlines()]


def test_file_holds_every_record_with_its_time(tmp_path):
    setup_logging(tmp_path / "new" / "run", detailed=False)
    LOGGER.info("hello %d", 1)
    LOGGER.warning("careful")
    first, second = (tmp_path / "new" / "run" / "train.log").read_text().splitlines()
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] INFO: hello 1", first)
    assert second.endswith("] WARNING: careful")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"detailed": False}, "WARNING: b\nERROR: c\n"),
        ({"detailed": True}, "INFO: a\nWARNING: b\nERROR: c\nINFO: named\n"),
        ({"detailed": False, "also": ("dapo_jax.named",)}, "WARNING: b\nERROR: c\nINFO: named\n"),
    ],
)
def test_console_shows_once_warnings_and_with_detailed_everything_and_all_of_a_named_logger(
    tmp_path, capsys, options, shown
):
    root = logging.StreamHandler()  # as absl adds one
    logging.getLogger().addHandler(root)
    try:
        setup_logging(tmp_path, **options)
        LOGGER.info("a")
        LOGGER.warning("b")
        LOGGER.error("c")
        logging.getLogger("dapo_jax.named").info("named")
    finally:
        logging.getLogger().removeHandler(root)
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == (shown, "")


def test_second_setup_replaces_its_own_handlers_and_appends_until_closing_frees_the_logger(tmp_path, caplog):
    package = logging.getLogger("dapo_jax")
    foreign = logging.NullHandler()
    package.addHandler(foreign)
    try:
        for place, message in (("", "a"), ("", "b"), ("other", "c")):
            setup_logging(tmp_path / place, detailed=False)
            LOGGER.info(message)
            assert len(package.handlers) == 3 and foreign in package.handlers
        close_logging()
        close_logging()
        assert package.handlers == [foreign]
    finally:
        package.removeHandler(foreign)
    assert messages(tmp_path / "train.log") == ["a", "b"] and messages(tmp_path / "other" / "train.log") == ["c"]
    with caplog.at_level(logging.INFO, logger="dapo_jax"):
        LOGGER.info("free")
    assert caplog.messages == ["free"]


def test_what_a_run_does_again_is_moved_out_of_the_log(tmp_path):
    setup_logging(tmp_path, detailed=False)
    LOGGER.info("step 1")
    size = log_bytes(tmp_path)
    LOGGER.info("step 2")
    log_failure(ValueError("no room"))
    close_logging()
    for _ in range(2):  # a second start that got no further
        setup_logging(tmp_path, detailed=False)
        LOGGER.info("a new start")
        rewind_log(tmp_path, size)
        LOGGER.info("step 2 again")
        close_logging()
    kept = ["step 1", "the run ends", "no room", "a new start", "step 2 again"]
    assert messages(tmp_path / "train.log") == kept
    assert messages(tmp_path / "train.discarded.log") == ["step 2", "a new start", "step 2 again"]


@pytest.mark.parametrize("size", [-1, 10**6])
def test_a_log_that_is_not_known_or_was_removed_stays_as_it_is(tmp_path, size):
    (tmp_path / "train.log").write_text("before\n")
    setup_logging(tmp_path, detailed=False)
    rewind_log(tmp_path, size)
    assert (tmp_path / "train.log").read_text() == "before\n" and not (tmp_path / "train.discarded.log").exists()
