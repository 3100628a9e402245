"""The connection of a private network to the outside, with the real programs: out, by name, to each other, and gone at the end."""

import http.server
import json
import os
import shutil
import socket
import threading

import pytest

from kit.waiting import wait_until

DEADLINE_S = 30.0

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


def pair(python, script, arguments):
    return [
        {"name": n, "files": {"/tmp/x.py": script}, "command": [python, "/tmp/x.py", *arguments[n]]}
        for n in "ab"
    ]


def test_two_tasks_reach_the_machine_and_each_other_but_not_its_loopback(
    stage, program, web, address
):
    url = f"http://{address}:{web}/"
    arguments = {"a": ("b", url, str(web)), "b": ("a", url, str(web))}

    ended = stage.run(*pair(stage.python, FETCH, arguments), network=True, program=program)

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

        ended = stage.run(*pair(stage.python, ASK, arguments), network=True, program=program)
        thread.join()

    assert [ended["tasks"][n]["out"] for n in "ab"] == ["1337\n"] * 2, ended


def answer(server, count):
    for _ in range(count):
        text, caller = server.recvfrom(512)
        server.sendto(text, caller)


def test_kill_9_of_the_one_who_started_them_takes_the_stack_away(stage, program):
    tasks = [{"name": n, "command": ["sleep", "600"]} for n in "ab"]

    with stage.popen(tasks, network=True, program=program, hold=True) as child:
        told = json.loads(child.stdout.readline())
        stack = stacks(told["holder"], program)
        assert stack
        child.kill()
        child.wait(DEADLINE_S)
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in stack), "its end")
        for pid in told["pids"]:
            os.kill(pid, 9)


def test_kill_9_of_the_holder_takes_the_stack_away(stage, program):
    tasks = [{"name": "a", "command": ["sleep", "600"]}]

    with stage.popen(tasks, network=True, program=program, hold=True) as child:
        told = json.loads(child.stdout.readline())
        stack = stacks(told["holder"], program)
        assert stack
        os.kill(told["holder"], 9)
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in stack), "its end")
        os.kill(told["pids"][0], 9)
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
