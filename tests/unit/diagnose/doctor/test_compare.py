"""Findings from made-up nodes: each fault is named, and healthy set-ups get notes only."""

import os
from dataclasses import replace

import pytest

from torchmuster.diagnose.doctor.compare import compare, exit_code
from torchmuster.diagnose.doctor.show import NodeView, Situation, differ, names_of
from torchmuster.diagnose.finding import Level
from torchmuster.launcher.facts.collect import EnvironmentFacts, FactsRequest, collect, own_torch
from torchmuster.launcher.facts.gpu import GpuFacts, GpuLinks
from torchmuster.launcher.model.network import Interface
from unit.diagnose.doctor.made_up import GIB, all_pairs, facts, gpu, gpus, node, port, situation

CUDA = {"torch": "2.13.0+cu126", "cuda": "12.6", "nccl": "2.27.5"}
MIB = 1 << 20
SWITCHED = GpuLinks(kinds=("NV18",), nvlinks=((18, 18),) * 4, num_redirecting=0)


def gpu_node(k=1, **parts):
    return node(k, **{"num_workers": 4, "torch": CUDA, "gpu": gpus(), **parts})


def folder(k, role, **more):
    return tuple(replace(f, **more) if f.role == role else f for f in facts(k).files.folders)


def by_cause(found):
    return {finding.cause: finding for finding in found}


def told(*nodes, **more):
    return [(finding.cause, finding.level) for finding in compare(situation(*nodes, **more))]


# Each is a whole set-up, and nothing is wrong with it.
HEALTHY = {
    "one laptop": [node(1, num_workers=1)],
    "two nodes": [node(1), node(2)],
    "eight nodes": [node(k) for k in range(1, 9)],
    "64 nodes": [node(k, network={"names": {}}) for k in range(1, 65)],
    "simulated nodes of one machine": [node(k, machine="m") for k in (1, 2, 3)],
    "a container with 64 MiB of shared memory": [
        node(1, system={"shm_bytes": 64 * MIB, "shm_free_bytes": 64 * MIB})
    ],
    "a laptop with few open files": [node(1, system={"limits": {"nofile": 1024, "nproc": 15000}})],
    "a small virtual machine": [
        node(1, num_workers=2, system={"num_cpus": 1, "num_usable_cpus": 1, "cpus": "0"})
    ],
    "a container with a limit of memory": [node(1, system={"memory_limit_bytes": 16 * GIB})],
    "four GPUs on one node": [gpu_node(1)],
    "two nodes with four GPUs": [gpu_node(1), gpu_node(2)],
    "GPUs behind a switch of NVLink": [gpu_node(k, gpu=gpus(links=SWITCHED)) for k in (1, 2)],
    "GPUs over PCIe that sleep": [
        gpu_node(
            k,
            gpu=gpus(
                gpus=tuple(gpu(j, pcie_width=8, pcie_max_width=16) for j in range(4)),
                links=GpuLinks(kinds=("PHB", "SYS"), nvlinks=((0, 4),) * 4, num_redirecting=0),
            ),
        )
        for k in (1, 2)
    ],
    "GPUs and InfiniBand": [
        gpu_node(k, network={"rdma": (port(),), "has_rdma_files": True}, environment={"verbs": True})
        for k in (1, 2)
    ],
    "Slingshot with its plugin": [
        gpu_node(
            k,
            network={"cxi": ("cxi0",)},
            environment=EnvironmentFacts(
                variables={"FI_PROVIDER": "cxi"}, plugins=("/opt/lib/libnccl-net.so",)
            ),
        )
        for k in (1, 2)
    ],
    "hosts without a shared folder": [
        node(k, files={"folders": folder(k, "run", identity=(1700000000 + k, k))}) for k in (1, 2)
    ],
    "names of loopback, before a start": [
        node(k, network={"own_addresses": ("127.0.1.1",)}) for k in (1, 2)
    ],
    "clocks half a second apart": [node(1), node(2, clock_s=0.5)],
    "GPUs chosen for a job": [gpu_node(1, num_workers=2, gpu=gpus(visible=("2", "3"))), gpu_node(2, num_workers=2, gpu=gpus(visible=("0", "1")))],
    "interface variables for each node": [
        node(k, environment=EnvironmentFacts(variables={"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0"}))
        for k in (1, 2)
    ],
    "inside a Slurm job": [
        node(k, environment=EnvironmentFacts(scheduler={"SLURM_CPUS_PER_TASK": "32"}, left_s=86400.0))
        for k in (1, 2)
    ],
    "no way out": [node(k, network={"outside": None}) for k in (1, 2)],
    "a node that says little": [node(1), node(2, gpu=GpuFacts(why_not="no nvidia-smi"))],
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_set_up_gets_notes_only(name):
    nodes = HEALTHY[name]
    is_long = "before a start" not in name
    made = situation(*nodes, is_long=is_long, pairs=all_pairs(len(nodes)), bulk_bytes=4 << 20)
    worse = [finding for finding in compare(made) if finding.level is not Level.NOTE]
    assert worse == []


def test_there_are_20_healthy_set_ups():
    assert len(HEALTHY) >= 20


def test_this_machine_gets_no_failure():
    found = collect(FactsRequest(is_long=True, environment=os.environ))
    here = NodeView(name="here", facts=replace(found, torch=own_torch()), machine="m")
    levels = {finding.level for finding in compare(Situation(nodes=(here,), is_long=True))}
    assert Level.FAILURE not in levels


# What is wrong with n3 of three, and what is said of it: cause, level, a part of the sentence.
F, W, N = Level.FAILURE, Level.WARNING, Level.NOTE
FAULTS = {
    "other torch": ({"torch": {"torch": "2.6.0"}}, "torch-versions-differ", F, "n3 has torch 2.6.0, the 2 others 2.13.0+cpu"),
    "other build": ({"torch": {"torch": "2.13.1"}}, "torch-versions-differ", W, "different builds"),
    "no torch": ({"torch": {"torch": None}}, "package-missing", F, "torch is not installed on n3"),
    "other Python": ({"torch": {"python": "3.12.1"}}, "python-versions-differ", W, "n3 has Python 3.12"),
    "other processor": ({"system": {"machine": "aarch64"}, "torch": {"machine": "aarch64"}}, "wrong-processor", W, "n3 has processor aarch64"),
    "emulated": ({"torch": {"machine": "aarch64"}}, "wrong-processor", W, "built for aarch64"),
    "clock 20 s behind": ({"clock_s": -20.0}, "clocks-differ", F, "20.0 s behind"),
    "clock 3 s ahead": ({"clock_s": 3.0}, "clocks-differ", W, "3.0 s ahead of"),
    "own name is loopback": ({"network": {"own_addresses": ("127.0.1.1",)}}, "loopback-address", W, "n3 is 127.0.1.1"),
    "no own name": ({"network": {"own_addresses": ()}}, "name-not-resolved", W, "the own name of n3"),
    "foreign own name": ({"network": {"own_addresses": ("10.9.9.9",)}}, "name-not-resolved", W, "no interface of it has"),
    "slow name server": ({"network": {"name_s": 3.0}}, "slow-names", W, "takes 3.0 s"),
    "jumbo frames": ({"network": {"mtu": {"eth0": 9000}}}, "mtu-differs", W, "n3 has an MTU of 9000, the 2 others 1500"),
    "tiny shared memory": ({"system": {"shm_bytes": 8 * MIB}}, "small-dev-shm", W, "is only 8 MiB on n3"),
    "full shared memory": ({"system": {"shm_free_bytes": MIB}}, "small-dev-shm", W, "nearly full on n3"),
    "no shared memory": ({"system": {"shm_bytes": None, "shm_free_bytes": None}}, "small-dev-shm", W, "missing on n3"),
    "few files": ({"system": {"limits": {"nofile": 256}}}, "too-few-files", W, "256 files on n3"),
    "few processes": ({"system": {"limits": {"nproc": 100}}}, "too-few-processes", W, "100 processes"),
    "little memory": ({"system": {"memory_limit_bytes": GIB}}, "out-of-memory", W, "only 1 GiB of 128 GiB"),
    "one CPU": ({"system": {"num_usable_cpus": 1, "cpus": "7"}}, "too-few-cpus", W, "only 1 CPU"),
    "script missing": ({"files": {"script": replace(facts().files.script, is_there=False, why="No such file or directory")}}, "script-missing", F, "does not exist on n3"),
    "other script": ({"files": {"script": replace(facts().files.script, sha256="cd" * 32)}}, "scripts-differ", F, "n3 differs"),
    "run folder closed": ({"files": {"folders": folder(3, "run", is_writable=False, why="Permission denied")}}, "folder-not-writable", F, "can't be written on n3"),
    "disk full": ({"files": {"folders": folder(3, "run", free_bytes=MIB)}}, "disk-full", F, "1 MiB free on n3"),
    "little room": ({"files": {"folders": folder(3, "run", free_bytes=200 * MIB)}}, "disk-full", W, "200 MiB free"),
    "no inodes": ({"files": {"folders": folder(3, "run", free_files=7)}}, "disk-full", W, "only 7 more files"),
    "no rename": ({"files": {"folders": folder(3, "run", can_rename=False, why="Invalid cross-device link")}}, "folder-not-writable", F, "does not allow renaming files"),
    "no TMPDIR": ({"files": {"folders": folder(3, "temp", is_there=False, is_writable=False, why="No such file")}}, "folder-not-writable", W, "TMPDIR does not exist on n3"),
    "long TMPDIR": ({"files": {"folders": folder(3, "temp", path="/" + "x" * 95)}}, "long-tmpdir", W, "96 characters"),
    "wrong provider": ({"environment": {"variables": {"FI_PROVIDER": "efa"}}}, "wrong-provider", F, "FI_PROVIDER=efa"),
    "bad grammar": ({"environment": {"variables": {"GLOO_SOCKET_IFNAME": "=eth0"}}}, "bad-variable", W, "GLOO_SOCKET_IFNAME==eth0"),
    "no such interface": ({"environment": {"variables": {"NCCL_SOCKET_IFNAME": "ib0"}}}, "no-such-interface", F, "ib0 names no interface of n3"),
    "variable on one node": ({"environment": {"variables": {"NCCL_ALGO": "Ring"}}}, "environment-differs", W, "NCCL_ALGO is not the same"),
    "a file system that hangs": ({"files": None, "unknown": {"files": "no answer within 3.5 s"}}, "file-system-hangs", W, "n3 could not report on folders"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_one_of_three_nodes_comes_first(name):
    parts, cause, level, words = FAULTS[name]
    bad = node(3, **{k: v for k, v in parts.items() if k != "unknown"})
    if "unknown" in parts:
        bad = replace(bad, facts=replace(bad.facts, unknown=parts["unknown"]))
    found = compare(situation(node(1), node(2), bad))
    assert found, name
    assert (found[0].cause, found[0].level) == (cause, level)
    assert words in found[0].error
    assert "n3" in " ".join([found[0].error, found[0].at or "", *found[0].because])


GPU_FAULTS = {
    "no GPU": ({"gpu": GpuFacts()}, "no-gpu", F, "n2 has 0 GPUs"),
    "hidden GPUs": ({"gpu": gpus(visible=())}, "no-gpu", F, "0 GPUs"),
    "fewer GPUs than workers": ({"num_workers": 8, "gpu": gpus()}, "gpu-ordinal", W, "8 workers of n2 see 4 GPUs"),
    "nvidia-smi hangs": ({"gpu": gpus(gpus=(), why_not="nvidia-smi did not answer within 3 s")}, "gpu-hardware", W, "could not be checked"),
    "memory errors": ({"gpu": gpus(gpus=(gpu(num_ecc_errors=3),), num_devices=1)}, "gpu-hardware", F, "3 uncorrected"),
    "fallen off the bus": ({"gpu": gpus(xids=("0000:01:00 79",))}, "gpu-hardware", F, "Xid 79"),
    "in use": ({"gpu": gpus(gpus=tuple(gpu(k, used_bytes=30 * GIB) for k in range(4)))}, "gpu-in-use", W, "used by another process"),
    "throttled": ({"gpu": gpus(gpus=tuple(gpu(k, throttled=("thermal slowdown",)) for k in range(4)))}, "gpu-throttled", W, "slowed down"),
    "rows to be replaced": ({"gpu": gpus(gpus=tuple(gpu(k, must_be_reset=k == 2) for k in range(4)))}, "gpu-hardware", W, "GPU 2 of n2"),
    "an NVLink down": ({"gpu": gpus(links=GpuLinks(nvlinks=((18, 18), (17, 18), (18, 18), (18, 18))))}, "gpu-links", W, "GPU 1 of n2 has 17 of 18"),
    "one GPU without NVLink": ({"gpu": gpus(links=GpuLinks(nvlinks=((18, 18), (0, 18), (18, 18), (18, 18))))}, "gpu-links", W, "GPU 1 of n2 has 0 of 18"),
    "joined differently": ({"gpu": gpus(links=GpuLinks(kinds=("PIX", "SYS")))}, "gpu-links", N, "n2 has PIX, SYS"),
    "no direct copies": ({"gpu": gpus(links=GpuLinks(kinds=("NV18",), no_p2p=("0-1 CNS",)))}, "gpu-links", N, "GPUs of n2 can't read"),
    "few lanes": ({"gpu": gpus(gpus=tuple(gpu(k, pcie_width=8 if k == 3 else 16, pcie_max_width=16) for k in range(4)))}, "gpu-links", N, "GPU 3 of n2 uses 8 of 16"),
    "IOMMU": ({"gpu": gpus(has_iommu=True)}, "iommu", N, "active on n2"),
    "ACS": ({"gpu": gpus(links=GpuLinks(kinds=("PIX",), num_redirecting=4))}, "acs", N, "PCI bridges of n2"),
    "other model": ({"gpu": gpus(gpus=tuple(gpu(k, name="NVIDIA A100") for k in range(4)))}, "gpus-differ", W, "A100"),
    "old driver": ({"gpu": gpus(driver="470.82.01")}, "driver-too-old", F, "built for CUDA 12.6"),
    "CPU-only wheel": ({"torch": {"torch": "2.13.0+cpu", "cuda": None}}, "no-gpu", F, "without CUDA"),
    "other NCCL": ({"torch": {**CUDA, "nccl": "2.21.5"}}, "nccl-versions-differ", F, "NCCL"),
    "64 MiB of shared memory": ({"system": {"shm_bytes": 64 * MIB}}, "small-dev-shm", F, "only 64 MiB"),
    "locked memory": ({"network": {"rdma": (port(),), "has_rdma_files": True}, "system": {"limits": {"memlock": 65536}}, "environment": {"verbs": True}}, "ib-path", W, "active"),
    "plugin missing": ({"environment": {"variables": {"NCCL_NET": "AWS Libfabric"}}}, "network-plugin", F, "NCCL_NET=AWS Libfabric"),
    "Slingshot without plugin": ({"network": {"cxi": ("cxi0",)}}, "network-plugin", W, "Slingshot"),
    "RDMA down": ({"network": {"rdma": (port(state="DOWN"),), "has_rdma_files": True}}, "ib-path", W, "no RDMA port is active on n2"),
    "no device files": ({"network": {"rdma": (port(),)}, "environment": {"verbs": True}}, "ib-path", W, "n2"),
}  # fmt: skip


@pytest.mark.parametrize("name", GPU_FAULTS)
def test_what_is_wrong_with_the_gpus_of_one_node_is_named(name):
    parts, cause, level, words = GPU_FAULTS[name]
    found = compare(situation(gpu_node(1, gpu=gpus(links=SWITCHED)), gpu_node(2, **parts)))
    fitting = [f for f in found if f.cause == cause and f.level is level]
    assert fitting, found
    assert words in fitting[0].error
    assert found[0].level is level


def test_bridges_that_join_some_gpus_are_no_broken_link():
    links = GpuLinks(kinds=("NV12", "SYS"), nvlinks=((12, 12), (12, 12), (0, 12), (0, 12)))
    found = compare(situation(*[gpu_node(k, gpu=gpus(links=links)) for k in (1, 2)]))
    assert {f.level for f in found} == {N}
    assert "GPU 2 of n1 has 0 of 12 NVLinks" in by_cause(found)["gpu-links"].error


def test_an_iommu_is_no_matter_where_all_gpus_have_nvlink():
    found = compare(situation(gpu_node(1, gpu=gpus(links=SWITCHED, has_iommu=True))))
    assert "iommu" not in by_cause(found)


@pytest.mark.parametrize(
    ("left_s", "total_s", "is_told"),
    [(290, 300, False), (290, 3600, True), (290, None, True), (1000, 86400, False)],
)
def test_a_job_whose_time_is_nearly_used_up_is_told(left_s, total_s, is_told):
    environment = EnvironmentFacts(left_s=left_s, total_s=total_s)
    assert told(node(1, environment=environment)) == [("time-limit", W)] * is_told


def test_rdma_needs_locked_memory():
    rdma = {"rdma": (port(),), "has_rdma_files": True}
    low = {"limits": {"memlock": 65536}}
    nodes = [gpu_node(k, network=rdma, system=low, environment={"verbs": True}) for k in (1, 2)]
    assert by_cause(compare(situation(*nodes)))["memlock"].level is Level.WARNING


def test_a_bridge_that_names_mean_is_worse_than_one_that_is_there():
    bridge = Interface(name="docker0", address="172.17.0.1", prefix_bits=16)
    there = [{"interfaces": (*facts(k).network.interfaces, bridge)} for k in (1, 2)]
    meant = [{**parts, "own_addresses": ("172.17.0.1",)} for parts in there]
    harmless = compare(situation(*[node(k, network=there[k - 1]) for k in (1, 2)]))
    assert by_cause(harmless)["bridge-address"].level is Level.NOTE
    harmful = compare(situation(*[node(k, network=meant[k - 1]) for k in (1, 2)]))
    assert by_cause(harmful)["bridge-address"].level is Level.WARNING


def test_two_nodes_have_no_majority_and_both_are_named():
    found = compare(situation(node(1), node(2, torch={"torch": "2.6.0"})))
    assert "n1 has torch 2.13.0+cpu, n2 has torch 2.6.0" in found[0].error
    assert found[0].at == "n1 and n2"


def test_a_whole_bad_column_is_the_nodes_way_in():
    refused = {"why": "connection refused", "latency_s": None, "bytes_per_s": None}
    pairs = all_pairs(4, p0_2=refused, p1_2=refused, p3_2=refused)
    found = compare(situation(*[node(k) for k in range(1, 5)], pairs=pairs))
    assert [f.cause for f in found] == ["port-blocked"]
    assert "connections to n3 from all other nodes" in found[0].error
    assert found[0].is_certain


def test_a_single_bad_cell_is_a_path():
    silent = {"why": "no answer within 3 s", "latency_s": None, "bytes_per_s": None}
    nodes = [node(k) for k in range(1, 5)]
    (found,) = compare(situation(*nodes, pairs=all_pairs(4, p1_3=silent)))
    assert found.error == "connections from n2 to n4 fail on a random port: no answer within 3 s"


def test_a_connection_without_bytes_is_a_black_hole():
    stalled = {"why": "64 KiB did not arrive", "stalled": True, "bytes_per_s": None}
    found = compare(situation(node(1), node(2), pairs=all_pairs(2, p0_1=stalled)))
    assert [(f.cause, f.is_certain) for f in found] == [("mtu-black-hole", True)]


def test_a_pair_with_half_the_bandwidth_is_named():
    pairs = all_pairs(3, p0_2={"bytes_per_s": 1e8})
    nodes = [node(k) for k in (1, 2, 3)]
    assert told(*nodes, pairs=pairs, bulk_bytes=4 << 20) == [("slow-path", W)]
    assert told(*nodes, pairs=pairs, bulk_bytes=64 << 10) == []


def test_simulated_nodes_that_are_too_slow_are_no_broken_network():
    late = {"why": "no answer within 3 s", "latency_s": None, "bytes_per_s": None}
    nodes = [node(k, machine="m") for k in (1, 2)]
    assert told(*nodes, pairs=all_pairs(2, p0_1=late)) == [("machine-busy", N)]


def test_a_node_without_an_answer_is_named():
    silent = NodeView(name="n2", why_not="it did not answer in time", machine="m2")
    (found,) = compare(situation(node(1), silent))
    assert (found.cause, found.error) == ("unknown", "n2 could not be checked")


def test_only_certain_failures_end_a_run():
    """A list, so that one more is a decision: a run that could have worked must not be ended."""
    known = [parts for parts, *_ in FAULTS.values() if "unknown" not in parts]
    found = [compare(situation(node(1), node(2), node(3, **parts))) for parts in known]
    certain = {finding.cause for findings in found for finding in findings if finding.is_certain}
    assert certain == {"torch-versions-differ", "package-missing", "script-missing"}


def test_a_script_that_is_only_asked_about_ends_nothing():
    parts, *_ = FAULTS["script missing"]
    found = compare(situation(node(1), node(2, **parts), script_is_program=False))
    assert found[0].cause == "script-missing"
    assert not found[0].is_certain


@pytest.mark.parametrize(
    ("levels", "could_tell", "code"),
    [([], True, 0), ([N], True, 0), ([W, N], True, 1), ([F, W], True, 2), ([F], False, 2), ([W], False, 3)],
)  # fmt: skip
def test_exit_codes_say_the_worst(levels, could_tell, code):
    sample = compare(situation(node(1), node(2, torch={"torch": "2.6.0"})))[0]
    found = [replace(sample, level=level) for level in levels]
    assert exit_code(found, could_tell=could_tell) == code


def test_many_names_are_cut():
    assert names_of([f"n{k}" for k in range(1, 13)]) == "n1, n2, n3, n4, n5, n6, n7 and 5 others"


def test_equal_values_do_not_differ():
    assert differ({"n1": 1, "n2": 1}, "x") is None


@pytest.mark.parametrize(("tasks", "is_told"), [("2", False), ("8", True), ("", False)])
def test_several_tasks_on_each_node_are_told(tasks, is_told):
    environment = EnvironmentFacts(scheduler={"SLURM_NTASKS": tasks, "SLURM_NNODES": "2"})
    found = compare(situation(*[node(k, environment=environment) for k in (1, 2)]))
    assert [(f.cause, f.level) for f in found] == ([("several-tasks-a-node", N)] if is_told else [])
    assert all("8 tasks on 2 nodes" in f.error for f in found)


@pytest.mark.parametrize(("core", "is_told"), [(0, False), (-1, True), (1 << 20, False)])
def test_core_files_without_a_limit_are_told(core, is_told):
    limits = {"nofile": 65536, "nproc": -1, "memlock": -1, "core": core}
    assert told(node(1, system={"limits": limits})) == [("core-files", N)] * is_told


@pytest.mark.parametrize(
    ("own", "cause"), [(("127.0.1.1",), "loopback-address"), ((), "name-not-resolved")]
)
def test_a_single_machine_whose_name_no_other_node_could_use_gets_a_note(own, cause):
    alone = node(1, network={"own_addresses": own})
    found = by_cause(compare(situation(alone)))[cause]

    assert found.level is Level.NOTE
    assert "other nodes" in " ".join(found.because)
    assert cause not in by_cause(compare(situation(alone, is_long=False)))


@pytest.mark.parametrize(("size", "level"), [(9 * MIB, Level.NOTE), (20 * GIB, Level.WARNING)])
def test_files_that_killed_programs_left_are_told_with_their_size(size, level):
    left = node(1, system={"left_shm_files": 3, "left_shm_bytes": size})
    found = by_cause(compare(situation(left, node(2))))["left-shared-memory"]

    assert (found.level, found.at) == (level, "n1")
    assert "3 files" in found.error
    assert "-name 'torch_*'" in (found.hint or "")


@pytest.mark.parametrize(
    ("proxies", "caught"),
    [
        ({}, None),
        ({"no_proxy": "10.0.0.0/8"}, None),
        ({"http_proxy": "http://p:3128"}, "localhost, 10.0.0.1 and 10.0.0.2"),
        ({"http_proxy": "http://p:3128", "no_proxy": "localhost"}, "10.0.0.1 and 10.0.0.2"),
        ({"http_proxy": "http://p:3128", "no_proxy": "localhost,10.0.0.1,.cluster"}, "10.0.0.2"),
        ({"https_proxy": "http://p:3128", "no_proxy": "localhost, 10.0.0.0/8"}, None),
        ({"http_proxy": "http://p:3128", "no_proxy": "localhost,n1,n2"}, None),
        ({"http_proxy": "http://p:3128", "no_proxy": "*"}, None),
    ],
)
def test_a_proxy_that_catches_local_addresses_is_told(proxies, caught):
    nodes = [node(k, environment={"proxies": proxies}) for k in (1, 2)]
    found = by_cause(compare(situation(*nodes))).get("proxy")

    assert (found is None) == (caught is None)
    if found is not None:
        assert found.error == f"a proxy on n1 and n2 gets what is meant for {caught}"
        assert found.level is Level.NOTE
