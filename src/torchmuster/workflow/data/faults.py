"""Errors of files and stores, and retries of those that may pass."""

import errno
import random
import re
import threading
from collections.abc import Callable
from typing import TypeVar

from torchmuster.errors import MusterError

_T = TypeVar("_T")

NUM_TRIES = 5
_FIRST_PAUSE_S = 0.5

# Errors of a local disk that a retry does not change.
_LASTING = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
        errno.EXDEV,
    }
)
# The stores' libraries share no error classes; these words in a class's name mean that it is
# permanent.
_LASTING_WORDS = re.compile(
    "credential|paramvalidation|unauthorized|forbidden|profilenotfound|invalidregion|authentication"
    "|resourcenotfound|notimplemented|valueerror|typeerror|keyerror|attributeerror"
)


class DataError(MusterError):
    """Files, a store or a dataset can't be read or written.

    Attributes:
        may_pass: Whether a later try may succeed without a change by the user.
    """

    exit_code = 13

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
        may_pass: bool = False,
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix)
        self.may_pass = may_pass


def explain(error: BaseException, url: str) -> DataError:
    """Convert an error of a file system or a store's library into a DataError for the user."""
    if isinstance(error, DataError):
        return error
    if isinstance(error, MusterError):
        return DataError(error.what, where=error.where, why=error.why, fix=error.fix)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    why = " ".join((text or type(error).__name__).split())[:300]
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return DataError("there is no such file, folder or bucket", where=url, why=why)
    if isinstance(error, PermissionError):
        fix = "check the credentials and their permissions"
        return DataError("access was denied", where=url, why=why, fix=fix)
    name = type(error).__name__.lower()
    if "credential" in name or "profilenotfound" in name:
        fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the variables that the store's library reads"
        return DataError("there are no credentials for this store", where=url, why=why, fix=fix)
    if isinstance(error, OSError) and error.errno in _LASTING:
        return DataError("the file can't be read or written", where=url, why=why)
    may_pass = not _LASTING_WORDS.search(name)
    return DataError("the store gave an unexpected answer", where=url, why=why, may_pass=may_pass)


def retrying(
    work: Callable[[], _T], url: str, *, stop: threading.Event | None = None, tries: int = NUM_TRIES
) -> _T:
    """Call `work` and return its result; after failures that may pass, retry with growing pauses.

    Args:
        work: The function to call; it must be safe to call twice.
        url: The URL for the error.
        stop: Other threads set it to end the waiting.
        tries: The maximum number of calls.

    Raises:
        DataError: The last failure, or the first that can't pass.
    """
    waiter = stop or threading.Event()
    pause_s = _FIRST_PAUSE_S
    for left in range(tries - 1, -1, -1):
        try:
            return work()
        except Exception as error:
            # Each store's library has its own classes.
            fault = explain(error, url)
            if not fault.may_pass or left == 0:
                raise fault from error
        if waiter.wait(pause_s * random.uniform(0.5, 1.0)):
            raise DataError("the transfer was stopped", where=url, may_pass=True)
        pause_s *= 2
    raise AssertionError("unreachable: the last try returns or raises")
