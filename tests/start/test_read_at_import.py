"""Which variables torch reads while it is imported, here and with what else is installed: all are in our list."""

import json
import sys

import pytest

from kit.command import ran
from torchmuster.core.model import contract
from torchmuster.core.node.spawner import serve
from torchmuster.launcher.node.spawner.import_watch import _SEARCHES

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
