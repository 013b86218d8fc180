"""What others wrote is spelled and cut before it is shown: in texts, errors and logs."""

import io
import logging
import subprocess
import sys
import unicodedata

import pytest

from composer_prime.errors import CorruptObject, ProcessCrashed
from composer_prime.visible import log_handler, visible


def test_ordinary_text_of_any_language_stays_as_it_is() -> None:
    for text in ("coded as int8: refused", "Größe 3 µs, 日本語, Ελληνικά, 🙂", "[red]", "C:\\x1b", ""):
        assert visible(text) == text


def test_whatever_a_terminal_acts_upon_is_spelled() -> None:
    everything = "".join(map(chr, (*range(0x3000), *range(0xD800, 0xE010), *range(0xFE00, 0x10000), 0xE0001)))
    shown = visible(everything, len(everything))
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert visible("\x1b[2J\r\n\u202e") == "\\x1b[2J\\r\\n\\u202e"
    assert visible("a\n\tb\x07", lines=True) == "a\n\tb\\x07"


def test_a_long_text_is_cut_and_its_length_is_said() -> None:
    assert visible("x" * 10_000, 5) == "xxxxx... (10,000 characters)"
    assert visible("x" * 5, 5) == "xxxxx"


def test_an_error_shows_no_control_and_only_a_processs_end_has_lines() -> None:
    assert str(CorruptObject("codec \x1b[2J\nok")) == "codec \\x1b[2J\\nok"
    assert str(ProcessCrashed("trainer ended:\n  last \x1b[2J")) == "trainer ended:\n  last \\x1b[2J"


@pytest.mark.parametrize("message", ["refused why=\x1b[2J\nok", "%s"])
def test_a_log_line_is_one_line_and_a_traceback_keeps_its_own(message: str) -> None:
    written = io.StringIO()
    logger, handler = logging.Logger("test"), log_handler(written)
    logger.addHandler(handler)
    logger.warning(message, *(["\x1b[2J\nok"] if "%s" in message else []))
    assert written.getvalue().count("\n") == 1 and "\\x1b[2J\\nok" in written.getvalue()
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        logger.exception("failed")
    assert "\x1b" not in written.getvalue() and "\nTraceback" in written.getvalue()


def test_an_equal_message_is_counted_and_no_count_is_lost() -> None:
    written = io.StringIO()
    handler = log_handler(written)

    def log(message: str, at: float) -> None:
        handler.handle(logging.makeLogRecord({"name": "test", "levelno": 30, "msg": message, "created": at}))

    for tick in range(1000):
        log("store_failed", tick / 10)
        log("beat_failed", tick / 10)
    log("other", 500.0)
    lines = [line for line in written.getvalue().splitlines() if "store_failed" in line]
    repeats = [int(line.partition("repeated ")[2].split()[0]) for line in lines[1:]]
    assert len(lines) <= 6 and sum(repeats) == 999, lines
    assert written.getvalue().count("beat_failed") == len(lines) and written.getvalue().count("other") == 1


@pytest.mark.parametrize(
    "ends",
    [
        "fail()",
        "import threading; t = threading.Thread(target=fail); t.start(); t.join()",
        "import logging; logging.getLogger('uvicorn.error').error('bad %s', text)",
    ],
    ids=["main thread", "another thread", "a log that nobody set up"],
)
def test_what_a_command_s_process_prints_by_itself_is_spelled(ends: str) -> None:
    program = f"""if True:
        from composer_prime.visible import guard_process
        from composer_prime.gateway.serving import server_of
        guard_process()
        server_of(None)
        text = "x\\x1b[2J"
        def fail():
            raise ValueError(text)
        {ends}
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "\x1b" not in done.stderr and r"\x1b[2J" in done.stderr
