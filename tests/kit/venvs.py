"""Environments for jobs that are not ours: they have torch and no torchmuster."""

import sysconfig
import venv
from pathlib import Path


def make_venv(folder):
    """Make an environment of links to the packages of ours, but for torchmuster, and return its folder."""
    venv.create(folder, with_pip=False)
    theirs = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        hidden = "torchmuster" in entry.name or entry.suffix == ".pth"
        if not hidden and not (theirs / entry.name).exists():
            (theirs / entry.name).symlink_to(entry)
    return Path(folder)
