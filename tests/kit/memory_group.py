"""A control group whose memory has a limit, for commands of a test."""

import secrets
from pathlib import Path

from kit.waiting import wait_until

_V1 = Path("/sys/fs/cgroup/memory")
_LIMITS = ("memory.limit_in_bytes", "memory.max")
_COUNTERS = ("memory.oom_control", "memory.events")


class MemoryGroup:
    """The group; a context manager, which removes it when its last process has ended.

    Entering it raises an OSError where no group can be made.
    """

    def __init__(self, limit_bytes):
        self._is_v2 = not _V1.is_dir()
        base = _V1.parent if self._is_v2 else _V1
        self.folder = base / f"muster-test-{secrets.token_hex(4)}"
        self._limit_bytes = limit_bytes

    def __enter__(self):
        self.folder.mkdir()
        (self.folder / _LIMITS[self._is_v2]).write_text(str(self._limit_bytes))
        return self

    def __exit__(self, *error):
        processes = self.folder / "cgroup.procs"
        wait_until(lambda: not processes.read_text().strip(), "an empty control group")
        self.folder.rmdir()

    def argv(self, words):
        """Return a command as it is run in the group."""
        return ["sh", "-c", 'echo 0 >"$0/cgroup.procs" && exec "$@"', str(self.folder), *words]

    def add(self, pid):
        """Move a process into the group; what it starts from then on is in it too."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def num_kills(self):
        """Return how many processes the kernel has killed because the limit was reached."""
        lines = (self.folder / _COUNTERS[self._is_v2]).read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])
