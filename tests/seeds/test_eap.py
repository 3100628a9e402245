"""The tutorial of EAP: its job script for two nodes fails as printed, `muster explain` says why, one word cures it.

The site is the pretended PBS; what the script asks of its surroundings (modules, ssh, ping, an environment) is there.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.pbs import pbs
from kit.command import MUSTER, SOURCE
from kit.ports import reserve_port
from seeds.listings import listing, put_script

pytest.importorskip("torch")
__all__ = ["pbs"]
USER = "/home/users/<your-username>"
# A cluster of two hosts that have neither GPUs nor a resource of their own; both are this machine, whose name is another.
SITE = [
    ("select=2:ncpus=288:mpiprocs=2:sales_op=blanca,", "select=2:ncpus=2:mpiprocs=2,"),
    ("#PBS -q blanca", "#PBS -q workq"),
    ("Current Node: $(hostname)", "Current Node: n1"),
    ("export NCCL_DEBUG=INFO\n", ""),
]
SURROUNDINGS = {
    "module": "exit 0",
    "ssh": "echo 127.0.0.1",
    "ping": "exit 0",
    "muster": f'exec {sys.executable} -m torchmuster "$@"',
}


@pytest.fixture
def job(pbs, tmp_path, free_port):
    """Return what submits the script with changes, and gives (view, standard output, standard error)."""
    folder = tmp_path / "me" / "ddpTest"
    bin_ = folder / "myenv" / "bin"
    bin_.mkdir(parents=True)
    put_script(folder, "multi_node.py")
    for name, text in SURROUNDINGS.items():
        (bin_ / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin_ / name).chmod(0o755)
    (bin_ / "activate").write_text(
        f"export PYTHONPATH={SOURCE} MUSTER_HOME={tmp_path}/home TMPDIR={tmp_path}\n"
        f"PATH={bin_}:{Path(sys.executable).parent}:$PATH\ncd {folder}\ndeactivate() {{ :; }}\n"
    )
    paths = [
        ("multi_node.py 50 10", "multi_node.py 10 5"),
        (USER, str(tmp_path / "me")),
        (":29500", f":{free_port}"),
    ]

    def submit(*changes):
        script = tmp_path / "job.sh"
        script.write_text(listing("eap/job.sh", SITE, paths, changes))
        done = pbs.call("qsub", str(script))
        assert done.returncode == 0, done.stderr
        view = pbs.wait(done.stdout.strip(), "F", 120.0)
        number = done.stdout.strip().partition(".")[0]
        logs = [tmp_path / f"ddp.{kind}{number}" for kind in "oe"]
        return view, *(log.read_text() for log in logs)

    submit.folder, submit.tmp_path = folder, tmp_path
    return submit


@pytest.fixture
def free_port():
    return reserve_port()


def muster(job, *words):
    argv = [*MUSTER, *words]
    return subprocess.run(argv, cwd=job.tmp_path, capture_output=True, text=True, timeout=60)


def test_the_script_fails_as_printed_and_lint_and_explain_say_why(job):
    waits_less = ("--rdzv_backend=c10d", "--rdzv_backend=c10d --rdzv_conf=join_timeout=3")
    _, out, err = job(waits_less)
    assert "Number of Nodes Requested: 2" in out
    assert "RendezvousTimeoutError" in err

    logs = sorted(path.name for path in job.tmp_path.glob("ddp.[oe]*"))
    told = muster(job, "explain", *logs).stdout
    assert re.match(r"error: the launcher r[au]n on n1 only, of 2 nodes", told), told
    assert "muster torchrun" in told

    found = muster(job, "lint", "job.sh").stdout
    assert re.search(
        r"error: torchrun starts on the first of 2 nodes only\n  at: job.sh:49", found
    ), found
    assert "muster torchrun" in found


def test_one_word_changed_trains_on_both_nodes(job):
    view, out, err = job(("\ntorchrun ", "\nmuster torchrun "))

    assert view["Exit_status"] == 0, out + err
    for rank in range(4):  # 2048 samples, 4 workers, batches of 32
        assert f"[GPU{rank}] Epoch 9 | Batchsize: 32 | Steps: 16" in out
    assert (job.folder / "snapshot.pt").is_file()
