"""Nodes that never were: healthy ones, and what a test changes about them."""

import itertools
from dataclasses import replace

from torchmuster.diagnose.doctor.show import NodeView, Pair, Situation
from torchmuster.launcher.facts.collect import (
    CollectedFacts,
    EnvironmentFacts,
    FileFacts,
    FolderFacts,
    NetworkSystemFacts,
    RdmaPort,
    ScriptFacts,
    SystemFacts,
    TorchFacts,
)
from torchmuster.launcher.facts.gpu import Gpu, GpuFacts
from torchmuster.launcher.model.network import Interface

GIB = 1 << 30


def gpu(index=0, **more):
    usual = {"index": index, "uuid": f"GPU-{index}", "name": "NVIDIA H100"}
    return Gpu(**{**usual, "memory_bytes": 80 * GIB, "used_bytes": 0, **more})


def gpus(number=4, **more):
    usual = {"gpus": tuple(map(gpu, range(number))), "visible": tuple(map(str, range(number)))}
    usual |= {"num_devices": number, "driver": "560.35.03", "cuda": "12.6"}
    return GpuFacts(**{**usual, **more})


def port(name="mlx5_0", **more):
    values = {"name": name, "port": 1, "kind": "InfiniBand", "state": "ACTIVE", "num_gids": 1}
    return RdmaPort(**values | more)


def facts(k=1):
    """Return the facts of a healthy node of a small cluster without GPUs."""
    run = FolderFacts(
        role="run",
        path="/home/u/.muster/runs/r",
        is_there=True,
        identity=(1700000000, 123456789),
        is_writable=True,
        can_rename=True,
        free_bytes=500 * GIB,
        free_files=10**8,
    )
    return CollectedFacts(
        torch=TorchFacts(
            python="3.11.7",
            executable="/opt/venv/bin/python",
            machine="x86_64",
            torch="2.13.0+cpu",
            is_known=True,
        ),
        system=SystemFacts(
            host=f"n{k}",
            kernel="6.1.0",
            machine="x86_64",
            boot_id=f"boot{k}",
            num_cpus=32,
            num_usable_cpus=32,
            cpus="0-31",
            memory_bytes=128 * GIB,
            limits={"nofile": 65536, "nproc": -1, "memlock": -1, "core": 0},
            shm_bytes=64 * GIB,
            shm_free_bytes=64 * GIB,
            uid=1000,
        ),
        network=NetworkSystemFacts(
            own_name=f"n{k}",
            own_addresses=(f"10.0.0.{k}",),
            names={f"n{j}": (f"10.0.0.{j}",) for j in range(1, 9)},
            interfaces=(Interface(name="eth0", address=f"10.0.0.{k}", prefix_bits=24),),
            links=("lo", "eth0"),
            mtu={"eth0": 1500},
            outside=f"10.0.0.{k}",
        ),
        files=FileFacts(
            folders=(run, replace(run, role="temp", path="/tmp", identity=())),
            script=ScriptFacts(path="/home/u/train.py", is_there=True, sha256="ab" * 32),
        ),
        gpu=GpuFacts(),
        environment=EnvironmentFacts(variables={"OMP_NUM_THREADS": "8"}),
    )


def node(k=1, *, num_workers=2, machine=None, clock_s=0.001, **parts):
    """Return a healthy node, with parts of its facts replaced: `system={"num_cpus": 4}` or a whole part."""
    found = facts(k)
    for name, change in parts.items():
        whole = replace(getattr(found, name), **change) if isinstance(change, dict) else change
        found = replace(found, **{name: whole})
    return NodeView(
        name=f"n{k}",
        facts=found,
        num_workers=num_workers,
        machine=machine or f"m{k}",
        interface="eth0",
        clock_s=clock_s,
        clock_error_s=0.0005,
    )


def situation(*nodes, is_long=True, pairs=(), **more):
    return Situation(nodes=tuple(nodes), is_long=is_long, pairs=tuple(pairs), **more)


def all_pairs(number, bytes_per_s=1e9, **special):
    """Return good pairs; `special` maps `s_t` to what is different about one."""
    usual = {"latency_s": 5e-5, "bytes_per_s": bytes_per_s}
    return [
        Pair(source=s, target=t, **{**usual, **special.get(f"p{s}_{t}", {})})
        for s, t in itertools.permutations(range(number), 2)
    ]
