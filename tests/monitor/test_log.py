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


def test_file_holds_every_record_with_its_time(tmp_path):
    setup_logging(tmp_path / "new" / "run", detailed=False)
    LOGGER.info("hello %d", 1)
    LOGGER.warning("careful")
    first, second = (tmp_path / "new" / "run" / "train.log").read_text().splitlines()
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] INFO: hello 1", first)
    assert second.endswith("] WARNING: careful")


@pytest.mark.parametrize(
    "detailed, shown", [(False, "WARNING: b\nERROR: c\n"), (True, "INFO: a\nWARNING: b\nERROR: c\n")]
)
def test_console_shows_warnings_and_with_detailed_everything(tmp_path, capsys, detailed, shown):
    setup_logging(tmp_path, detailed=detailed)
    LOGGER.info("a")
    LOGGER.warning("b")
    LOGGER.error("c")
    captured = capsys.readouterr()
    assert captured.err == shown
    assert captured.out == ""


def test_the_console_shows_every_record_of_a_logger_that_is_named(tmp_path, capsys):
    setup_logging(tmp_path, detailed=False, also=("dapo_jax.named",))
    for name in ("named", "other"):
        logging.getLogger(f"dapo_jax.{name}").info("from %s", name)
        logging.getLogger(f"dapo_jax.{name}").warning("of %s", name)
    assert capsys.readouterr().err == "INFO: from named\nWARNING: of named\nWARNING: of other\n"


def test_records_do_not_reach_the_root_logger_twice(tmp_path, capsys):
    root = logging.StreamHandler()
    logging.getLogger().addHandler(root)
    try:
        setup_logging(tmp_path, detailed=True)
        LOGGER.warning("once")
    finally:
        logging.getLogger().removeHandler(root)
    assert capsys.readouterr().err.count("once") == 1


def test_second_setup_replaces_its_own_handlers_and_appends(tmp_path):
    package = logging.getLogger("dapo_jax")
    foreign = logging.NullHandler()
    package.addHandler(foreign)
    try:
        setup_logging(tmp_path, detailed=False)
        LOGGER.info("a")
        setup_logging(tmp_path, detailed=False)
        LOGGER.info("b")
        assert len(package.handlers) == 3 and foreign in package.handlers
        setup_logging(tmp_path / "other", detailed=False)
        LOGGER.info("c")
        close_logging()
        close_logging()
        assert package.handlers == [foreign]
    finally:
        package.removeHandler(foreign)
    messages = [line.split(": ")[1] for line in (tmp_path / "train.log").read_text().splitlines()]
    assert messages == ["a", "b"]
    assert "c" in (tmp_path / "other" / "train.log").read_text()


def test_after_closing_records_go_to_the_root_logger_again(tmp_path, caplog):
    setup_logging(tmp_path, detailed=False)
    close_logging()
    with caplog.at_level(logging.INFO, logger="dapo_jax"):
        LOGGER.info("free")
    assert caplog.messages == ["free"]


def test_what_a_run_does_again_is_moved_out_of_the_log(tmp_path):
    log = tmp_path / "train.log"
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
    assert [line.split(": ")[1] for line in log.read_text().splitlines()] == [
        "step 1",
        "the run ends",
        "no room",
        "a new start",
        "step 2 again",
    ]
    moved = (tmp_path / "train.discarded.log").read_text().splitlines()
    assert [line.split(": ")[1] for line in moved] == ["step 2", "a new start", "step 2 again"]


@pytest.mark.parametrize("size", [-1, 10**6])
def test_a_log_that_is_not_known_or_was_removed_stays_as_it_is(tmp_path, size):
    (tmp_path / "train.log").write_text("before\n")
    setup_logging(tmp_path, detailed=False)
    rewind_log(tmp_path, size)
    assert (tmp_path / "train.log").read_text() == "before\n" and not (tmp_path / "train.discarded.log").exists()
