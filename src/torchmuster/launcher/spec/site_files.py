"""Find site files and check whether they are trusted; reading them would import pydantic."""

import os
import pwd
import stat
from collections.abc import Mapping

PROJECT_FILE = "muster.toml"
_MOST_BYTES = 1 << 20  # of the list of trusted files
_said: set[str] = set()


def user_file(environment: Mapping[str, str]) -> str | None:
    """Return the user's file, if any."""
    folder = _own_folder(environment)
    path = os.path.join(folder, "config.toml") if folder is not None else None
    return path if path is not None and os.path.lexists(path) else None


def _own_folder(environment: Mapping[str, str]) -> str | None:
    base = environment.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # the XDG specification ignores relative paths
        try:
            home = environment.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # an account without an entry, as in some containers
            return None
        base = os.path.join(home, ".config")
    return os.path.join(base, "muster")


def project_file(cwd: str) -> str | None:
    """Return the nearest `muster.toml` from this folder up to the root, if any."""
    folder = os.path.abspath(cwd)
    while True:
        path = os.path.join(folder, PROJECT_FILE)
        if os.path.lexists(path):
            return path
        if folder == os.path.dirname(folder):
            return None
        folder = os.path.dirname(folder)


def is_new(note: str) -> bool:
    """Return whether this command has not printed the note yet: its parts read the same files."""
    said = note in _said
    _said.add(note)
    return not said


def why_not_used(path: str, status: os.stat_result, environment: Mapping[str, str]) -> str | None:
    """Return why a file that another user could have written is ignored; None if it is trusted.

    Its lines go into our jobs. Trusted are our own files and root's (root can do what we can),
    reached through links that are ours or root's, and the files listed in `trusted` next to our own
    settings, like git's safe.directory.

    Raises:
        OSError: The file is gone.
    """
    if status.st_mode & stat.S_IWOTH:
        return f"everybody can write to it: chmod o-w {path}"
    link = os.lstat(path)
    ours = (0, os.getuid())
    if status.st_uid in ours and link.st_uid in ours:
        return None
    folder = _own_folder(environment)
    if os.path.abspath(path) in _trusted(folder):
        return None
    what = (
        "it"
        if link.st_uid == status.st_uid
        else "the link"
        if link.st_uid not in ours
        else "its target"
    )
    owner = _name_of(link.st_uid if link.st_uid not in ours else status.st_uid)
    cure = f"read it, then: echo {os.path.abspath(path)} >> {folder}/trusted" if folder else ""
    return f"{what} belongs to another user ({owner})" + (f"; {cure}" if cure else "")


def _trusted(folder: str | None) -> frozenset[str]:
    """Return other users' files that the user trusts, one per line; the list must be ours."""
    if folder is None:
        return frozenset()
    try:
        with open(os.path.join(folder, "trusted")) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
                return frozenset()
            return frozenset(line.strip() for line in file.read(_MOST_BYTES).splitlines())
    except (OSError, UnicodeDecodeError):
        return frozenset()


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
