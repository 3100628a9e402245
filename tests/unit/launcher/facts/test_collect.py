"""Facts of this machine and of made-up ones: every part within its time, and a broken one costs only itself."""

import json
import os
import threading

import pytest

from torchmuster.core import proc
from torchmuster.core.model import codec
from torchmuster.errors import MusterError
from torchmuster.launcher.facts.collect import (
    ALLOCATION_ENDS_AT,
    CollectedFacts,
    FactsRequest,
    collect,
    collect_environment,
    collect_files,
    look_at,
    own_torch,
    rdma_ports,
    resolve,
    script_facts,
    source_for,
    torch_facts,
)
from torchmuster.launcher.facts.gpu import (
    add_health,
    collect_gpus,
    read_gpus,
    read_xids,
    run_probes,
)

ROW = "0, GPU-1, NVIDIA H200, 560.35.03, 143771, 1024, Default"


def write(folder, path, text=""):
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def answer(text, status=0):
    return proc.CommandOutput(status=status, stdout=text.encode(), stderr=b"")


def test_the_facts_of_this_machine_survive_the_wire(tmp_path):
    found = collect(FactsRequest(is_long=False, environment=os.environ, run_dir=str(tmp_path)))
    assert found.unknown == {}
    assert found.system.num_usable_cpus >= 1
    assert codec.from_plain(CollectedFacts, json.loads(json.dumps(codec.to_plain(found)))) == found


def test_a_probe_that_hangs_or_breaks_costs_only_itself():
    held = threading.Event()

    def broken():
        raise ValueError("no such thing")

    parts = {"good": lambda: 1, "hangs": held.wait, "broken": broken}
    try:
        found, unknown = run_probes(parts, 0.2)
    finally:
        held.set()
    assert found == {"good": 1}
    assert unknown["hangs"] == "no answer within 0.2 s"
    assert unknown["broken"] == "ValueError: no such thing"


def test_nothing_is_left_of_what_is_written_to_try(tmp_path):
    found = look_at("run", str(tmp_path), None)
    assert (found.is_writable, found.can_rename, found.why) == (True, True, "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_is_said(tmp_path):
    found = look_at("run", str(tmp_path / "no"), None)
    assert (found.is_there, found.why) == (False, "No such file or directory")


def test_a_file_where_a_folder_should_be_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    found = look_at("run", str(tmp_path / "file"), None)
    assert (found.is_writable, found.why) == (False, "Not a directory")


def test_a_copy_of_a_file_has_another_identity(tmp_path):
    first = tmp_path / "a"
    first.write_text("plan")
    second = tmp_path / "b"
    second.write_text("plan")
    os.utime(second, ns=(os.stat(first).st_atime_ns, os.stat(first).st_mtime_ns))
    once = look_at("run", str(tmp_path), str(first)).identity
    assert once == look_at("run", str(tmp_path), str(first)).identity
    assert once != look_at("run", str(tmp_path), str(second)).identity


def test_scripts_are_told_apart_by_their_content(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("a")
    first = script_facts(str(script))
    script.write_text("b")
    assert script_facts(str(script)).sha256 != first.sha256
    assert not script_facts(str(tmp_path / "no.py")).is_there


def test_tmpdir_of_the_job_is_looked_at_not_ours(tmp_path):
    found = collect_files(FactsRequest(is_long=False, environment={"TMPDIR": str(tmp_path)}))
    assert [(f.role, f.path) for f in found.folders] == [("temp", str(tmp_path))]


def test_without_a_gpu_nothing_is_asked(tmp_path):
    def ask(argv, limit_s):
        raise AssertionError(argv)

    assert collect_gpus({}, ask, 3.0, is_long=True, root=str(tmp_path)).num_devices == 0


def test_gpus_are_read_with_their_health(tmp_path):
    write(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information")
    answers = {
        "--query-gpu=index,uuid": answer(ROW),
        "--query-gpu=index,ecc": answer("0, 3, Active, Not Active, 8, 16"),
        "--query-remapped-rows": answer("GPU-1, Yes, No"),
        "nvidia-smi": answer("CUDA Version: 12.6 "),
    }

    def ask(argv, limit_s):
        known = [said for word, said in answers.items() if argv[-1].startswith(word)]
        known += [said for word, said in answers.items() if argv[1:] and argv[1].startswith(word)]
        return known[0] if known else answer("no such option", 2)

    found = collect_gpus({}, ask, 3.0, is_long=True, root=str(tmp_path))
    (gpu,) = found.gpus
    assert (gpu.name, gpu.used_bytes, gpu.num_ecc_errors) == ("NVIDIA H200", 1 << 30, 3)
    assert gpu.throttled == ("thermal slowdown",)
    assert gpu.must_be_reset
    assert (found.cuda, found.driver, found.visible) == ("12.6", "560.35.03", ("0",))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (proc.CommandOutput(status=None, stdout=b"", stderr=b""), "did not answer within 3 s"),
        (answer("Failed to initialize NVML: Driver/library version mismatch", 18), "mismatch"),
        (MusterError("x", why="No such file or directory"), "No such file"),
    ],
)
def test_an_nvidia_smi_that_fails_is_said(tmp_path, said, why):
    write(tmp_path, "dev/nvidia0")

    def ask(argv, limit_s):
        if isinstance(said, MusterError):
            raise said
        return said

    found = collect_gpus({}, ask, 3.0, root=str(tmp_path))
    assert (found.num_devices, found.gpus) == (1, ())
    assert why in found.why_not


def test_rows_that_make_no_sense_are_left_out():
    assert read_gpus("No devices were found\n,,,\n")[0] == ()
    gpus, _ = read_gpus(f"{ROW}\n1, GPU-2, X, 1, [N/A], [N/A], Default\n")
    assert [gpu.memory_bytes for gpu in gpus] == [143771 << 20, 0]
    assert add_health(gpus, "[Not Supported]")[0].num_ecc_errors is None


def test_xids_are_found_in_the_kernels_log():
    log = b"4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"
    assert read_xids(log * 2) == ("0000:3b:00 79",)


def test_rdma_ports_are_read(tmp_path):
    base = "sys/class/infiniband/mlx5_0/ports/1"
    write(tmp_path, f"{base}/state", "4: ACTIVE\n")
    write(tmp_path, f"{base}/link_layer", "Ethernet\n")
    write(tmp_path, f"{base}/gids/0", "0000:0000:0000:0000:0000:0000:0000:0000\n")
    write(tmp_path, f"{base}/gids/1", "fe80:0000:0000:0000:0202:c9ff:fe00:0001\n")
    (found,) = rdma_ports(str(tmp_path))
    assert (found.kind, found.state, found.num_gids) == ("Ethernet", "ACTIVE", 1)


def test_names_without_an_answer_say_why():
    found, failed = resolve(["localhost", "no-such-host.invalid", "a" * 300], 5.0)
    assert "localhost" in found
    assert set(failed) == {"no-such-host.invalid", "a" * 300}


def test_the_way_to_oneself_is_found_without_a_packet():
    assert source_for("127.0.0.1") == "127.0.0.1"
    assert source_for("not an address") is None


def test_secrets_of_the_environment_stay_where_they_are(tmp_path):
    environment = {
        "TORCH_API_TOKEN": "s3cret",
        "NCCL_DEBUG": "INFO",
        "HOME": "/home/u",
        "https_proxy": "http://me:s3cret@proxy:3128",
    }
    found = collect_environment(environment)
    assert found.variables == {"NCCL_DEBUG": "INFO"}
    assert "s3cret" not in json.dumps(codec.to_plain(found))


def test_plugins_of_nccl_are_found_on_the_loaders_path(tmp_path):
    write(tmp_path, "libnccl-net-ofi.so.1")
    write(tmp_path, "libnccl.so.2")
    found = collect_environment({"LD_LIBRARY_PATH": f"{tmp_path}:/no/such"})
    assert str(tmp_path / "libnccl-net-ofi.so.1") in found.plugins
    assert not any(path.endswith("libnccl.so.2") for path in found.plugins)


def test_the_time_left_and_the_node_file_are_read(tmp_path):
    (tmp_path / "nodes").write_text("n1\nn1\nn2\n")
    environment = {"SLURM_JOB_END_TIME": "1100", "PBS_NODEFILE": str(tmp_path / "nodes")}
    found = collect_environment(environment, now=1000.0)
    assert (found.left_s, found.total_s, found.nodefile) == (100.0, None, (3, 2))
    found = collect_environment(environment | {"SLURM_JOB_START_TIME": "500"}, now=1000.0)
    assert found.total_s == 600.0


@pytest.mark.parametrize(("end", "left_s"), [("1100", 100.0), ("soon", None), ("", None)])
def test_a_job_of_pbs_ends_when_the_head_was_told(end, left_s):
    found = collect_environment({ALLOCATION_ENDS_AT: end}, now=1000.0)
    assert (found.left_s, found.total_s) == (left_s, None)


def test_torch_is_found_without_importing_it():
    torch = pytest.importorskip("torch")
    assert own_torch().torch == torch.__version__


def test_what_is_no_text_is_no_version():
    assert torch_facts({"torch": 7, "python": ["x"]}).torch is None
