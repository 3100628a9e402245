"""What docs/sessions.md shows is run."""

import re
import shlex
from pathlib import Path

import pytest

from kit.command import muster_env, run_muster

PAGE = (Path(__file__).parents[2] / "docs" / "sessions.md").read_text()
FILES = dict(re.findall(r'```python title="(.+?)"\n(.*?)```', PAGE, re.DOTALL))
BLOCK, *_ = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.short
def test_the_commands_of_the_page_work(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    env = muster_env(tmp_path / "home", CUDA_VISIBLE_DEVICES="")
    said = ""
    for line in [line for line in BLOCK.splitlines() if line.startswith("$ ")]:
        program, *words = shlex.split(line.removeprefix("$ "))
        assert program == "muster"
        done = run_muster(*words, env=env, cwd=tmp_path)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        said += done.stdout
    assert "workers: 4" in said
