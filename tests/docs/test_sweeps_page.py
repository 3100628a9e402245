"""What docs/sweeps.md shows is run."""

import re
import shlex
from pathlib import Path

import pytest

from kit.command import muster_env, run_muster

PAGE = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
FILES = dict(re.findall(r'```python title="(.+?)"\n(.*?)```', PAGE, re.DOTALL))
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.short
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_commands_of_the_page_work(block, tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    env = muster_env(tmp_path / "home", CUDA_VISIBLE_DEVICES="")
    for line in block.splitlines():
        program, *words = shlex.split(line.removeprefix("$ "))
        assert program == "muster"
        done = run_muster(*words, env=env, cwd=tmp_path)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
