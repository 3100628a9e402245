"""64 pods from one client: what it takes there, and how long until all of them are at work. It needs 8 GB of memory."""

import collections
import contextlib
import re
import stat
import threading
import time
from pathlib import Path

import pytest

from kit.waiting import wait_until
from lab.kubernetes.bench import NOTES
from torchmuster.core import proc

NUM_PODS = 64
START_LIMIT_S = 900.0  # 64 interpreters, three times, on the processors of one machine
END_LIMIT_S = 300.0
MOST_KUBECTL = 4  # a watch, a way to the first pod, and a question or two
MOST_CLIENT_MB = 300.0
_LOOK_S = 0.1
SCRIPT = """\
import os, sys, time
folder, rank = sys.argv[1], os.environ["RANK"]
with open(os.path.join(folder, f"at-{rank}.new"), "w") as file:
    file.write(os.uname().nodename)
os.rename(file.name, os.path.join(folder, f"at-{rank}"))
while not os.path.exists(os.path.join(folder, "stop")):
    time.sleep(0.2)
"""
COUNTING = """\
#!/bin/sh
echo "$*" >>"{log}"
exec "{kubectl}" "$@"
"""


class ProcessSampler:
    """What a client has running, looked at ten times a second: programs by name, and memory in MB."""

    def __init__(self, pid):
        self.most = collections.Counter()
        self.own_mb = self.all_mb = 0.0
        self._pid, self._stopping = pid, threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._stopping.set()
        self._thread.join()

    def _look_on(self):
        while not self._stopping.wait(_LOOK_S):
            pids = [self._pid]
            for pid in pids:
                pids += proc.children_of(pid)
            programs = collections.Counter(filter(None, map(_program, pids)))
            programs["all"] = programs.total()
            self.most |= programs
            self.own_mb = max(self.own_mb, _resident_mb(self._pid))
            self.all_mb = max(self.all_mb, sum(map(_resident_mb, pids)))


def _program(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode().rpartition("/")[2]
    return ""


def _resident_mb(pid):
    with contextlib.suppress(OSError):
        found = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) / 1024 if found else 0.0
    return 0.0


# One kernel keeps the addresses of all pods' neighbours: 64 pods have more pairs than it has room for, and nodes of their own not.
NEIGHBOURS = Path("/proc/sys/net/ipv4/neigh/default")
ROOM = {"gc_thresh3": 65536, "gc_thresh2": 32768, "gc_thresh1": 16384}


@pytest.fixture
def room_for_neighbours():
    """Give the machine's kernel room for the neighbours of all pods, for as long as the test takes."""
    before = {name: (NEIGHBOURS / name).read_text() for name in ROOM}
    for name, number in ROOM.items():
        (NEIGHBOURS / name).write_text(str(max(number, int(before[name]))))
    yield
    for name, text in before.items():
        (NEIGHBOURS / name).write_text(text)


def _peak_mb(cluster, pod):
    """Return how much memory the control groups of a pod have had at most; 0 where the kernel keeps no peak."""
    uid, node = pod["metadata"]["uid"], pod["spec"]["nodeName"]
    peaks = [
        int((group / name).read_text())
        for group in cluster.pod_groups(node)
        for name in ("memory.peak", "memory.max_usage_in_bytes")
        if uid in str(group) and (group / name).exists()
    ]
    return max(peaks, default=0) / (1 << 20)


def counting_kubectl(cluster, folder):
    """Return a folder with a kubectl that writes each of its commands down, and the file of these."""
    folder.mkdir(exist_ok=True)
    log, program = folder / "kubectl.log", folder / "kubectl"
    log.write_text("")
    (real,) = [one / "kubectl" for one in paths(cluster) if (one / "kubectl").exists()][:1]
    program.write_text(COUNTING.format(log=log, kubectl=real))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return log


def paths(cluster):
    return map(Path, cluster.environment()["PATH"].split(":"))


@pytest.mark.usefixtures("room_for_neighbours")
def test_64_pods_start_from_one_client_with_a_few_processes(bench):
    folder = bench.user.folder / "counting"
    log = counting_kubectl(bench.cluster, folder)
    (bench.user.folder / "wait.py").write_text(SCRIPT)
    bench.site(memory="768Mi")  # the first pod keeps a store, for which it imports torch
    words = ["run", "--on", "kubernetes", "--nodes", str(NUM_PODS), "--nproc-per-node", "1"]
    words += ["--start", "fresh", "wait.py", str(bench.shared)]  # workers import no torch
    path = f"{folder}:{bench.cluster.environment()['PATH']}"
    begun = time.monotonic()
    run = bench.start_words("r", *words, env={"PATH": path})
    with ProcessSampler(run.pid) as sight:

        def at_work():
            assert run.poll() is None, bench.said
            return len(list(bench.shared.glob("at-*[0-9]"))) == NUM_PODS

        wait_until(at_work, f"{NUM_PODS} ranks", START_LIMIT_S)
        NOTES.append((f"{NUM_PODS} pods: all ranks at work", time.monotonic() - begun))
        asked = log.read_text().splitlines()
        peak_mb = _peak_mb(bench.cluster, bench.pods()[0])
        bench.stop()
        assert bench.end(run, END_LIMIT_S) == 0
    assert bench.result()["state"] == "succeeded"
    hosts = {path.read_text() for path in bench.shared.glob("at-*[0-9]")}
    assert len(hosts) == NUM_PODS
    kinds = collections.Counter(map(_kind, asked))
    print(f"\n{NUM_PODS} pods: the first one took {peak_mb:.0f} MB at most")
    print(f"the client took {sight.own_mb:.0f} MB, {sight.all_mb:.0f} MB with its children")
    print(f"its processes, the most of each at a time: {dict(sight.most)}")
    print(f"{len(asked)} commands of kubectl until all ranks were at work: {dict(kinds)}")
    assert 1 <= sight.most["kubectl"] <= MOST_KUBECTL
    assert sight.own_mb <= MOST_CLIENT_MB
    assert kinds["logs --follow"] == 0
    bench.wait_nothing_left()


def _kind(line):
    """Return what a command of kubectl asks for, without names and places."""
    words = [word for word in line.split() if not word.startswith("--")]
    more = [word for word in ("--follow", "--watch") if word in line.split()]
    about = words[1:2] if words[:1] == ["get"] else []
    return " ".join([*words[:1], *about, *more])
