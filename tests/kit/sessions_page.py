"""The blocks of docs/sessions.md, each of which a test runs where it belongs: here, in a job, on hosts."""

import re
import shlex
from pathlib import Path

_PAGE = (Path(__file__).parents[2] / "docs" / "sessions.md").read_text()
FILES = dict(re.findall(r'```python title="(.+?)"\n(.*?)```', _PAGE, re.DOTALL))
BLOCKS = re.findall(r"```console\n(.*?)```", _PAGE, re.DOTALL)
CODE = re.findall(r"```python\n(.*?)```", _PAGE, re.DOTALL)
# By the first words of each block; a test sees that there are no others.
HERE, IN_A_JOB, ELSEWHERE, DEV = (
    "muster session start --nodes",
    "salloc",
    "muster session start --hosts",
    "muster dev",
)


def block(begin):
    """Return the block whose first command begins so."""
    (found,) = [one for one in BLOCKS if one.startswith(f"$ {begin}")]
    return found


def commands(begin):
    """Return the commands of a block, as words."""
    lines = block(begin).splitlines()
    return [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]


def shown(begin):
    """Return what a block shows of their output, as patterns: ids, times and seconds are others each time."""
    found = []
    for line in block(begin).splitlines():
        if not line.startswith("$ "):
            text = re.sub(r"47\d\d", "JOB", line)
            text = re.sub(r"\d\d:\d\d:\d\d", "CLOCK", re.sub(r"\d+\.\d s|\d+ ms", "SECONDS", text))
            pattern = re.escape(text).replace("JOB", r"\d+").replace("CLOCK", r"[\d:]+")
            found.append(pattern.replace("SECONDS", r"[\d.]+\ m?s"))
    return found


def write_files(folder):
    """Write the files of the page."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
