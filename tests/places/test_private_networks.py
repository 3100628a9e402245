"""Tasks with networks of their own on one machine: the same port twice, names, and what is left."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from kit.waiting import wait_until

PORT = 29400
DEADLINE_S = 30.0

MEET = f"""
import socket, sys, time
me, other = sys.argv[1:]
server = socket.create_server(("0.0.0.0", {PORT}))
end_s = time.monotonic() + 20
while True:
    try:
        call = socket.create_connection((other, {PORT}), timeout=1)
        break
    except OSError:
        if time.monotonic() > end_s:
            raise
caller, address = server.accept()
print(me, "reached", other, "own", socket.gethostbyname(socket.gethostname()))
caller.sendall(me.encode())
assert call.recv(9) == other.encode()
"""

REDUCE = """
import sys
import torch
import torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group(
    "gloo", init_method="tcp://a:29400", rank=rank, world_size=2
)
value = torch.tensor([float(rank + 1)])
dist.all_reduce(value)
print("sum", value.item())
dist.destroy_process_group()
"""


def links():
    return sorted(os.listdir("/sys/class/net"))


def living_namespaces():
    """Return the network namespaces of all processes."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue
    return found


def pair(python, script, arguments):
    return [
        {"name": n, "files": {"/tmp/x.py": script}, "command": [python, "/tmp/x.py", *arguments[n]]}
        for n in "ab"
    ]


def test_both_tasks_listen_on_one_port_and_reach_each_other_by_name(stage):
    before = links()

    ended = stage.run(*pair(stage.python, MEET, {"a": "ab", "b": "ba"}), network=True)["tasks"]

    a, b = (ended[n]["out"].split() for n in "ab")
    assert a[:3] == ["a", "reached", "b"], ended
    assert b[:3] == ["b", "reached", "a"], ended
    assert a[4] != b[4]
    assert links() == before


def test_gloo_adds_up_over_two_private_networks(stage):
    torch = subprocess.run(
        [*stage.prefix, stage.python, "-c", "import torch"], capture_output=True, **stage.user
    )
    if torch.returncode != 0:
        pytest.skip("this user has no interpreter with torch")

    ended = stage.run(*pair(stage.python, REDUCE, {"a": "0", "b": "1"}), network=True)["tasks"]

    assert [ended[n]["out"] for n in "ab"] == ["sum 3.0\n", "sum 3.0\n"], ended


def test_kill_9_of_the_one_who_started_them_takes_the_holder_away(stage):
    tasks = [{"name": n, "command": ["sleep", "600"]} for n in "ab"]
    before = links()

    with stage.popen(tasks, network=True, hold=True) as child:
        told = json.loads(child.stdout.readline())
        theirs = {os.readlink(f"/proc/{pid}/ns/net") for pid in [*told["pids"], told["holder"]]}
        assert len(theirs - {os.readlink("/proc/self/ns/net")}) == 3
        child.kill()
        child.wait(DEADLINE_S)
        wait_for_end(told["holder"])
        for pid in told["pids"]:
            os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)

    assert links() == before
    assert not theirs & living_namespaces()
    assert not theirs & named_namespaces()


def named_namespaces():
    """Return the network namespaces that have a name, as links of /proc show them; other tests may make some."""
    found = set()
    for path in Path("/run/netns").glob("*"):
        with contextlib.suppress(OSError):
            found.add(f"net:[{path.stat().st_ino}]")
    return found


def wait_for_end(pid):
    """Wait until a process of somebody else's is gone, by its descriptor: no polling."""
    import select

    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([fd], [], [], DEADLINE_S)
    os.close(fd)
    assert ready, f"process {pid} still runs"
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in status(pid), "its end")


def status(pid):
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "State:\tZ"
