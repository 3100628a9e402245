import errno
import threading

import pytest

from torchmuster.workflow.data.faults import DataError, explain, retrying


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (ConnectionResetError("reset"), True),
        (TimeoutError("slow"), True),
        (OSError(errno.EIO, "please slow down"), True),
        (FileNotFoundError("gone"), False),
        (PermissionError("no"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (ValueError("bad"), False),
        (type("NoCredentialsError", (Exception,), {})("none"), False),
        (type("EndpointConnectionError", (Exception,), {})("refused"), True),
    ],
)
def test_only_failures_that_may_pass_are_called_so(error, may_pass):
    assert explain(error, "s3://b").may_pass is may_pass


def test_work_that_may_pass_is_tried_until_it_does():
    tries = []

    def work():
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("reset")
        return "done"

    assert retrying(work, "s3://b") == "done"


def test_work_that_never_passes_ends_with_its_last_failure():
    with pytest.raises(DataError) as caught:
        retrying(lambda: int("no number"), "s3://b", tries=1)
    assert caught.value.where == "s3://b"


def test_waiting_ends_when_others_have_failed():
    stop = threading.Event()
    stop.set()

    def work():
        raise ConnectionError("reset")

    with pytest.raises(DataError, match="was stopped"):
        retrying(work, "s3://b", stop=stop)
