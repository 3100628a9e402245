"""Whether a pod that is asked to end is taken away for its own use of its node's disk or memory, and not for another's sake.

A kubelet that evicts sends SIGTERM as everybody does, with one second of grace, and tells only the API why. Source: kubernetes
pkg/kubelet/eviction: a disk by its `sizeLimit`, memory when the node is short of it, and first pods that use more than they ask for.
"""

import contextlib
import os
import time
from collections.abc import Mapping

from torchmuster.node.pod.order import DISK_BYTES_VARIABLE, MEMORY_BYTES_VARIABLE

_COUNT_S = 0.5
_BLOCK_BYTES = 512
_SHORT_BYTES, _SHORT_SHARE = 512 << 20, 0.05  # of a node's memory; a kubelet's threshold is its own


def is_overused(environment: Mapping[str, str], root: str = "/") -> bool:
    """Say whether this pod uses more than it may; `root` is where /proc and /sys are."""
    return _disk_is(environment) or _memory_is(environment, root)


def _disk_is(environment: Mapping[str, str]) -> bool:
    limit, disk = environment.get(DISK_BYTES_VARIABLE, ""), environment.get("MUSTER_POD_DISK")
    if not limit.isdecimal() or disk is None:
        return False
    until, used_bytes = time.monotonic() + _COUNT_S, 0
    for folder, _, names in os.walk(disk):
        for name in names:
            with contextlib.suppress(OSError):
                used_bytes += os.lstat(os.path.join(folder, name)).st_blocks * _BLOCK_BYTES
        if used_bytes > int(limit) or time.monotonic() > until:
            break
    return used_bytes > int(limit)


def _memory_is(environment: Mapping[str, str], root: str) -> bool:
    asked = environment.get(MEMORY_BYTES_VARIABLE, "")
    try:
        node = _numbers(f"{root}/proc/meminfo", 1024)
        used_bytes = _numbers(f"{root}/sys/fs/cgroup/memory.stat", 1)
        with open(f"{root}/sys/fs/cgroup/memory.current") as file:
            own_bytes = int(file.read()) - used_bytes["inactive_file"]
        short_bytes = max(_SHORT_BYTES, _SHORT_SHARE * node["MemTotal:"])
        is_short = node["MemAvailable:"] < short_bytes
    except (OSError, ValueError, KeyError):
        return False
    return asked.isdecimal() and is_short and own_bytes > int(asked)


def _numbers(path: str, unit: int) -> dict[str, int]:
    with open(path) as file:
        fields = (line.split() for line in file)
        return {words[0]: int(words[1]) * unit for words in fields if len(words) > 1}
