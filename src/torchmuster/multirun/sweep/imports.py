"""Whether the members of a sweep need a process with torch to be forked from: not when their script has the standard library only.

The end of a process with torch costs a quarter of a second of a processor, that of a small one a hundredth.
"""

import ast
import os
import sys

_MOST_FILES = 200


def needs_only_the_standard_library(script: str) -> bool:
    """Say whether a script, and the files beside it that it imports, import nothing else; False where that can't be told."""
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
            beside = os.path.join(folder, f"{name}.py")
            if os.path.isfile(beside):
                waiting.append(beside)
            elif name not in sys.stdlib_module_names:
                return False
    return True


def _imported(path: str) -> set[str] | None:
    """Return the first parts of what a file imports anywhere; None when it can't be read, or imports by other means."""
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
