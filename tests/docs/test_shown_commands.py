"""What docs/sessions.md and docs/sweeps.md show is run: here what needs one machine, in tests/cluster and tests/ssh the rest."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from kit import sessions_page as page
from kit.command import MUSTER, muster_env, ran, run_muster
from kit.screen import TerminalOf

LIMIT_S = 120.0


@pytest.fixture
def env(tmp_path):
    page.write_files(tmp_path)
    return muster_env(tmp_path / "home", CUDA_VISIBLE_DEVICES="")


def test_each_block_of_the_page_is_run_somewhere():
    known = (page.HERE, page.IN_A_JOB, page.ELSEWHERE, page.DEV)
    assert sorted(map(page.block, known)) == sorted(page.BLOCKS)
    assert len(page.CODE) == 1


@pytest.mark.short
def test_the_commands_of_the_page_work(tmp_path, env):
    said = ""
    for program, *words in page.commands(page.HERE):
        assert program == "muster"
        done = run_muster(*words, env=env, cwd=tmp_path)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        said += done.stdout + done.stderr
    assert "workers: 4" in said
    for pattern in page.shown(page.HERE):
        assert re.search(pattern, said), pattern


@pytest.mark.slow
def test_a_save_runs_again_as_the_page_shows_it(tmp_path, env, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((program, *words),) = page.commands(page.DEV)
    assert program == "muster"
    importing, output, ran, again, saved = page.shown(page.DEV)
    with TerminalOf([*MUSTER, *words], {**env, "TERM": "xterm"}, columns=200) as terminal:
        seen = terminal.wait_for("workers: 4", "waiting for a change", limit_s=LIMIT_S)
        assert re.search(output, seen)
        assert re.search(ran, seen), seen
        assert re.search(importing, terminal.sent.decode())
        (tmp_path / "train.py").write_text(page.FILES["train.py"] + "# edited\n")
        seen = terminal.wait_for("saved train.py", "waiting for a change", limit_s=LIMIT_S)
        assert re.search(again, seen)
        assert re.search(saved, seen), seen
        terminal.press("q")
        assert terminal.wait_for_end(LIMIT_S) == 0


@pytest.mark.slow
def test_the_python_of_the_page_works(tmp_path, env):
    (tmp_path / "hold.py").write_text(page.CODE[0])
    done = ran([sys.executable, "hold.py"], limit_s=LIMIT_S, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    listed = run_muster("session", "list", "--json", env=env, cwd=tmp_path)
    assert listed.stdout.strip() in ("[]", ""), listed.stdout


# And docs/sweeps.md.

SWEEPS = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
SWEPT_FILES = dict(re.findall(r'```python title="(.+?)"\n(.*?)```', SWEEPS, re.DOTALL))
SWEPT_BLOCKS = re.findall(r"```console\n(.*?)```", SWEEPS, re.DOTALL)


@pytest.mark.short
@pytest.mark.parametrize("block", SWEPT_BLOCKS, ids=range(len(SWEPT_BLOCKS)))
def test_the_commands_of_the_page_of_sweeps_work(block, tmp_path):
    for name, text in SWEPT_FILES.items():
        (tmp_path / name).write_text(text)
    env = muster_env(tmp_path / "home", CUDA_VISIBLE_DEVICES="")
    for line in block.splitlines():
        program, *words = shlex.split(line.removeprefix("$ "))
        assert program == "muster"
        done = run_muster(*words, env=env, cwd=tmp_path)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
