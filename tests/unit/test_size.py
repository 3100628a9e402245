"""How large each part of the source may be: code lines, without blank lines, comments and docstrings.

A part is a room that the source becomes. A bound is raised only for a capability that is worth its lines; the commit that
raises it says what they buy. Packing lines to stay below it is worse than raising it.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "torchmuster"

# Folder or module -> its part; the longest name that fits counts.
PARTS = {
    "": "launcher",
    "workflow/cli/barrier.py": "workflow",
    "workflow/cli/data.py": "workflow",
    "workflow/cli/dataset.py": "workflow",
    "cli/diagnosis": "diagnose",
    "multirun/cli/held.py": "session",
    "cli/runs/dev": "session",
    "multirun/cli/forks.py": "session",
    "cli/runs/pod": "kubernetes",
    "cli/runs/session": "session",
    "workflow/cli/ssh_submit.py": "workflow",
    "workflow/cli/submit.py": "workflow",
    "cli/runs/sweep": "session",
    "workflow/cli/sets.py": "workflow",
    "multirun/cli/sweep_record.py": "session",
    "cli/top": "report",
    "workflow/cli/transfers.py": "workflow",
    "workflow/cli/workflow.py": "workflow",
    "workflow/cli/record.py": "workflow",
    "data": "workflow",
    "diagnose": "diagnose",
    "diagnose/facts": "launcher",
    "engines/kubernetes": "kubernetes",
    "multirun/engine.py": "session",
    "workflow/jobs.py": "workflow",
    "gpucheck": "GPU kit",
    "workflow/head/barriers.py": "workflow",
    "head/group": "workflow",
    "workflow/plan.py": "workflow",
    "workflow/task_call.py": "workflow",
    "node/door": "session",
    "node/pod": "kubernetes",
    "node/sandbox": "workflow",
    "node/task": "workflow",
    "owner/firstpod": "kubernetes",
    "workflow/owner/workflow.py": "workflow",
    "multirun/held.py": "session",
    "owner/pods": "kubernetes",
    "owner/sweep": "session",
    "workflow/owner/task_hosts.py": "workflow",
    "owner/views/session": "session",
    "multirun/views/sweep_view.py": "session",
    "workflow/owner/view.py": "workflow",
    "programs/door": "session",
    "workflow/head/group_main.py": "workflow",
    "workflow/task/staging.py": "workflow",
    "workflow/task/task_main.py": "workflow",
    "workflow/task/task_muster.py": "workflow",
    "report": "report",
    "kubernetes/pod_world.py": "kubernetes",
    "spec/sweep": "session",
    "spec/workflow": "workflow",
    "train": "train",
    "ui/top": "report",
}
BOUNDS = {
    "launcher": 43_000,
    "diagnose": 12_560,
    "workflow": 11_180,
    "train": 7_830,
    "kubernetes": 7_850,
    "session": 5_450,
    "report": 4_410,
    "GPU kit": 1_410,
}


def part_of(name):
    return PARTS[max((one for one in PARTS if name.startswith(one)), key=len)]


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


def test_no_part_is_larger_than_its_bound():
    sizes = Counter()
    for path in PACKAGE.rglob("*.py"):
        sizes[part_of(path.relative_to(PACKAGE).as_posix())] += code_lines(path.read_text())
    for part, size in sorted(sizes.items(), key=lambda one: -one[1]):
        print(f"{part:12} {size:7,} of {BOUNDS.get(part, 0):7,}")  # pytest -s shows it
    print(f"{'all':12} {sum(sizes.values()):7,}")
    assert set(sizes) == set(BOUNDS)
    assert {part: size for part, size in sizes.items() if size > BOUNDS[part]} == {}


def test_the_table_of_parts_names_what_is_there():
    names = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")]
    assert [one for one in PARTS if not any(name.startswith(one) for name in names)] == []
