"""PyTorch's "Multinode Training": the same line on each machine, another number of workers on each, a snapshot on each.

The tutorial had 4 and 2 workers and 50 epochs; here they are 2 and 1, and 12. Both machines are this one, each with a folder
of its own; so either may become the head, and which ranks a machine has is not fixed.
"""

import re
import sys

import pytest

from kit.command import muster_env, spawned
from kit.ports import reserve_port
from seeds.listings import listing, put_script

torch = pytest.importorskip("torch")
# Of 2048 samples each of 3 ranks reads 683 an epoch, and a first batch of 32 twice: this is in the middle of epoch 6.
DIES_AT_READING = 6 * (683 + 32) + 350
FAULT = f"""
import os, signal
READINGS = 0
def dying(self, index, reading=MyTrainDataset.__getitem__):
    global READINGS
    READINGS += 1
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], READINGS) == ("1", "0", {DIES_AT_READING}):
        os.kill(os.getpid(), signal.SIGKILL)
    return reading(self, index)
MyTrainDataset.__getitem__ = dying
"""


@pytest.fixture
def port():
    return reserve_port()


@pytest.fixture
def on_both_machines(tmp_path, port):
    """Return what types the tutorial's line on both machines, and gives (exit code, output) of each."""
    machines = []
    for number in range(2):
        machine = tmp_path / f"machine-{number}"
        machine.mkdir()
        put_script(machine, "multinode_torchrun.py")
        machines.append(machine)

    def call(*more, fault=""):
        started = [_start(m, number, port, more, fault) for number, m in enumerate(machines)]
        said = [process.communicate(timeout=120)[0] for process in started]
        return [(process.returncode, text) for process, text in zip(started, said, strict=True)]

    call.machines = machines
    return call


def _start(machine, number, port, more, fault):
    if fault:
        with (machine / "datautils.py").open("a") as file:
            file.write(fault)
    changes = [
        ("torchrun \\\n", " ".join(["muster torchrun", *more, "\\\n"])),
        ("--node_rank=0", f"--node_rank={number}"),
        ("--nproc_per_node=4", f"--nproc_per_node={2 - number}"),
        ("50 10", "12 4"),
        ("172.31.43.139:29500", f"127.0.0.1:{port}"),
    ]
    line = listing("eap/torchrun.sh", changes)
    line = line.replace("muster ", f"{sys.executable} -m torchmuster ", 1)
    environment = muster_env(machine / "home")
    return spawned(["bash", "-c", line], cwd=machine, env=environment)


def check_snapshots(machines):
    first, second = (torch.load(machine / "snapshot.pt") for machine in machines)
    assert first["EPOCHS_RUN"] == second["EPOCHS_RUN"] == 8
    for name, value in first["MODEL_STATE"].items():
        assert torch.equal(value, second["MODEL_STATE"][name])


def ranks_in(text, epoch):
    """Return the ranks that have said that they begin an epoch: of 2048 samples for 3 workers, in batches of 32."""
    return re.findall(rf"\[GPU(\d)\] Epoch {epoch} \| Batchsize: 32 \| Steps: 22", text)


def test_the_line_on_each_machine_trains_on_2_and_1_workers(on_both_machines):
    (code, first), (other, second) = on_both_machines()

    assert (code, other) == (0, 0), first + second
    assert (len(ranks_in(first, 11)), len(ranks_in(second, 11))) == (2, 1)
    assert sorted(ranks_in(first + second, 11)) == ["0", "1", "2"]
    check_snapshots(on_both_machines.machines)


def test_a_worker_that_dies_restarts_all_from_the_snapshot_of_each_machine(on_both_machines):
    results = on_both_machines("--max_restarts=1", fault=FAULT)

    assert [code for code, _ in results] == [0, 0], results
    for number, (_, text) in enumerate(results):
        num_workers = 2 - number
        assert text.count("Resuming training from snapshot at Epoch 4") == num_workers, text
        assert len(ranks_in(text, 11)) == num_workers
    said = results[0][1] + results[1][1]
    for rank in "012":  # in both attempts, on whichever machine; a verdict may quote it once more
        assert ranks_in(said, 6).count(rank) >= 2
    assert "SIGKILL" in said
    check_snapshots(on_both_machines.machines)
