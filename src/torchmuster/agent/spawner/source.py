"""What the script's own source says about how it must be started.

torch, OpenMP and BLAS read some variables while they are loaded. A forked worker has torch already, so
a script that sets one of them itself is started in a fresh interpreter instead.
"""

import ast
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from torchmuster.agent.spawner.constants import Source, Texts
from torchmuster.model import contract

_ENVIRONS = ("environ", "environb")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """What a script writes into its environment that torch may read while it is imported.

    Attributes:
        names: The variables, in the order of the source.
        unread_line: Where one is written whose name the source doesn't tell.
    """

    names: tuple[str, ...] = ()
    unread_line: int | None = None


def environment_writes(source: bytes) -> Writes:
    """Return the writes that matter."""
    names: dict[str, None] = {}
    lines: list[int] = []
    for line, texts in _writes(source):
        for name in sorted(texts.known):
            if contract.is_read_at_import(name):
                names[name] = None
        if any(contract.may_be_read_at_import(begin) for begin in texts.begins):
            lines.append(line)
    return Writes(names=tuple(names), unread_line=min(lines, default=None))


def _writes(source: bytes | str, depth: int = 0) -> Iterator[tuple[int, Texts]]:
    """Yield the line and the possible names of every write to the environment."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return  # the script fails by itself, with its own words
    known = Source(tree)
    aliases = _Aliases(known)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for texts in _written_by(node, known, aliases):
            yield line, texts
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "exec" and depth == 0:
            for text in known.texts(node.args[0] if node.args else None).known:
                yield from ((line, texts) for _, texts in _writes(text, depth + 1))


class _Aliases:
    """The names by which a script calls os.environ and os.putenv."""

    def __init__(self, known: Source) -> None:
        self._known = known
        self._imported: dict[str, str] = {}
        self._found: dict[str, bool] = {}
        for node in ast.walk(known.tree):
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                self._imported |= {name.asname or name.name: name.name for name in node.names}

    def is_environ(self, node: ast.AST | None) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr in _ENVIRONS
        if not isinstance(node, ast.Name):
            return False
        if node.id not in self._found:
            self._found[node.id] = self._imported.get(node.id, node.id) in _ENVIRONS
            values = self._known.bound.get(node.id, [])
            self._found[node.id] |= any(self.is_environ(value) for value in values)
        return self._found[node.id]

    def is_putenv(self, function: ast.AST) -> bool:
        if isinstance(function, ast.Attribute):
            return function.attr == "putenv"
        name = getattr(function, "id", "")
        return self._imported.get(name, name) == "putenv"


def _written_by(node: ast.AST, known: Source, aliases: _Aliases) -> Iterator[Texts]:
    if isinstance(node, ast.AugAssign) and aliases.is_environ(node.target):  # environ |= {...}
        yield known.keys(node.value)
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Subscript) and aliases.is_environ(target.value):
                yield known.texts(target.slice)
    elif isinstance(node, ast.Call):
        yield from _written_by_call(node, known, aliases)


def _written_by_call(call: ast.Call, known: Source, aliases: _Aliases) -> Iterator[Texts]:
    function = call.func
    first = call.args[0] if call.args else None
    if aliases.is_putenv(function):
        yield known.texts(first)
    elif not isinstance(function, ast.Attribute) or not aliases.is_environ(function.value):
        return
    elif function.attr in ("setdefault", "__setitem__"):
        yield known.texts(first)
    elif function.attr == "update":
        yield Texts(frozenset(word.arg for word in call.keywords if word.arg))
        more = [*call.args, *(word.value for word in call.keywords if not word.arg)]
        yield from (known.keys(part) for part in more)
