"""The shape of the source: small folders, no circles, and a unit test's folder for each package."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "torchmuster"
UNIT = Path(__file__).parent
MAX_MODULES = 25


def name_of(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports():
    """Return what each module imports of ours, also within functions and under TYPE_CHECKING."""
    files = {name_of(path): path for path in PACKAGE.rglob("*.py")}
    found = {}
    for name, path in files.items():
        named = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                of = node.module
                whole = {f"{of}.{alias.name}" for alias in node.names}
                named |= {one if one in files else of for one in whole}
        found[name] = named & set(files) - {name}
    return found


def reachable(start):
    seen, waiting = set(), [start]
    while waiting:
        for name in imports()[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def test_no_modules_import_each_other_in_a_circle():
    assert sorted(name for name in imports() if name in reachable(name)) == []


@pytest.mark.parametrize("folder", sorted(p.parent for p in PACKAGE.rglob("__init__.py")))
def test_a_folder_says_what_it_is_for_and_is_small(folder):
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]

    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert len(modules) <= MAX_MODULES


def test_unit_tests_lie_where_their_source_lies():
    folders = {path.parent.relative_to(UNIT) for path in UNIT.rglob("test_*.py")}

    assert [str(path) for path in sorted(folders) if not (PACKAGE / path).is_dir()] == []


def test_a_class_has_its_name_alone():
    names = [
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]

    assert sorted(name for name, times in Counter(names).items() if times > 1) == []
