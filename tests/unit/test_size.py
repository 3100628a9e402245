"""How large each room of the source may be: code lines, without blank lines, comments and docstrings.

A bound is raised only for a capability that is worth its lines; the commit that
raises it says what they buy. Packing lines to stay below it is worse than raising it.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "torchmuster"

BOUNDS = {
    "core": 14_250,
    "launcher": 26_360,
    "diagnose": 11_310,
    "workflow": 11_640,
    "train": 7_520,
    "kubernetes": 7_770,
    "multirun": 6_190,
    "report": 4_030,
    "gpucheck": 1_410,
    "(top)": 120,
}


def room_of(path):
    """Return the room of a file: the folder at the top of the package that it lies in."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "(top)"


def code_lines(text):
    """Return how many lines have code."""
    nothing = (
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
        *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
    )
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in nothing:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.difference_update(range(first.lineno, first.end_lineno + 1))
    return len(lines)


def test_no_room_is_larger_than_its_bound():
    sizes = Counter()
    for path in PACKAGE.rglob("*.py"):
        sizes[room_of(path)] += code_lines(path.read_text())
    for room, size in sorted(sizes.items(), key=lambda one: -one[1]):
        print(f"{room:12} {size:7,} of {BOUNDS.get(room, 0):7,}")  # pytest -s shows it
    print(f"{'all':12} {sum(sizes.values()):7,}")
    assert set(sizes) == set(BOUNDS)
    assert {room: size for room, size in sizes.items() if size > BOUNDS[room]} == {}
