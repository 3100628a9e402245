"""What a plain run executes: the files of torchmuster of which a line runs in any of its processes.

    python benchmarks/executed.py [--quick] [--json FILE]

A copy of the package notes each module that is executed, in every process, before its first line; a module that holds nothing but a
docstring counts as nothing. The run is of two nodes of two workers each, on this machine, of a script that prints a word.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from launching.report import aligned
from running.results import headline, machine_facts, save
from running.stage import REPOSITORY, stage

_LIMIT_S = 300.0
_RUN = ["run", "--nodes", "2", "--nproc-per-node", "2", "train.py"]


def main() -> int:
    """Count, and print or write a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    machine = machine_facts()
    with stage("executed", _LIMIT_S) as place, tempfile.TemporaryDirectory() as folder:
        place.step("a run of two nodes of two workers")
        lines = _executed(Path(folder))
    files, code = Counter(map(_part, lines)), Counter[str]()
    for name, count in lines.items():
        code[_part(name)] += count
    parts = [part for part, _ in files.most_common()]
    readings: list[dict[str, Any]] = [
        {"part": part, "files": files[part], "code_lines": code[part]} for part in parts
    ]
    readings.append({"part": "all", "files": len(lines), "code_lines": code.total()})
    rows = [[str(value) for value in reading.values()] for reading in readings]
    text = f"{headline(machine, 'muster run, 2 x 2')}\n\n{aligned([['part', 'files', 'lines'], *rows])}"
    if args.json:
        save(args.json, {"machine": machine, "rows": readings, "files": sorted(lines)}, text)
    else:
        print(text)
    return 0


def _part(name: str) -> str:
    return name.split("/", maxsplit=1)[0] if "/" in name else "(top)"


def _executed(folder: Path) -> dict[str, int]:
    """Return the files that a run has executed, with their numbers of lines that hold code.

    Raises:
        RuntimeError: The run has failed.
    """
    package, notes = folder / "src" / "torchmuster", folder / "notes"
    shutil.copytree(
        REPOSITORY / "src" / "torchmuster", package, ignore=shutil.ignore_patterns("__pycache__")
    )
    lines = {}
    for path in package.rglob("*.py"):
        name = str(path.relative_to(package))
        lines[name] = _note_in(path, f"{name}\n", notes)
    (folder / "train.py").write_text("print('hello', flush=True)\n")
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "torchmuster", *_RUN],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if done.returncode or "hello" not in done.stdout:
        raise RuntimeError(f"the run has failed: {done.stderr[-2000:]}")
    return {name: lines[name] for name in set(notes.read_text().split()) if lines[name]}


def _note_in(path: Path, text: str, notes: Path) -> int:
    """Let a module note that it is executed; return the number of its lines that hold code."""
    source = path.read_text()
    body = ast.parse(source).body
    at = 0
    for node in body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not (
            isinstance(node, ast.ImportFrom) and node.module == "__future__"
        ):
            break
        at = node.end_lineno or 0
    lines = source.splitlines()
    held = {
        number
        for node in body[bool(at) :]
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    note = (
        f"import os as _os; _note = _os.open({str(notes)!r}, _os.O_WRONLY | _os.O_CREAT | _os.O_APPEND)"
        f"; _os.write(_note, {text.encode()!r}); _os.close(_note)"
    )
    path.write_text("\n".join([*lines[:at], note, *lines[at:]]) + "\n")
    return len(held)


if __name__ == "__main__":
    sys.exit(main())
