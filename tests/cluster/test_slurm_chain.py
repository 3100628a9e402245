"""A run that is longer than its job, on a real Slurm."""

import json

import pytest

from cluster.test_chains_slurm import CHAIN_SCRIPT, LEAVE
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the workers need torch (extra `train`)")
ON = ("run", "--on", "slurm", "--nodes", "2", "--nproc-per-node", "1", "--run-id", "r")
REQUEUE_LIMIT_S = 180.0  # Slurm waits up to two minutes before it starts a requeued job again


def links(folder):
    return json.loads((folder / "home/runs/r/links.json").read_text())["links"]


def test_a_warned_run_goes_on_by_requeue(login, slurm_lab):
    (login.folder / "leave.py").write_text(LEAVE)
    done = login(*ON, "--resubmit", "1", "--detach", "leave.py")
    assert done.stdout == "r\n", done.stderr
    logs = login.folder / "home/runs/r/logs/main/train/attempt-0"
    paths = [logs / f"rank-{rank}.log" for rank in (0, 1)]
    ready = lambda: all(p.exists() and "ready" in p.read_text() for p in paths)  # noqa: E731
    wait_until(ready, "the handlers", 120.0)
    job = json.loads((login.folder / "home/runs/r/job.json").read_text())["job_id"]

    slurm_lab.run(["scancel", "--signal=USR1", "--batch", job])

    path = login.folder / "home/runs/r/links.json"
    wait_until(lambda: path.exists() and len(links(login.folder)) == 2, "the second link")
    assert json.loads(login("status", "r", "--json").stdout)["result"] is None
    assert login("wait", "r", limit_s=REQUEUE_LIMIT_S).returncode == 0
    assert [link["way"] for link in links(login.folder)] == [None, "requeue"]


@pytest.mark.lab
@pytest.mark.parametrize("way", ["requeue", "submit", "chain"])
def test_three_links_of_two_minutes_train_to_the_end(login, way):
    text = f'[engines.lab]\nkind = "slurm"\nresubmit_with = "{way}"\n'
    (login.folder / "muster.toml").write_text(text)
    words = (*ON[:1], "--on", "lab", *ON[3:], "--time", "2m", "--warn", "90s", "--resubmit", "2")
    script = (str(CHAIN_SCRIPT), str(login.folder), "--hold", "2", "--hold-s", "8")
    done = login(*words, *script, limit_s=900.0)

    assert done.returncode == 0, done.stderr
    assert [link["way"] for link in links(login.folder)] == [None, way, way]
    lines = (login.folder / "steps-0").read_text().splitlines()
    assert [int(line.split()[1]) for line in lines] == list(range(1, 25))
