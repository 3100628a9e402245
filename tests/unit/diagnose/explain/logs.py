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


def traceback_of(
    error, *, rank=None, file="/home/u/train.py", line=9, function="<module>", code="step()"
):
    """Return what a process writes that ends by an exception: of one frame, each line with the mark of its rank."""
    mark = f"[rank{rank}]: " if rank is not None else ""
    begin = "Traceback (most recent call last):"
    frame = f'  File "{file}", line {line}, in {function}\n    {code}'
    return "".join(f"{mark}{row}\n" for row in f"{begin}\n{frame}\n{error}".split("\n"))


def failed(code=1):
    """Return what torchrun writes of a child that has ended by itself."""
    return (
        "E0314 09:00:00.000000 9 torch/distributed/elastic/multiprocessing/api.py:1] failed"
        f" (exitcode: {code}) local_rank: 0 (pid: 9) of binary: python\n"
    )


def steps(first, last):
    """Return the lines of a training from one step to before another."""
    return "".join(
        f"step {number}/400 loss {3 - number / 200:.3f}\n" for number in range(first, last)
    )


PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.7.7.2]:197."
TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 12000ms for recv"
    " operation to complete"
)
# A launcher that somebody told to end.
TOLD_TO_END = (
    "W0314 09:05:00.000000 9 x/api.py:723] Received 15 death signal, shutting down workers\n"
)
