"""Tasks with networks of their own on one machine: the same port twice, names, the way out, and what is left."""

import contextlib
import http.server
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
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


def test_both_tasks_listen_on_one_port_and_reach_each_other_by_name(stage):
    before = links()

    ended = stage.run_pair(MEET, {"a": "ab", "b": "ba"})["tasks"]

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

    ended = stage.run_pair(REDUCE, {"a": "0", "b": "1"})["tasks"]

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


# Their connection to the outside, with the real programs: out, by name, to each other, and gone at the end.

FETCH = """
import socket, sys, time, urllib.request
other, url, loopback = sys.argv[1:]
server = socket.create_server(("0.0.0.0", 29400))
end_s = time.monotonic() + 20
while True:
    try:
        socket.create_connection((other, 29400), timeout=1).close()
        break
    except OSError:
        if time.monotonic() > end_s:
            raise
server.accept()
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print("got", opener.open(url, timeout=20).read().decode())
try:
    socket.create_connection(("127.0.0.1", int(loopback)), timeout=2)
    print("loopback open")
except OSError:
    print("loopback closed")
"""

ASK = """
import socket, struct, sys
question = b"\\x13\\x37\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0" + b"\\6muster\\7invalid\\0" + b"\\0\\1\\0\\1"
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asking.settimeout(10)
asking.connect((sys.argv[1], int(sys.argv[2])))
asking.send(question)
print(asking.recv(512)[:2].hex())
"""


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *args):
        pass


@pytest.fixture
def web():
    server = http.server.ThreadingHTTPServer(("0.0.0.0", 0), Hello)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def address():
    """Return an address of this machine that is not its loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("198.51.100.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no default route")
        return asking.getsockname()[0]


@pytest.fixture(params=["slirp4netns", "pasta"])
def program(request, stage):
    found = shutil.which(request.param)
    if found is None:
        pytest.skip(f"no {request.param} here")
    if stage.user and not os.stat("/dev/net/tun").st_mode & 0o006:
        pytest.skip("/dev/net/tun is not open to users here")
    return found


def test_two_tasks_reach_the_machine_and_each_other_but_not_its_loopback(
    stage, program, web, address
):
    url = f"http://{address}:{web}/"
    arguments = {"a": ("b", url, str(web)), "b": ("a", url, str(web))}

    ended = stage.run_pair(FETCH, arguments, program=program)

    said = [ended["tasks"][n]["out"] for n in "ab"]
    assert said == ["got hello\nloopback closed\n"] * 2, ended
    assert os.path.basename(program) in ended["note"]


def test_a_question_by_udp_gets_its_answer(stage, program, address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("0.0.0.0", 0))
        server.settimeout(DEADLINE_S)
        thread = threading.Thread(target=answer, args=(server, 2))
        thread.start()
        arguments = dict.fromkeys("ab", (address, str(server.getsockname()[1])))

        ended = stage.run_pair(ASK, arguments, program=program)
        thread.join()

    assert [ended["tasks"][n]["out"] for n in "ab"] == ["1337\n"] * 2, ended


def answer(server, count):
    for _ in range(count):
        text, caller = server.recvfrom(512)
        server.sendto(text, caller)


@pytest.mark.parametrize("killed", ["the one who started them", "the holder"])
def test_kill_9_takes_the_stack_away(stage, program, killed):
    tasks = [{"name": n, "command": ["sleep", "600"]} for n in "ab"]

    with stage.popen(tasks, network=True, program=program, hold=True) as child:
        told = json.loads(child.stdout.readline())
        stack = stacks(told["holder"], program)
        assert stack
        os.kill(told["holder"] if killed == "the holder" else child.pid, 9)
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in stack), "its end")
        for pid in told["pids"]:
            os.kill(pid, 9)
        child.communicate(timeout=DEADLINE_S)


def stacks(holder, program):
    """Return the processes of the program below the holder."""
    found, waiting = [], [holder]
    while waiting:
        pid = waiting.pop()
        try:
            with open(f"/proc/{pid}/task/{pid}/children") as file:
                below = [int(word) for word in file.read().split()]
        except OSError:
            continue
        waiting += below
        for one in below:
            with open(f"/proc/{one}/cmdline", "rb") as file:
                if file.read().split(b"\0")[0] == program.encode():
                    found.append(one)
    return found
