import signal

import pytest

from torchmuster.agent.workers import _kind_of
from torchmuster.model.failure import EndKind, PythonError

RAISED = PythonError(type_name="ValueError", message="", where=None, traceback="")
LEFT = PythonError(type_name="SystemExit", message="3", where="train.py:3", traceback="")


@pytest.mark.parametrize(
    ("signum", "code", "error", "kind"),
    [
        (None, 0, None, EndKind.SUCCESS),
        (None, 0, RAISED, EndKind.SUCCESS),  # raised in a thread, or caught after all
        (None, 1, RAISED, EndKind.EXCEPTION),
        (None, 3, LEFT, EndKind.EXIT_CODE),
        (None, 3, None, EndKind.EXIT_CODE),
        (None, 75, LEFT, EndKind.PREEMPTED),
        (signal.SIGKILL, None, None, EndKind.SIGNAL),
        (signal.SIGABRT, None, RAISED, EndKind.SIGNAL),
    ],
)
def test_the_kind_of_an_end_follows_from_status_and_report(signum, code, error, kind):
    assert _kind_of(signum, code, error) is kind
