"""What the script's own source says about how it must be started.

torch, OpenMP and BLAS read some variables while they are loaded. A forked worker has torch already, so
a script that sets or removes one of them itself is started in a fresh interpreter instead.
"""

import ast
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchmuster.model import contract
from torchmuster.node.spawner.aliases import Aliases, name_of
from torchmuster.node.spawner.constants import UNKNOWN, ParsedScript, Texts

# Methods of os.environ, and functions that take it first, by what their next argument tells.
_BY_KEY = ("setdefault", "pop", "__setitem__", "__delitem__", "setitem", "delitem")
_BY_MAPPING = ("update", "__ior__", "dict")
_BY_NOTHING = ("clear", "popitem")
_EVALUATORS = ("exec", "eval")
# They disable the loggers that there are (logging.config), or say how many processors torch's threads count.
_BEFORE_TORCH = ("dictConfig", "fileConfig", "sched_setaffinity", "cpu_affinity")
_TOOLS = (
    "cProfile",
    "profile",
    "pdb",
    "trace",
    "coverage",
    "kernprof",
    "line_profiler",
    "viztracer",
    "scalene",
    "debugpy",
)


def script_path(kind: str, target: str, args: Sequence[str] = ()) -> str | None:
    """Return the file of a script, a module or a function's module, found without importing any package.

    Of a tool that runs a script, as `-m cProfile train.py`, it is the script.
    """
    if kind == "file":
        return target
    if kind == "module" and target.partition(".")[0] in _TOOLS:
        return next((word for word in args if word.endswith(".py") and os.path.isfile(word)), None)
    target = target.partition(":")[0]
    if kind not in ("module", "function") or (kind, target) == ("function", "__main__"):
        return None
    paths: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for part in target.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, paths)
        if spec is None:
            return None
        paths = list(spec.submodule_search_locations or [])
    if kind == "module" and spec is not None and spec.submodule_search_locations:
        spec = importlib.machinery.PathFinder.find_spec("__main__", paths)
    return spec.origin if spec is not None else None


def imported_names(source: bytes) -> set[str]:
    """Return the modules that the source imports, anywhere in it, and what it takes from them: `a.b` of `from a import b`."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return set()
    names = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """What a script sets in its environment, or removes, that torch may read while it is imported.

    Attributes:
        names: The variables, in the order of the source.
        unread_line: Where one is written whose name the source doesn't tell.
    """

    names: tuple[str, ...] = ()
    unread_line: int | None = None


def early_calls(source: bytes) -> tuple[str, int] | None:
    """Return a call whose effect depends on whether torch is imported already, and its line, where it comes before the imports.

    Text order counts: what a function does that is called before an import is not seen.
    """
    if not any(name.encode() in source for name in _BEFORE_TORCH):
        return None  # nearly every script: it is not parsed once more
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return None
    imports = [
        (node.lineno, _imported_first(node))
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    of_torch = [line for line, roots in imports if "torch" in roots]
    of_others = [line for line, roots in imports if roots]
    imported_at = min(of_torch) if of_torch else max(of_others, default=0)
    calls = [
        (node.lineno, name_of(node.func))
        for node in nodes
        if isinstance(node, ast.Call) and name_of(node.func) in _BEFORE_TORCH
    ]
    line, name = min(calls, default=(0, ""))
    return (name, line) if 0 < line < imported_at else None


def _imported_first(node: ast.AST) -> set[str]:
    """Return the packages that an import outside of functions takes something from, without Python's own."""
    names: list[str] = []
    match node:
        case ast.Import(names=aliases, col_offset=0):
            names = [alias.name for alias in aliases]
        case ast.ImportFrom(module=str(module), level=0, col_offset=0):
            names = [module]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


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
    known = ParsedScript(tree)
    aliases = Aliases(known)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for texts in _written_by(node, known, aliases):
            yield line, texts
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in _EVALUATORS
            and depth == 0
        ):
            for text in known.texts(node.args[0] if node.args else None).known:
                yield from ((line, texts) for _, texts in _writes(text, depth + 1))


def _written_by(node: ast.AST, known: ParsedScript, aliases: Aliases) -> Iterator[Texts]:
    """Yield the variables that a node sets or removes."""
    match node:
        case ast.AugAssign(target=target, value=value) if aliases.is_environ(target):
            yield known.keys(value)  # environ |= {...}
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            yield from _written_at(targets, known, aliases)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            yield from _written_at([target], known, aliases)
        case ast.Call():
            yield from _written_by_call(node, known, aliases)
            yield from _handed_over(node, aliases)


def _written_at(targets: list[ast.expr], known: ParsedScript, aliases: Aliases) -> Iterator[Texts]:
    for target in targets:
        if isinstance(target, ast.Subscript) and aliases.is_environ(target.value):
            yield known.texts(target.slice)
        elif isinstance(target, ast.Tuple | ast.List):
            yield from _written_at(target.elts, known, aliases)


def _written_by_call(call: ast.Call, known: ParsedScript, aliases: Aliases) -> Iterator[Texts]:
    method, args = aliases.method_of(call.func), call.args
    if aliases.is_putenv(call.func):
        method = "__setitem__"
    elif method is None and _is_given_environ(call, known, aliases):
        # Such as setitem of operator, or dict of unittest.mock.patch.
        method, args = name_of(call.func), args[1:]
    if method in _BY_KEY:
        yield known.texts(args[0] if args else None)
    elif method in _BY_MAPPING:
        yield Texts(frozenset(word.arg for word in call.keywords if word.arg))
        more = [*args, *(word.value for word in call.keywords if not word.arg)]
        yield from (known.keys(part) for part in more)
    elif method in _BY_NOTHING:
        yield UNKNOWN


def _is_given_environ(call: ast.Call, known: ParsedScript, aliases: Aliases) -> bool:
    """Say whether a function writes to its first argument, and that is os.environ."""
    first = call.args[0] if call.args else None
    match call.func:
        case ast.Name(id="setitem" | "delitem"):
            return aliases.is_environ(first)
        case ast.Attribute(attr="dict"):  # of mock.patch, which takes a name as well
            return aliases.is_environ(first) or "os.environ" in known.texts(first).known
        case ast.Attribute(attr="update"):  # {}.update(os.environ) only reads it
            return aliases.is_environ(first) and len(call.args) > 1
        case ast.Attribute():
            return aliases.is_environ(first)
        case _:
            return False


def _handed_over(call: ast.Call, aliases: Aliases) -> Iterator[Texts]:
    """Yield what somebody else may write: map(os.environ.setdefault, names, values)."""
    given = [*call.args, *(word.value for word in call.keywords)]
    methods = (aliases.method_of(value) for value in given)
    if any(aliases.is_putenv(value) for value in given if not isinstance(value, ast.Call)) or any(
        method in (*_BY_KEY, *_BY_MAPPING) for method in methods
    ):
        yield UNKNOWN
