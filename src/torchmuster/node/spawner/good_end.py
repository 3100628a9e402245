"""What a worker tells its agent when its script has ended well: that it has, and how large its world was.

It is told when the threads of the script have ended and before its own exit handlers run: what kills the process
later, such as a C++ thread that nobody has joined, is not the script's failure. The size of a world is noted where
torch itself notes it, because a script may have destroyed its groups by then.
"""

import atexit
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from torchmuster.net.ipc_messages import WorkerEndedWell

Send = Callable[[WorkerEndedWell], None]


class GroupWatch:
    """Notes the largest process group that this worker was ever in."""

    def __init__(self, *, forked: bool, imports_torch: bool) -> None:
        self._largest = 0
        self._imports_torch = imports_torch
        self._known = frozenset(sys.modules) if forked else frozenset[str]()
        self._sees = forked and self._wrap()

    def largest_group(self) -> int | None:
        """Return its size, 0 for none; None when that can't be told, or when the script does without torch."""
        if not self._sees or not (self._largest or self._uses_torch()):
            return None
        return self._largest

    def _wrap(self) -> bool:
        """Watch the function by which every way to make the default group ends; torch calls it by its name."""
        distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
        update = getattr(distributed, "_update_default_pg", None)
        if update is None:
            return False

        @functools.wraps(update)
        def noted(group: Any) -> None:
            update(group)
            size = getattr(group, "size", None)  # None at the end of a group
            if callable(size):
                self._largest = max(self._largest, int(size()))

        distributed._update_default_pg = noted
        return True

    def _uses_torch(self) -> bool:
        """Say whether the script, or a module that it has imported, imports torch: it was there before them."""
        new = [
            (name, module) for name, module in list(sys.modules.items()) if name not in self._known
        ]
        return self._imports_torch or any(
            name.startswith("torch.") or getattr(module, "__dict__", {}).get("torch") is not None
            for name, module in new
        )


def tell_at_exit(send: Send, watch: GroupWatch) -> None:
    """Tell the agent as soon as the interpreter begins to leave."""
    pid = os.getpid()

    def tell() -> None:
        if os.getpid() == pid:  # not what the script's own exit handlers may have forked
            send(WorkerEndedWell(largest_group=watch.largest_group()))

    atexit.register(tell)
