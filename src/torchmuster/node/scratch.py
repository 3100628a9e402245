"""The scratch folder that a run has on a node: where it lies, that it is ours, and its end."""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping

from torchmuster.errors import MusterError


class ScratchError(MusterError):
    """The scratch folder of a node can't be used."""


def parent_folder(environment: Mapping[str, str], named: str | None = None) -> str:
    """Return the folder in which a run makes its own: as named, the scheduler's, else the temporary one."""
    if named:
        return named
    if environment.get("SLURM_TMPDIR"):
        return environment["SLURM_TMPDIR"]
    # PBS puts the job's id into the name of its own; another TMPDIR is the user's: that will do, too.
    own = environment.get("TMPDIR", "")
    return own if os.path.isdir(own) else tempfile.gettempdir()


def folder_name(run_id: str, place: int, run_dir: str) -> str:
    """Return the name of a run's folder; two runs of one name, in two homes, don't share it."""
    mark = hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest()[:8]
    return f"muster-{run_id}-{place}-{mark}"


def make_scratch(parent: str, name: str) -> str:
    """Make the folder, or take over what an agent before us has left; return its path.

    The name can be known before: where somebody else has made it, ours gets one that can't.

    Raises:
        ScratchError: It can't be made.
    """
    path = os.path.join(os.path.realpath(parent), name)
    fix = "`scratch` of the site, SLURM_TMPDIR or TMPDIR names a folder of this node that you can write to"
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        what = "the scratch folder can't be made"
        raise ScratchError(what, where=path, why=error.strerror, fix=fix) from error
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return tempfile.mkdtemp(prefix=f"{name}-", dir=os.path.dirname(path))
    if status.st_mode & 0o077:
        os.chmod(path, 0o700)
    return path


def remove_scratch(path: str) -> None:
    """Remove the folder with all that is in it; what can't be removed stays."""

    def mend(function: object, name: str, error: object) -> None:
        """Open a folder that its owner may not write to, e.g. one that came out of an archive."""
        folder = os.path.dirname(name)
        try:
            if name != path:  # the folder that it lies in is not ours to open: it may be /tmp
                os.chmod(folder, 0o700)
            if os.path.isdir(name) and not os.path.islink(name):
                os.chmod(name, 0o700)
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)
        except OSError:
            return

    if os.path.islink(path) or not os.path.isdir(path):
        return
    shutil.rmtree(path, onerror=mend)
    try:
        os.rmdir(path)
    except OSError:
        return
