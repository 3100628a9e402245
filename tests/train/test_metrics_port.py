"""What Prometheus finds at the port of a run, from outside, while the run trains."""

import signal
import subprocess
import urllib.error
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kit.command import MUSTER, muster_env, run_muster
from kit.ports import reserve_port
from kit.waiting import wait_until

SCRIPT = """
import os, time
import torch
import torchmuster.train as tm
model = tm.wrap(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = tm.loader(torch.utils.data.TensorDataset(torch.ones(64, 4)), global_batch_size=4)
run = tm.resume(model=model, optimizer=optimizer, data=data, log_every=1)
for epoch in run.epochs(10_000):
    for (x,) in data:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        time.sleep(0.05)
"""


def scrape(port):
    """Return the names that the page has, and its samples; none while nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return {}
    families = text_string_to_metric_families(text)
    return {sample.name: sample for family in families for sample in family.samples}


@pytest.mark.short
def test_a_run_tells_how_it_stands(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    port, env = reserve_port(), muster_env(tmp_path / "home")
    words = ("run", "--nproc-per-node", "2", "--metrics-port", str(port), "train.py")
    run = subprocess.Popen(
        [*MUSTER, *words], env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        wanted = {"torchmuster_training", "torchmuster_rank_step", "torchmuster_rank_cpu_cores"}
        wait_until(lambda: wanted <= set(scrape(port)), "metrics of a training", 60)
        found = scrape(port)
        assert found["torchmuster_attempts_total"].value == 1
        assert found["torchmuster_rank_up"].value == 1
    finally:
        run.send_signal(signal.SIGINT)
        said = run.communicate(timeout=180)[1].decode()
    assert f"metrics for Prometheus at http://127.0.0.1:{port}/metrics" in said
    assert scrape(port) == {}


@pytest.mark.short
def test_a_port_that_is_taken_is_said_and_ends_no_run(tmp_path):
    import socket

    (tmp_path / "script.py").write_text("print('done')")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run_muster(
            "run",
            "--metrics-port",
            port,
            "script.py",
            env=muster_env(tmp_path / "home"),
            cwd=tmp_path,
        )
    assert done.returncode == 0
    assert f"no metrics at 127.0.0.1:{port}: Address already in use" in done.stderr
