"""What a script imports first is imported once for all its workers, unless that would make a difference.

And which variables torch reads while it is imported, here and with what else is installed: all are in our list.
"""

import json
import os
import sys

import pytest

from kit.command import SOURCE, ran
from torchmuster.core.model import contract
from torchmuster.core.node.spawner import serve
from torchmuster.launcher.node.spawner.import_watch import _SEARCHES

FINE = """
import os, random
MADE_BY = os.getpid()
GENERATOR = random.Random()
"""
SCRIPT = """
import accelerate as fine
import lightning as {second}
import json, os
print(json.dumps({{
    "rank": os.environ["RANK"],
    "made_here": fine.MADE_BY == os.getpid(),
    "second_here": {second}.MADE_BY == os.getpid(),
    "drawn": fine.GENERATOR.random(),
}}))
"""
SECOND = "import os\nMADE_BY = os.getpid()\n"


@pytest.fixture
def script(launch):
    def write(second: str, more: str) -> str:
        for name, text in (("accelerate", FINE), ("lightning", SECOND + more)):
            folder = launch.folder / "site-packages" / name
            folder.mkdir(parents=True)
            (folder / "__init__.py").write_text(text)
        launch.env["PYTHONPATH"] = f"{SOURCE}{os.pathsep}{launch.folder / 'site-packages'}"
        return launch.script(SCRIPT.format(second=second))

    return write


def said_by_ranks(launch, path) -> list[dict]:
    done = launch.run("--nproc-per-node=2", path)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if "{" in line]
    return sorted(map(json.loads, lines), key=lambda said: said["rank"])


def why_not_made(launch) -> list[str]:
    (path,) = launch.folder.glob("home/runs/*/events.jsonl")
    events = map(json.loads, path.read_text().splitlines())
    return [event["why"] for event in events if event["event"] == "imports_in_workers"]


def test_they_are_made_once_and_each_worker_is_itself(launch, script):
    ranks = said_by_ranks(launch, script("second", ""))
    assert [(said["made_here"], said["second_here"]) for said in ranks] == [(False, False)] * 2
    assert len({said["drawn"] for said in ranks}) == 2
    assert why_not_made(launch) == []


def test_one_that_starts_a_thread_is_left_to_the_workers_and_status_says_why(launch, script):
    path = script("second", "import threading\nthreading.Thread(target=int).start()\n")
    ranks = said_by_ranks(launch, path)
    assert [(said["made_here"], said["second_here"]) for said in ranks] == [(False, True)] * 2
    assert why_not_made(launch) == ["lightning starts a thread"]


def test_where_nothing_can_be_kept_another_run_finds_out_again(launch, script):
    path = script("second", "print('hello')\n")
    (launch.folder / "home").mkdir()
    (launch.folder / "home" / "cache").write_text("no folder")
    done = launch.run("--nproc-per-node=2", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hello") == 2
    assert why_not_made(launch) == ["`import lightning as second` prints 'hello'"]


# Notes who asks for which variable; "*" is who goes through all.
RECORDER = """
import json, os, sys

BEHIND = ("os", "collections.abc", "_collections_abc")
found = []

def asker():
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in BEHIND:
        frame = frame.f_back
    return frame.f_globals.get("__name__") if frame is not None else ""

class Environment(type(os.environ)):
    def __getitem__(self, key):
        found.append((key, asker()))
        return super().__getitem__(key)

    def __iter__(self):
        found.append(("*", asker()))
        return super().__iter__()

os.environ.__class__ = Environment
for name in json.loads(sys.argv[1]):
    __import__(name)
print(json.dumps(found))
"""
# Whatever a script does to these, torch and what it imports go the same way.
HARMLESS = {"HOME", "PATH", "PYTHONUSERBASE", "_PYTHON_PROJECT_BASE", "_PYTHON_SYSCONFIGDATA_NAME"}


def test_all_that_is_read_is_in_the_list():
    pytest.importorskip("torch")
    done = ran([sys.executable, "-c", RECORDER, json.dumps(serve._TORCH_MODULES)], limit_s=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 20
    searches = {who for name, who in found if name == "*"}
    assert searches <= _SEARCHES.keys()
    assert all(contract.may_be_read_at_import(_SEARCHES[who]) for who in searches)
    read = {name for name, who in found if who not in searches}
    unknown = {name for name in read if not contract.is_read_at_import(name)}
    assert unknown - HARMLESS == set()
