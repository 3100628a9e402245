"""The debuggers that a user brings to a rank: `--debugpy` for an editor, `--pdb` for the terminal."""

import json
import sys

import pytest

from kit.command import MUSTER, muster_env, run_muster, spawned
from kit.dap import Editor
from kit.screen import TerminalOf
from kit.waiting import wait_until

pytest.importorskip("torch", reason="the ranks meet in a collective")
LIMIT_S = 120.0
TRAIN = """\
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
answer = 40 + rank
total = torch.tensor([float(rank)])
dist.all_reduce(total)
print("the sum is", total.item(), "the answer", answer, flush=True)
if rank in [int(word) for word in os.environ.get("FAILS", "").split()]:
    raise ValueError(f"rank {rank} is unhappy")
dist.barrier()
dist.destroy_process_group()
"""
LINE = 9  # of the all-reduce


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    return folder


class Run:
    """`muster run` with a debugger's port, until it is asked for its end."""

    def __init__(self, project, *words):
        self._log = project.parent / "said"
        with self._log.open("wb") as log:
            self.process = spawned(
                [*MUSTER, "run", "--nodes", "2", "--nproc-per-node", "1", *words],
                cwd=project,
                env=muster_env(project.parent / "home", MUSTER_ON="local"),
                stdout=log,
            )

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        self.process.kill()
        self.process.wait()

    @property
    def said(self):
        return self._log.read_text()

    def configuration(self):
        """Return what launch.json says, as soon as it was printed."""
        ended = self.process.poll
        wait_until(lambda: "\n}\n" in self.said or ended() is not None, "launch.json", LIMIT_S)
        text = self.said
        launch, _ = json.JSONDecoder().raw_decode(text[text.index("{\n") :])
        return launch["configurations"][0]


@pytest.mark.parametrize("words", [["--debugpy", "1"], ["--debugpy=1", "--hang-timeout", "1s:2s"]])
def test_an_editor_stops_a_rank_on_another_node_and_lets_it_go_on(project, words):
    pytest.importorskip("debugpy")
    script = project / "train.py"
    with Run(project, *words, "train.py") as run:
        launch = run.configuration()
        assert (launch["name"], launch["connect"]["host"]) == ("muster: rank 1", "127.0.0.1")
        assert launch["pathMappings"] == [
            {"localRoot": str(project), "remoteRoot": str(project.resolve())}
        ]
        with Editor(launch["connect"]["port"]) as editor:
            editor.attach(launch["pathMappings"], {script: [LINE]})
            thread = editor.wait_for("stopped")["threadId"]
            frame = editor.ask("stackTrace", threadId=thread)["stackFrames"][0]
            assert (frame["line"], frame["source"]["path"]) == (LINE, str(script))
            found = editor.ask("evaluate", expression="answer", frameId=frame["id"], context="repl")
            assert found["result"] == "41"
            editor.ask("continue", threadId=thread)
            assert run.process.wait(LIMIT_S) == 0, run.said
        assert "the sum is 1.0 the answer 40" in run.said
        assert "hang" not in run.said


def test_a_rank_whose_editor_leaves_goes_on_without_it(project):
    pytest.importorskip("debugpy")
    with Run(project, "--debugpy", "train.py") as run:
        launch = run.configuration()
        assert launch["name"] == "muster: rank 0"
        with Editor(launch["connect"]["port"]) as editor:
            editor.ask("initialize", clientID="test", adapterID="debugpy", pathFormat="path")
        assert run.process.wait(LIMIT_S) == 0, run.said


def test_an_interpreter_without_debugpy_is_refused_with_the_command_that_helps(project):
    python = f"{sys.executable} -S"  # sees no packages
    words = ("--debugpy", "--python", python, "train.py")
    done = run_muster("run", *words, env=muster_env(project.parent / "home"), cwd=project)
    assert done.returncode == 1
    assert "-m pip install debugpy" in done.stderr


@pytest.fixture
def terminal(project):
    def start(*words, **env):
        command = [
            sys.executable,
            "-c",
            f"import os; os.chdir({str(project)!r}); os.execv({sys.executable!r}, {[*MUSTER, 'run', *words]!r})",
        ]
        env = muster_env(project.parent / "home", MUSTER_ON="local", TERM="xterm", **env)
        return TerminalOf(command, env, columns=120, rows=50)

    return start


@pytest.mark.parametrize("fails", ["1", "0 1"])
def test_the_first_rank_that_fails_is_looked_at_while_the_others_wait(terminal, fails):
    words = ("--nodes", "2", "--nproc-per-node", "1", "--hang-timeout", "1s:2s", "--pdb")
    with terminal(*words, "train.py", FAILS=fails) as screen:
        screen.wait_for("is unhappy", "(Pdb)", limit_s=LIMIT_S)
        screen.press("p 1000 + answer\n")
        text = screen.wait_for("104", limit_s=LIMIT_S)
        assert "failed; all ranks wait" in text
        screen.press("p total\n")
        screen.wait_for("tensor([1.])", limit_s=LIMIT_S)
        screen.press("q\n")
        code = screen.wait_for_end(limit_s=LIMIT_S)
    assert code == 1
    assert "ValueError" in screen.text
    assert "hang" not in screen.text
    assert "attempt 1" not in screen.text


def test_a_run_that_fails_nowhere_meets_no_debugger(terminal):
    with terminal("--nodes", "2", "--nproc-per-node", "1", "--pdb", "train.py") as screen:
        assert screen.wait_for_end(limit_s=LIMIT_S) == 0
    assert "(Pdb)" not in screen.text
