"""Where the files with sites are: looking for them costs nothing, reading them imports pydantic."""

import os
import pwd
from collections.abc import Mapping

PROJECT_FILE = "muster.toml"


def user_file(environment: Mapping[str, str]) -> str | None:
    """Return the user's file; None when there is none."""
    base = environment.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # the specification of XDG says to ignore others
        try:
            home = environment.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # an account without an entry, as in some containers
            return None
        base = os.path.join(home, ".config")
    path = os.path.join(base, "muster", "config.toml")
    return path if os.path.lexists(path) else None


def project_file(cwd: str) -> str | None:
    """Return the nearest `muster.toml`, from this folder up to the root; None when there is none."""
    folder = os.path.abspath(cwd)
    while True:
        path = os.path.join(folder, PROJECT_FILE)
        if os.path.lexists(path):
            return path
        if folder == os.path.dirname(folder):
            return None
        folder = os.path.dirname(folder)
