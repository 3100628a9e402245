"""Facts of this machine and of made-up ones."""

import json
import mmap
import os
import shutil
import time

import pytest

from torchmuster.core.model import codec
from torchmuster.launcher.facts import collect as facts


def write(folder, path, text=""):
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_facts_of_this_machine_survive_the_wire(tmp_path):
    found = facts.collect(
        facts.FactsRequest(is_long=False, environment=os.environ, run_dir=str(tmp_path))
    )
    assert found.unknown == {}
    assert found.system.num_usable_cpus >= 1
    assert (
        codec.from_plain(facts.CollectedFacts, json.loads(json.dumps(codec.to_plain(found))))
        == found
    )


def test_nothing_is_left_of_what_is_written_to_try(tmp_path):
    found = facts.look_at("run", str(tmp_path), None)
    assert (found.is_writable, found.can_rename, found.why) == (True, True, "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_is_said(tmp_path):
    found = facts.look_at("run", str(tmp_path / "no"), None)
    assert (found.is_there, found.why) == (False, "No such file or directory")


def test_a_file_where_a_folder_should_be_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    found = facts.look_at("run", str(tmp_path / "file"), None)
    assert (found.is_writable, found.why) == (False, "Not a directory")


def test_a_copy_of_a_file_has_another_identity(tmp_path):
    def identity(name):
        return facts.look_at("run", str(tmp_path), str(tmp_path / name)).identity

    (tmp_path / "a").write_text("plan")
    shutil.copy2(tmp_path / "a", tmp_path / "b")
    assert identity("a") == identity("a")
    assert identity("a") != identity("b")


def test_scripts_are_told_apart_by_their_content(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("a")
    first = facts.script_facts(str(script))
    script.write_text("b")
    assert facts.script_facts(str(script)).sha256 != first.sha256
    assert not facts.script_facts(str(tmp_path / "no.py")).is_there


def test_tmpdir_of_the_job_is_looked_at_not_ours(tmp_path):
    found = facts.collect_files(
        facts.FactsRequest(is_long=False, environment={"TMPDIR": str(tmp_path)})
    )
    assert [(f.role, f.path) for f in found.folders] == [("temp", str(tmp_path))]


def test_rdma_ports_are_read(tmp_path):
    base = "sys/class/infiniband/mlx5_0/ports/1"
    write(tmp_path, f"{base}/state", "4: ACTIVE\n")
    write(tmp_path, f"{base}/link_layer", "Ethernet\n")
    write(tmp_path, f"{base}/gids/0", "0000:0000:0000:0000:0000:0000:0000:0000\n")
    write(tmp_path, f"{base}/gids/1", "fe80:0000:0000:0000:0202:c9ff:fe00:0001\n")
    (found,) = facts.rdma_ports(str(tmp_path))
    assert (found.kind, found.state, found.num_gids) == ("Ethernet", "ACTIVE", 1)


def test_names_without_an_answer_say_why():
    found, failed = facts.resolve(["localhost", "no-such-host.invalid", "a" * 300], 5.0)
    assert "localhost" in found
    assert set(failed) == {"no-such-host.invalid", "a" * 300}


def test_the_way_to_oneself_is_found_without_a_packet():
    assert facts.source_for("127.0.0.1") == "127.0.0.1"
    assert facts.source_for("not an address") is None


def test_secrets_of_the_environment_stay_where_they_are(tmp_path):
    secrets = {"TORCH_API_TOKEN": "s3cret", "https_proxy": "http://me:s3cret@proxy:3128"}
    found = facts.collect_environment({**secrets, "NCCL_DEBUG": "INFO", "HOME": "/home/u"})
    assert found.variables == {"NCCL_DEBUG": "INFO"}
    assert "s3cret" not in json.dumps(codec.to_plain(found))


def test_plugins_of_nccl_are_found_on_the_loaders_path(tmp_path):
    write(tmp_path, "libnccl-net-ofi.so.1")
    write(tmp_path, "libnccl.so.2")
    found = facts.collect_environment({"LD_LIBRARY_PATH": f"{tmp_path}:/no/such"})
    assert str(tmp_path / "libnccl-net-ofi.so.1") in found.plugins
    assert not any(path.endswith("libnccl.so.2") for path in found.plugins)


def test_the_time_left_and_the_node_file_are_read(tmp_path):
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    environment = {"SLURM_JOB_END_TIME": "1100", "PBS_NODEFILE": str(tmp_path / "nodes")}
    found = facts.collect_environment(environment, now=1000.0)
    assert (found.left_s, found.total_s, found.nodefile) == (100.0, None, (3, 2))
    found = facts.collect_environment(environment | {"SLURM_JOB_START_TIME": "500"}, now=1000.0)
    assert found.total_s == 600.0


@pytest.mark.parametrize(("end", "left_s"), [("1100", 100.0), ("soon", None), ("", None)])
def test_a_job_of_pbs_ends_when_the_head_was_told(end, left_s):
    found = facts.collect_environment({facts.ALLOCATION_ENDS_AT: end}, now=1000.0)
    assert (found.left_s, found.total_s) == (left_s, None)


def test_torch_is_found_without_importing_it():
    torch = pytest.importorskip("torch")
    assert facts.own_torch().torch == torch.__version__


def test_what_is_no_text_is_no_version():
    assert facts.torch_facts({"torch": 7, "python": ["x"]}).torch is None


@pytest.mark.parametrize(
    ("counted", "limit"),
    [("memory.events", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes")],
)
def test_the_smallest_limit_above_us_counts(monkeypatch, tmp_path, counted, limit):
    for number, text in enumerate(("max", "4096", "8192")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / limit).write_text(f"{text}\n")
    files = [str(tmp_path / str(number) / counted) for number in range(3)]
    monkeypatch.setattr("torchmuster.launcher.facts.collect.counter_files", lambda: files)
    assert facts.memory_limit() == 4096


# Files in /dev/shm that nothing has open.


OLD = time.time() - 3600


def leave(folder, name, size=4096, at=OLD):
    """Make a file in a folder that stands for /dev/shm."""
    path = folder / name
    path.write_bytes(b"x" * size)
    os.utime(path, (at, at))
    return path


def test_what_nothing_has_open_is_counted_with_its_size(tmp_path):
    leave(tmp_path, "torch_7_1_0", 1 << 20)
    leave(tmp_path, "nccl-Ab12Cd")
    leave(tmp_path, "sem.mp-x")
    leave(tmp_path, "a_file_of_somebody")

    count, size = facts.leftover_shm_files(str(tmp_path))

    assert count == 3
    assert size >= 1 << 20


def test_a_file_that_is_open_or_new_is_left_alone(tmp_path):
    leave(tmp_path, "torch_7_1_0", at=time.time())
    with leave(tmp_path, "nccl-open").open("rb"):
        assert facts.leftover_shm_files(str(tmp_path)) == (0, 0)

    assert facts.leftover_shm_files(str(tmp_path))[0] == 1


def test_a_mapped_file_is_in_use(tmp_path):
    with leave(tmp_path, "torch_8_1_0").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    with mapped:
        assert facts.leftover_shm_files(str(tmp_path)) == (0, 0)


def test_a_folder_that_is_not_there_has_none(tmp_path):
    assert facts.leftover_shm_files(str(tmp_path / "none")) == (0, 0)
