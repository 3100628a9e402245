"""Programs that a rank started: what they said themselves is the cause, not their exit code."""

import pytest

from unit.diagnose.explain.logs import explain, traceback_of

COUNTS = (
    "subprocess.CalledProcessError: Command '['tar', 'xf', 'x']' returned non-zero exit status 2."
)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("tar: /archive/photos.tar: Cannot open: No such file or directory", "file-missing"),
        ("mkshards: error: 3 of 4 parts are invalid", "exception"),
    ],
)
def test_the_words_of_a_program_that_was_started_come_first(tmp_path, said, cause):
    first = explain(tmp_path, job=f"{said}\n{traceback_of(COUNTS)}").first
    assert first.cause == cause
    assert said in first.error
    assert first.at == "/home/u/train.py:9"


def test_a_program_that_said_nothing_leaves_its_exit_code(tmp_path):
    assert "exit status 2" in explain(tmp_path, job=traceback_of(COUNTS)).first.error
