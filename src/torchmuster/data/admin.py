"""Removing files at a URL, and trying what the credentials allow."""

import secrets
import threading

from torchmuster.data.faults import DataError, retrying
from torchmuster.data.names import compile_regex
from torchmuster.data.progress import run_all
from torchmuster.data.urls import open_place

_NUM_PARALLEL = 8
_NUM_TRIES = 2  # somebody waits for the answer


def find_files(url: str, regex: str | None = None) -> list[str]:
    """Return the names of all files at a URL, `` for the URL itself when it is a file.

    Raises:
        DataError: The URL can't be read.
    """
    place = open_place(url)
    matches = compile_regex(regex)
    if retrying(place.stat, url) is not None:
        return [""]
    return [entry.name for entry in retrying(place.entries, url) if matches(entry.name)]


def delete_files(url: str, names: list[str]) -> None:
    """Remove files; those that are gone already are no error.

    Raises:
        DataError: Access is denied or the store does not answer.
    """
    place = open_place(url)
    run_all(
        lambda name: retrying(lambda: place.delete(name), f"{url}/{name}"),
        names,
        _NUM_PARALLEL,
        threading.Event(),
    )


def check_access(url: str, access: str = "READ") -> None:
    """Try what `access` says: READ, WRITE or DELETE (the last two write a small file of their own).

    Raises:
        DataError: It can't be done; it says why.
    """
    place = open_place(url)
    if access == "READ":
        retrying(place.check, url, tries=_NUM_TRIES)
        return
    probe = f".muster-check-{secrets.token_hex(8)}"
    retrying(lambda: place.write(probe, b"muster"), url, tries=_NUM_TRIES)
    try:
        retrying(lambda: place.delete(probe), url, tries=_NUM_TRIES)
    except DataError:
        # Who may write need not be allowed to delete; the probe stays then.
        if access == "DELETE":
            raise
