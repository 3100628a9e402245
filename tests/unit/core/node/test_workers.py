import json
import signal

import pytest

from torchmuster.core.model.failure import EndKind, PythonError
from torchmuster.core.node.workers import _kind_of, error_text, read_recorded, root_cause
from unit.core.model.ends import exited, killed, raised

RAISED = PythonError(type_name="ValueError", message="", where=None, traceback="")
WELL = {"ended_well": True}
LEFT = PythonError(type_name="SystemExit", message="3", where="train.py:3", traceback="")


@pytest.mark.parametrize(
    ("signum", "code", "error", "given", "kind"),
    [
        (None, 0, None, {}, EndKind.SUCCESS),
        (None, 0, RAISED, {}, EndKind.SUCCESS),  # raised in a thread, or caught after all
        (None, 1, RAISED, {}, EndKind.EXCEPTION),
        (None, 3, LEFT, {}, EndKind.EXIT_CODE),
        (None, 3, None, {}, EndKind.EXIT_CODE),
        (None, 75, LEFT, {}, EndKind.PREEMPTED),
        (signal.SIGKILL, None, None, {}, EndKind.SIGNAL),
        (signal.SIGABRT, None, RAISED, {}, EndKind.SIGNAL),
        # What kills a worker after its script ended well is no failure, an exit code is one.
        (signal.SIGKILL, None, None, WELL, EndKind.SUCCESS),
        (signal.SIGABRT, None, None, WELL, EndKind.SUCCESS),
        (None, 3, None, WELL, EndKind.EXIT_CODE),
    ],
)
def test_the_kind_of_an_end_follows_from_status_and_report(signum, code, error, given, kind):
    assert _kind_of(signum, code, error, **given) is kind


# The error file, as torchrun writes it.


def test_an_exception_is_told_as_torchrun_does():
    told = json.loads(error_text(raised(0, "RuntimeError", "boom"), None, 7.9))["message"]

    assert (told["message"], told["errorCode"]) == ("RuntimeError: boom", 1)
    assert told["extraInfo"]["timestamp"] == "7"
    assert "boom" in told["extraInfo"]["py_callstack"]


def test_what_the_worker_has_recorded_is_kept_with_its_exit_code():
    recorded = json.dumps({"message": {"message": "E: mine", "extraInfo": {}}})

    told = json.loads(error_text(killed(0, signal.SIGKILL), recorded, 0.0))

    assert told == {"message": {"message": "E: mine", "extraInfo": {}, "errorCode": -9}}


def test_a_message_in_a_form_of_its_own_stays_as_it_is():
    assert error_text(exited(0, 3), json.dumps({"message": "text"}), 0.0) == '{"message": "text"}'


def test_an_end_of_which_nothing_is_known_leaves_nothing_as_under_torchrun():
    assert error_text(exited(0, 3), None, 0.0) is None
    assert error_text(exited(0, 3), "no json", 0.0) is None


def test_an_empty_or_endless_or_missing_file_records_nothing(tmp_path):
    path = tmp_path / "error.json"
    assert read_recorded(str(path)) is None
    path.write_bytes(b"")
    assert read_recorded(str(path)) is None
    path.write_bytes(b"x" * ((1 << 20) + 1))
    assert read_recorded(str(path)) is None
    path.write_text("{}")
    assert read_recorded(str(path)) == "{}"


def test_the_first_failure_that_is_no_echo_is_told():
    ends = [raised(0, "RuntimeError", "Connection closed by peer"), raised(1, "ValueError", "bad")]

    assert root_cause(ends, {0: "echo", 1: "cause"}) == "cause"
    assert root_cause(ends, {0: "echo"}) == "echo"
    assert root_cause([], {}) is None
