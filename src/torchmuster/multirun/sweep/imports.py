"""Check whether a script imports the standard library only: its members need no torch.

The exit of a process with torch costs 0.25 s of CPU time, that of a small one 0.01 s.
"""

import ast
import os
import sys

_MOST_FILES = 200


def needs_only_the_standard_library(script: str) -> bool:
    """Return whether a script and its neighbouring modules import the standard library only.

    Return False if that can't be determined.
    """
    folder = os.path.dirname(os.path.abspath(script))
    waiting, seen = [script], set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        names = _imported(path)
        if names is None or len(seen) > _MOST_FILES:
            return False
        for name in names:
            neighbour = os.path.join(folder, f"{name}.py")
            if os.path.isfile(neighbour):
                waiting.append(neighbour)
            elif name not in sys.stdlib_module_names:
                return False
    return True


def _imported(path: str) -> set[str] | None:
    """Return the top-level names that a file imports; None if they can't be determined."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or not node.module:
                return None
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in ("__import__", "exec", "eval"):
            return None
    return None if names & {"importlib", "runpy"} else names
