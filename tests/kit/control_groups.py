"""Control groups of a name of their own in every hierarchy, for labs; standard library only, it is used by their scripts."""

import contextlib
import os
import threading

ROOT = "/sys/fs/cgroup"
_REMOVE_LIMIT_S = 10.0
_PAUSE_S = 0.05
_INHERITED = ("cpuset.cpus", "cpuset.mems")  # empty in a new group of the first version


def is_unified():
    """Say whether this machine has the second version only."""
    return os.path.exists(f"{ROOT}/cgroup.controllers")


def hierarchies():
    """Return the folders of the hierarchies in which groups are made."""
    if is_unified():
        return [ROOT]
    names = [f"{ROOT}/{name}" for name in os.listdir(ROOT)]
    return [
        name
        for name in names
        if os.path.exists(f"{name}/cgroup.procs")
        and not os.path.islink(name)
        and not os.path.exists(f"{name}/cgroup.controllers")
    ]


def folder_of(controller, name):
    """Return the folder of a group in the hierarchy of a controller."""
    return f"{ROOT}/{name}" if is_unified() else f"{ROOT}/{controller}/{name}"


def make_groups(name):
    """Make a group, such as `lab/n1`, in every hierarchy, with all controllers."""
    for hierarchy in hierarchies():
        folder = hierarchy
        for step in name.split("/"):
            above, folder = folder, f"{folder}/{step}"
            if is_unified():
                _pass_controllers_on(above)
            os.makedirs(folder, exist_ok=True)
            for setting in _INHERITED:
                _inherit(above, folder, setting)


def join_groups(name):
    """Move this process into a group, in every hierarchy."""
    for hierarchy in hierarchies():
        with open(f"{hierarchy}/{name}/cgroup.procs", "w") as file:
            file.write(str(os.getpid()))


def pass_controllers_on():
    """Give what is below the first group all controllers; its own processes have to leave it first (second version)."""
    os.makedirs(f"{ROOT}/init", exist_ok=True)
    with open(f"{ROOT}/cgroup.procs") as file:
        pids = file.read().split()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"{ROOT}/init/cgroup.procs", "w") as file:
            file.write(pid)
    _pass_controllers_on(ROOT)


def remove_groups(name):
    """Remove a group and all below it; those that are still busy when the time is up stay."""
    never, passed_s = threading.Event(), 0.0
    while _removed_not(name) and passed_s < _REMOVE_LIMIT_S:
        never.wait(_PAUSE_S)
        passed_s += _PAUSE_S


def _removed_not(name):
    left = [f"{one}/{name}" for one in hierarchies() if os.path.isdir(f"{one}/{name}")]
    for top in left:
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    return [top for top in left if os.path.isdir(top)]


def _inherit(above, folder, setting):
    path = f"{folder}/{setting}"
    if os.path.exists(path):
        with open(path) as file:
            is_set = bool(file.read().strip())
        if not is_set:
            with open(f"{above}/{setting}") as file:
                value = file.read()
            with open(path, "w") as file:
                file.write(value)


def _pass_controllers_on(folder):
    with open(f"{folder}/cgroup.controllers") as file:
        names = file.read().split()
    for name in names:
        with contextlib.suppress(OSError), open(f"{folder}/cgroup.subtree_control", "w") as file:
            file.write(f"+{name}")
