"""`sys.path`, `sys.argv` and `__main__` for every way to name a program."""

import json
import os
import py_compile
import zipfile

import pytest

from start.ways import FORKED, FRESH, PYTHON, Place, Workers, make_place
from torchmuster.core.model.plan import ScriptKind

PROGRAM = '''
"""The doc."""
import json, os, sys
number: int = 1

def value(name):
    found = globals()[name]
    if name in ("__loader__", "__spec__"):
        attributes = {k: str(v) for k, v in vars(found).items()} if found else {}
        return [type(found).__name__, sorted((k, v) for k, v in attributes.items() if " at " not in v)]
    return repr(found)

print(json.dumps({
    "main": [[name, value(name)] for name in globals() if name.startswith("__")],
    "annotations": repr(__annotations__),
    "path": sys.path, "argv": sys.argv, "orig_argv": sys.orig_argv, "cwd": os.getcwd(),
    "flags": repr(sys.flags), "options": [sys.warnoptions, sys._xoptions],
    "streams": [[s.encoding, s.errors, s.write_through] for s in (sys.stdin, sys.stdout, sys.stderr)],
    "debug": __debug__,
}))
'''.lstrip()
SCRIPTS = (
    "s.py",
    "./s.py",
    ".//s.py",
    "sub/s.py",
    "../beside/s.py",
    "sub/../sub/./s.py",
    "{cwd}/s.py",
    "{cwd}//sub/../s.py",
    "links/relative.py",
    "links/absolute.py",
    "links/twice.py",
    "linked_folder/s.py",
    "compiled.pyc",
    "archive.pyz",
    "links/../archive.pyz",
)
MODULES = ("s", "package", "package.module", "package.absent", "absent", "package.module.deeper")
VARIABLES = (
    {"PYTHONSAFEPATH": "1"},
    {"PYTHONUNBUFFERED": "1"},
    {"PYTHONPATH": "lib:/absent"},
    {"PYTHONPATH": "sub"},
    {"PYTHONPATH": ""},
    {"PYTHONIOENCODING": "latin-1:replace"},
    {"PYTHONOPTIMIZE": "2"},
    {"PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"},
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Place:
    place = make_place(tmp_path_factory.mktemp("paths"))
    names = ("s.py", "sub/s.py", "../beside/s.py", "package/module.py", "package/__main__.py")
    for name in names:
        place.write(name, PROGRAM)
    place.write("package/__init__.py", "")
    (place.cwd / "links").mkdir()
    os.symlink("../sub/s.py", place.cwd / "links/relative.py")
    os.symlink(place.cwd.parent / "beside/s.py", place.cwd / "links/absolute.py")
    os.symlink("relative.py", place.cwd / "links/twice.py")
    os.symlink("sub", place.cwd / "linked_folder")
    py_compile.compile(str(place.cwd / "s.py"), str(place.cwd / "compiled.pyc"))
    with zipfile.ZipFile(place.cwd / "archive.pyz", "w") as archive:
        archive.write(place.cwd / "s.py", "__main__.py")
    return place


def compare(place: Place, words: list[str], way: str = FORKED, python=PYTHON) -> None:
    kind = ScriptKind.MODULE if words[0] == "-m" else ScriptKind.FILE
    plain = place.plain(*words, "a", "--b", python=python)
    target = words[-1]
    with Workers(place, target, "a", "--b", way=way, kind=kind, python=python) as workers:
        ours = workers.run()
    assert (ours.code, ours.stderr) == (plain.code, plain.stderr)
    if plain.code == 0:
        assert json.loads(ours.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_has_the_path_and_main_of_plain_python(programs, script):
    compare(programs, [script.format(cwd=programs.cwd)])


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_the_path_and_main_of_plain_python(programs, module):
    compare(programs, ["-m", module])


@pytest.mark.parametrize("words", [["links/relative.py"], ["-m", "package"], ["archive.pyz"]])
def test_a_fresh_worker_has_the_path_and_main_of_plain_python(programs, words):
    compare(programs, words, way=FRESH)


@pytest.mark.parametrize("variables", VARIABLES, ids=lambda v: " ".join(f"{k}={v[k]}" for k in v))
def test_the_interpreters_variables_mean_what_they_mean_to_plain_python(programs, variables):
    place = Place(cwd=programs.cwd, home=programs.home, env=variables)
    compare(place, ["s.py"])
    compare(place, ["-m", "package"])


@pytest.mark.parametrize("flags", ["-u", "-O", "-OO", "-I", "-E -P", "-X dev -W error -b"])
def test_the_interpreters_flags_mean_what_they_mean_to_plain_python(programs, flags):
    compare(programs, ["s.py"], python=(*PYTHON, *flags.split()))
