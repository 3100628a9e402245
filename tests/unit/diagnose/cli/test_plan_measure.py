import json

import pytest

from kit.command import muster_env, run_muster
from torchmuster.diagnose.cli.plan_measure import _read_measured, read_cluster

PROBED = {
    "steps": 10,
    "forward_s": 0.1,
    "backward_s": 0.2,
    "optimizer_s": 0.02,
    "micro_steps": 1,
    "spread": 0.03,
    "parameters": 1250,
    "dtype": "float32",
    "device": "cpu",
    "gradients": [[1000, 0.05], [4000, 0.2]],
}


def sums(alpha, rate, n):
    return [
        {"bytes": s, "seconds": 2 * (n - 1) * (alpha + s / n / rate), "cpu_seconds": s * 1e-9}
        for s in (4, 4096, 1 << 20, 1 << 22)
    ]


def job(**more):
    plain = {"backend": "gloo", "world_size": 2, "nodes": [1, 1], "right": True, "inside": None}
    return plain | {"between": sums(1e-4, 1e8, 2)} | more


def test_a_probed_step_is_work_with_its_arrivals():
    measured = _read_measured(PROBED)
    assert measured.work.gradient_bytes == 5000
    assert measured.work.alone_s == pytest.approx(0.32)
    assert [one.ready_s for one in measured.work.arrivals] == [0.05, 0.2]
    assert measured.num_params == 1250


def test_a_tiny_job_is_a_cluster_with_one_flat_ring():
    cluster, words = read_cluster(job())
    assert cluster.is_flat
    assert cluster.between.bytes_per_s == pytest.approx(1e8, rel=0.01)
    assert cluster.between.latency_s == pytest.approx(1e-4, rel=0.01)
    assert cluster.cpu_s_per_byte == pytest.approx(1e-9)
    assert "measured with gloo, R² 1.0000" in words[0]


def test_the_inside_of_a_node_is_fitted_apart():
    found = job(world_size=4, nodes=[2, 2], between=sums(1e-4, 1e8, 4), inside=sums(1e-6, 1e9, 2))
    cluster, words = read_cluster(found)
    assert cluster.per_node == 2
    assert cluster.inside.bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert len(words) == 2


def test_gpus_sum_without_the_processor():
    assert read_cluster(job(backend="nccl"))[0].cpu_s_per_byte == 0


def test_a_sagging_bandwidth_is_said():
    between = sums(1e-4, 1e8, 2)
    between[-1]["seconds"] *= 1.5
    assert "look for loss" in read_cluster(job(between=between))[1][0]


TRAIN = """
import sys
import torch
import beside  # the script's own folder is on the path, not the probe's
torch.set_num_threads(1)
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    model(torch.randn(8, 512)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def muster_plan(folder, *words):
    (folder / "train.py").write_text(TRAIN)
    (folder / "beside.py").write_text("")
    env = muster_env(folder / "home", CUDA_VISIBLE_DEVICES="")
    return run_muster("plan", *words, env=env, cwd=folder, limit_s=150)


@pytest.mark.slow
def test_a_script_and_a_network_are_measured_by_ordinary_runs(tmp_path):
    words = ("--on", "local", "--nodes", "2", "--json", "--script", "train.py", "1000")
    done = muster_plan(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["work"]["gradient_bytes"] == 4 * (512 * 512 + 512)
    assert "10 steps measured on cpu" in found["facts"][0]
    assert "all 2 workers" in found["facts"][1]
    assert found["predictions"][1]["step_s"] > found["predictions"][0]["step_s"]


@pytest.mark.lab
def test_a_script_without_enough_steps_is_an_error_with_its_log(tmp_path):
    done = muster_plan(tmp_path, "--network", "10GbE", "--script", "train.py", "3")
    assert done.returncode == 1
    assert "error: `train.py` made too few steps of an optimizer to be measured" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.lab
def test_a_script_that_fails_is_said_to_have_failed(tmp_path):
    done = muster_plan(tmp_path, "--network", "10GbE", "--script", "train.py", "many")
    assert done.returncode == 1
    assert "error: `train.py` failed before its steps were measured" in done.stderr
    assert "invalid literal" in done.stderr
