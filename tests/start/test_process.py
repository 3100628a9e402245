"""What a spawner does for the processes that it starts: signals, output, state of the kernel. And those that a script starts."""

import os
import shutil
import signal

import pytest

from kit.waiting import wait_until
from start.ways import FORKED, FRESH, PYTHON, Workers, make_place
from torchmuster.core import proc
from torchmuster.core.model.plan import ScriptKind
from torchmuster.core.node.spawner import start


@pytest.mark.parametrize("way", [FORKED, FRESH])
def test_a_signal_right_after_the_start_is_not_lost(place, way):
    place.write("prog.py", "import signal\nsignal.pause()\n")
    with Workers(place, "prog.py", way=way) as workers:
        for _ in range(10):
            outputs = workers.start()
            workers.signal(signal.SIGTERM)
            assert workers.finish(outputs).code == -signal.SIGTERM


def test_the_end_of_the_agent_ends_the_workers_before_its_lease_does(place, monkeypatch):
    monkeypatch.setattr(start, "LEASE_S", 3600.0)
    place.write("prog.py", "import signal\nprint('on', flush=True)\nsignal.pause()\n")
    with Workers(place, "prog.py") as workers:
        out, err = workers.start()
        assert os.read(out, 3) == b"on\n"
        (worker,) = proc.children_of(workers.pid)
        workers.close_channel()
        wait_until(lambda: not proc.is_running(worker), "the end of the worker")
        wait_until(lambda: not proc.is_running(workers.pid), "the end of the spawner")
    os.close(out)
    os.close(err)


def test_a_worker_writes_only_what_it_wrote_itself(place):
    place.write(
        "chatty.py",
        "import ctypes, sys\n"
        "print('from the import')\n"
        "sys.stdout.buffer.write(b'from the import')\n"
        "ctypes.CDLL(None).puts(b'from a library in C')\n"
        "sys.stderr.write('no newline')\n",
    )
    place.write("prog.py", "print('from the script')\n")
    with Workers(place, "prog.py", preload=["chatty"]) as workers:
        for _ in range(2):
            done = workers.run()
            assert (done.code, done.stdout, done.stderr) == (0, "from the script\n", "")


def test_one_worker_leaves_nothing_to_the_next(place):
    place.write(
        "prog.py",
        "import os, sys, threading\n"
        "print(sorted(n for n in os.environ if n.startswith('LEFT')), hasattr(sys, 'left'),\n"
        "      os.getcwd(), len(os.listdir('/proc/self/fd')), os.umask(0o22), sys.path[1:2])\n"
        "os.environ['LEFT'] = sys.left = '1'\n"
        "os.chdir('/')\n"
        "sys.path.insert(1, 'left')\n"
        "left = open('/dev/null')\n",
    )
    with Workers(place, "prog.py") as workers:
        first, second = workers.run(), workers.run()
    assert first.code == 0
    assert first == second


def test_a_command_gets_the_signals_that_a_shell_would_give_it(place):
    """Python ignores SIGPIPE; `yes | head` in a job's shell script must not inherit that."""
    words = ("-c", "grep SigIgn /proc/self/status")
    plain = place.plain(*words, python=("/bin/sh",))
    with Workers(place, "/bin/sh", *words, way=FRESH, kind=ScriptKind.COMMAND) as workers:
        ours = workers.run()
    assert ours == plain


# Processes that a script starts: multiprocessing, loader workers, the compiler's pool.

QUIET = (*PYTHON, "-B")
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
    plain = folder.plain(*words, python=QUIET)
    with Workers(folder, words[-1], way=way, kind=kind, python=QUIET, preload=preload) as workers:
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
