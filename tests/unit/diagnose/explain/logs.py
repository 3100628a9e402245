"""Verdicts on logs that a test writes as text."""

import textwrap

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.judge import judge
from torchmuster.diagnose.logs import read_logs


def explain(folder, **files):
    """Return the verdict on logs given as text: explain(tmp_path, n1="...", n2="...")."""
    paths = []
    for name, text in files.items():
        path = folder / f"{name}.log"
        path.write_text(textwrap.dedent(text).lstrip("\n"))
        paths.append(str(path))
    return judge(Case(read_logs(paths, year=2026)))


def cause_of(folder, **files):
    verdict = explain(folder, **files)
    if verdict.healthy:
        return "healthy"
    return verdict.first.cause if verdict.first else "unknown"


def events_of(folder, text, name="job.log"):
    path = folder / name
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return read_logs([str(path)], year=2026).events


def traceback_of(error, *, rank=None, file="/home/u/train.py", line=9):
    mark = f"[rank{rank}]: " if rank is not None else ""
    rows = [
        "Traceback (most recent call last):",
        f'  File "{file}", line {line}, in <module>',
        "    step()",
        error,
    ]
    return "".join(f"{mark}{row}\n" for row in rows)
