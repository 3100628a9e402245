import signal

import pytest

from torchmuster.core.model.failure import EndKind, PythonError
from torchmuster.core.node.workers import _kind_of

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


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGABRT, None), (signal.SIGKILL, None)])
def test_what_kills_a_worker_after_its_script_ended_well_is_no_failure(signum, code):
    assert _kind_of(signum, code, None, ended_well=True) is EndKind.SUCCESS


def test_an_exit_code_after_the_script_ended_well_is_a_failure():
    assert _kind_of(None, 3, None, ended_well=True) is EndKind.EXIT_CODE
