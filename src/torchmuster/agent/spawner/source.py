"""What the script's own source says about how it must be started.

torch, OpenMP and BLAS read some variables while they are loaded. A forked worker has torch already, so
a script that sets one of them itself is started in a fresh interpreter instead.
"""

import ast
import importlib.machinery
import os
import sys
from collections.abc import Callable

_SETTERS = frozenset({"setdefault", "putenv", "__setitem__", "update"})


def script_path(kind: str, target: str) -> str | None:
    """Return the file of a script or module, found without importing any package."""
    if kind == "file":
        return target
    if kind != "module":
        return None
    paths: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for part in target.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, paths)
        if spec is None:
            return None
        paths = list(spec.submodule_search_locations or [])
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.machinery.PathFinder.find_spec("__main__", paths)
    return spec.origin if spec is not None else None


def imports_torch(source: bytes) -> bool:
    """Say whether the source imports torch, anywhere in it."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return False
    names = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    names += [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    return any(name is not None and name.partition(".")[0] == "torch" for name in names)


def variables_set(source: bytes, matters: Callable[[str], bool]) -> list[str]:
    """Return the environment variables that matter and that the source sets, in order."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []  # the script fails by itself, with its own words
    found: dict[str, None] = {}
    for node in ast.walk(tree):
        for name in _names_set_by(node):
            if matters(name):
                found[name] = None
    return list(found)


def _names_set_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.AugAssign) and _is_environ(node.target):  # environ |= {...}
        return _keys(node.value)
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [
            name
            for target in targets
            if isinstance(target, ast.Subscript) and _is_environ(target.value)
            for name in _strings(target.slice)
        ]
    if isinstance(node, ast.Call):
        return _names_set_by_call(node)
    return []


def _names_set_by_call(call: ast.Call) -> list[str]:
    function = call.func
    if isinstance(function, ast.Name) and function.id == "putenv":
        return _strings(call.args[0]) if call.args else []
    if not isinstance(function, ast.Attribute) or function.attr not in _SETTERS:
        return []
    if function.attr != "putenv" and not _is_environ(function.value):
        return []
    if function.attr == "update":
        keys = [key.arg for key in call.keywords if key.arg]
        return keys + [name for argument in call.args for name in _keys(argument)]
    return _strings(call.args[0]) if call.args else []


def _is_environ(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name == "environ"


def _keys(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Call):  # dict(NAME=...)
        return [keyword.arg for keyword in node.keywords if keyword.arg]
    keys = node.keys if isinstance(node, ast.Dict) else []
    return [name for key in keys if key for name in _strings(key)]


def _strings(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return []
