"""Processes that a script starts: multiprocessing, loader workers, the compiler's pool."""

import shutil
import sys

import pytest

from start.ways import FORKED, FRESH, Workers, make_place
from torchmuster.core.model.plan import ScriptKind

PYTHON = (sys.executable, "-S", "-B")  # without torch, so that a spawner starts at once
METHODS = ("fork", "spawn", "forkserver")

POOLS = """
import json, multiprocessing, os, sys

class Point:
    def __init__(self, x):
        self.x = x
        self.made_in = __name__

def square(x):
    return x * x

def child(queue, point):
    queue.put((__name__, point.x, Point(5), sys.argv, multiprocessing.current_process().name))

def try_all(context):
    queue = context.Queue()
    process = context.Process(target=child, args=(queue, Point(4)))
    process.start()
    name, x, point, argv, process_name = queue.get(timeout=60)
    process.join()
    with context.Pool(2) as pool:
        squares = pool.map(square, range(4))
        points = pool.map(Point, range(3))
    return [name, x, point.made_in, type(point) is Point, argv, process_name, process.exitcode,
            squares, [p.x for p in points], {type(p) is Point for p in points} == {True}]

if __name__ == "__main__":
    methods = ("fork", "spawn", "forkserver")
    print(json.dumps({m: try_all(multiprocessing.get_context(m)) for m in methods}))
"""

LOADERS = """
import json
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

class Squares(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index * index, get_worker_info().id, torch.rand(1).item()

def load(method):
    loader = DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context=method)
    batches = [[part.tolist() for part in batch] for batch in loader]
    values = [value for batch in batches for value in batch[0]]
    randoms = [number for batch in batches for number in batch[2]]
    return {"values": values, "workers": [batch[1] for batch in batches], "randoms": randoms}

if __name__ == "__main__":
    print(json.dumps({method: load(method) for method in ("fork", "spawn", "forkserver")}))
"""

COMPILED = """
import json, os
import torch
from torch._inductor.async_compile import AsyncCompile

@torch.compile
def total(x):
    return (x.sin() + x.cos()).sum()

if __name__ == "__main__":
    x = torch.arange(10.0)
    difference = abs(total(x) - (x.sin() + x.cos()).sum()).item()
    pool = AsyncCompile.process_pool()
    pid = pool.submit(os.getpid).result(timeout=60)
    print(json.dumps({"difference": difference, "pool": type(pool).__name__, "own": pid == os.getpid()}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = make_place(tmp_path_factory.mktemp("children"))
    place.write("pools.py", POOLS)
    return place


@pytest.mark.parametrize("way", [FORKED, FRESH])
@pytest.mark.parametrize("words", [["pools.py"], ["-m", "pools"]], ids=" ".join)
def test_processes_and_pools_work_in_every_start_method(folder, words, way):
    kind = ScriptKind.MODULE if words[0] == "-m" else ScriptKind.FILE
    # The spawner has multiprocessing already, as it has with torch.
    preload = ("multiprocessing.pool", "multiprocessing.forkserver")
    plain = folder.plain(*words, python=PYTHON)
    with Workers(folder, words[-1], way=way, kind=kind, python=PYTHON, preload=preload) as workers:
        ours = workers.run()
    assert ours.stderr == ""
    assert ours.facts() == plain.facts()
    assert sorted(ours.facts()) == sorted(METHODS)


def test_loader_workers_work_in_every_start_method(place):
    pytest.importorskip("torch", reason="the loader is torch's")
    place.write("loaders.py", LOADERS)
    found = place.muster("loaders.py").facts()
    for method in METHODS:
        assert found[method]["values"] == [index**2 for index in range(8)]
        assert found[method]["workers"] == [[0, 0], [1, 1], [0, 0], [1, 1]]
        assert len(set(found[method]["randoms"])) == 8


def test_the_compiler_and_its_pool_of_processes_work(tmp_path):
    pytest.importorskip("torch", reason="the compiler is torch's")
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++, which is not installed")
    place = make_place(
        tmp_path,
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
        TORCHINDUCTOR_COMPILE_THREADS="2",
        # Without these two the compiler compiles for 8 s to learn what this processor has.
        TORCHINDUCTOR_VEC_ISA_OK="1",
        TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0",
    )
    place.write("compiled.py", COMPILED)
    found = place.muster("compiled.py").facts()
    assert found["difference"] < 1e-5
    assert (found["pool"], found["own"]) == ("SubprocPool", False)
