"""The cluster itself: what is left of it, and what is said where it can't be."""

import os
import subprocess
import sys
from pathlib import Path

from kit.control_groups import hierarchies
from kit.waiting import wait_until
from lab.kubernetes import programs

TESTS = Path(__file__).parents[2]
MAKE = """
import sys
from lab.kubernetes.cluster import Cluster
with Cluster(1) as made:
    print(made.folder, made.group, flush=True)
    sys.stdin.read()
"""


def test_a_cluster_leaves_nothing_though_its_maker_is_killed():
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "KUBE_BIN": str(programs.folder())}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", MAKE], env=environment, **pipes) as maker:
        folder, group = maker.stdout.readline().split()
        assert os.path.isdir(folder)
        maker.kill()
    wait_until(lambda: not os.path.exists(folder), "the end of the cluster's folder")
    assert [one for one in hierarchies() if os.path.isdir(f"{one}/{group}")] == []


def test_programs_that_lack_are_named(tmp_path, monkeypatch):
    for name in programs.PROGRAMS["the control plane"]:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(programs, "MACHINE", {"KUBE_BIN": str(tmp_path)})
    (line,) = programs.why_not().splitlines()
    assert line.startswith(f"KUBE_BIN ({tmp_path}) lacks programs, for the nodes: kubelet, ")
    assert "the control plane" not in line
