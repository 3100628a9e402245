"""What a node does once before its workers: in order, with errors that name line, node and output."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from kit.values import program, run_plan
from kit.waiting import wait_until_async
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import contract
from torchmuster.core.model.plan import NodeSetup
from torchmuster.core.node.options import AgentOptions, HeadPlace
from torchmuster.core.node.setup import other_interpreter, remove_scratch
from torchmuster.core.proc import read_process
from torchmuster.errors import MusterError
from torchmuster.launcher.node import shelf
from torchmuster.launcher.node.shell import NodeShell, SetupError, ShellWork, Transfer
from unit.launcher.node.parcels import shipped_in


class Host:
    """An agent that only notes what it is told."""

    def __init__(self):
        self.said = []
        self.started = []

    def tell(self, text):
        self.said.append(text)

    def start_with(self, program, environment):
        self.started.append((program, dict(environment)))


def program_in(folder, python=(sys.executable,)):
    return program(python=python, cwd=str(folder))


def options_of(folder, setup, host, place, environment, python=(sys.executable,)):
    plan = run_plan(program=program_in(folder, python), max_nodes=2, node_setup=setup)
    return AgentOptions(
        plan=plan,
        num_workers=1,
        host=host,
        head=HeadPlace(addresses=(), secret=b"", join_timeout_s=1.0),
        environment={**environment, **dict(setup.environment)},
        run_dir=str(folder / "run"),
        place=place,
    )


@pytest.fixture
def node(tmp_path):
    """Return a function that does a setup on a node, and what it left."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    environment.pop("SLURM_TMPDIR", None)
    made = []

    def do(*, python=(sys.executable,), extra=(), **setup):
        run_dir = RunDir(str(tmp_path / "run"))
        Path(run_dir.agent_log("n2")).parent.mkdir(parents=True, exist_ok=True)
        disk, host = DiskWriter(), Host()
        disk.start()
        given = {**environment, **dict(extra)}
        work = ShellWork(options_of(tmp_path, NodeSetup(**setup), "n2", 1, given, python), disk)
        made.append(work)
        try:
            asyncio.run(asyncio.wait_for(work.run(host.tell, host.start_with), 60.0))
        finally:
            disk.flush(5.0)
        return host, work

    do.log = lambda: Path(RunDir(str(tmp_path / "run")).setup_log("n2")).read_text()
    yield do
    for work in made:
        if work.scratch is not None:
            remove_scratch(work.scratch)


def test_what_lines_export_is_for_the_workers(node):
    host, work = node(
        environment=(("COLOUR", "dark 'red'"),),
        lines=("export A=1", "B=not-exported", 'export C="$A/$COLOUR"  # a comment', ""),
    )

    ((program, environment),) = host.started
    assert environment["C"] == "1/dark 'red'"
    assert environment["COLOUR"] == "dark 'red'"
    assert "B" not in environment
    assert program.python == (sys.executable,)
    assert work.is_done


def test_lines_share_one_shell_and_functions_go_on_as_bash_has_them(node):
    host, _ = node(lines=("f() { export FROM_F=yes; }", "f", "export -f f"))

    environment = host.started[0][1]
    assert environment["FROM_F"] == "yes"
    assert "BASH_FUNC_f%%" in environment


def test_a_login_profile_may_define_module_and_can_not_undo_the_sites_variables(node, tmp_path):
    (tmp_path / ".bash_profile").write_text(
        "module() { export LOADED=$2; }\nexport COLOUR=profile PATH=/usr/bin:/bin:/only/profile\n"
    )
    (tmp_path / "bin").mkdir()
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    host, _ = node(
        environment=(("COLOUR", "mine"),), lines=("module load cuda/12.6",), extra=(("PATH", path),)
    )

    environment = host.started[0][1]
    assert (environment["LOADED"], environment["COLOUR"]) == ("cuda/12.6", "mine")
    assert environment["PATH"] == f"{path}:/only/profile"


@pytest.mark.parametrize(
    ("lines", "where", "why"),
    [
        (("true", "module load cuda/99"), "site, line 2: module load cuda/99", "code 127"),
        (("echo told; false", "touch never"), "site, line 1: echo told; false", "told"),
        (("if [",), "site, line 1: if [", "syntax error"),
        (("exit 0",), "site, line 1: exit 0", "ended the shell"),
        (("set -e", "false", "true"), "site, line 2: false", "exit code 1"),
        (("kill -9 $$",), "site, line 1: kill -9 $$", "signal 9"),
    ],
)
def test_a_failing_line_is_named_with_node_and_output(node, tmp_path, lines, where, why):
    with pytest.raises(SetupError, match="a setup line failed on n2") as caught:
        node(lines=lines, origin="site")

    assert caught.value.where == where
    assert why in caught.value.why
    assert not (tmp_path / "never").exists()


def test_lines_get_no_input_and_their_output_is_kept(node):
    node(lines=("read -r x || echo no input",))

    assert "no input" in node.log()


def test_what_a_line_leaves_running_does_not_hold_the_start(node):
    host, _ = node(lines=("sleep 30 & export PID=$!",))

    os.kill(int(host.started[0][1]["PID"]), 9)


def test_an_interpreter_that_lines_put_on_path_is_the_jobs(node, tmp_path):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        (tmp_path / "venv" / "bin" / name).symlink_to(sys.executable)
    line = f"export VIRTUAL_ENV={tmp_path}/venv PATH={tmp_path}/venv/bin:$PATH"
    host, _ = node(lines=(line,), python_follows=True, python=("/usr/bin/python3", "-u"))

    assert host.started[0][0].python == (f"{tmp_path}/venv/bin/python", "-u")
    assert "the setup lines put it on PATH" in host.said[0]


def test_a_named_interpreter_stays_whatever_lines_do(node, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    line = f"export PATH={tmp_path}/bin:$PATH"
    host, _ = node(lines=(line,), python=("/usr/bin/python3",))

    assert host.started[0][0].python == ("/usr/bin/python3",)
    assert host.said == []


def test_lines_that_touch_no_python_leave_the_planned_one(node):
    host, _ = node(lines=("export A=1",), python_follows=True)

    assert host.started[0][0].python == (sys.executable,)


def test_commands_run_in_order_with_the_scratch_folder(node, tmp_path):
    _, work = node(
        environment=(("A", "1"),),
        before=(
            'ls -d "$MUSTER_SCRATCH" > seen; echo $A $MUSTER_PLACE $MUSTER_NODE >> seen',
            "echo two >> seen",
        ),
    )

    assert (tmp_path / "seen").read_text() == f"{work.scratch}\n1 1 n2\ntwo\n"
    assert work.variables[contract.SCRATCH_VARIABLE] == work.scratch


def test_a_failing_command_is_named_with_node_code_and_output(node, tmp_path):
    with pytest.raises(SetupError, match="failed on n2") as caught:
        node(before=("echo no luck >&2; exit 3", "touch never"))

    assert "exit 3" in caught.value.where
    assert caught.value.why == "no luck\nexit code 3"
    assert not (tmp_path / "never").exists()
    assert "no luck" in node.log()


def test_the_nodes_shell_fills_the_scratch_folder_in(node, tmp_path):
    (tmp_path / "local disk").mkdir()
    _, work = node(
        environment=(("BASE", f"{tmp_path}/local disk"),), scratch="$BASE", before=("true",)
    )

    assert work.scratch.startswith(f"{tmp_path}/local disk/muster-r-1-")


def test_a_scratch_folder_of_a_variable_that_is_not_set_is_an_error(node):
    with pytest.raises(SetupError, match="can't be found on n2") as caught:
        node(scratch="$NO_SUCH_VARIABLE/x", before=("true",))

    assert "NO_SUCH_VARIABLE" in caught.value.why


def test_nothing_to_do_is_done_at_once(tmp_path):
    environment = {"TMPDIR": str(tmp_path)}
    options = options_of(tmp_path, NodeSetup(), "n1", 0, environment)
    work = ShellWork(options, DiskWriter())
    work.try_at_once()

    assert work.is_done
    assert os.listdir(work.scratch) == []


def test_a_long_line_is_named_while_it_runs():
    said = []
    shell = NodeShell("n1", said.append, lambda data: None, first_say_s=0.05, say_every_s=0.1)
    lines = ("true", "sleep 0.5")
    asyncio.run(shell.run_lines(lines, dict(os.environ), {}, "setup"))

    assert "setup line 2 still runs: sleep 0.5" in said
    assert len(said) >= 2


def test_an_interpreter_that_is_not_here_has_a_stand_in(tmp_path):
    gone = program_in(tmp_path, ("/nope/python3",))
    assert other_interpreter(gone, os.environ).python[0].endswith("/python3")
    assert other_interpreter(program_in(tmp_path), {"PATH": str(tmp_path)}) is None


def test_a_binary_of_another_processor_has_a_stand_in(tmp_path):
    head = bytearray(Path(sys.executable).read_bytes()[:64])
    head[18:20] = b"\x08\x00"  # MIPS
    alien = tmp_path / "python3"
    alien.write_bytes(head)
    alien.chmod(0o755)
    stand_in = other_interpreter(program_in(tmp_path, (str(alien),)), os.environ)

    assert stand_in.python[0] != str(alien)


def test_an_environment_that_was_sent_is_unpacked_behind_the_lines_and_runs_the_job(node, tmp_path):
    (tmp_path / "local").mkdir()
    lines = (f"export LOCAL={tmp_path}/local PYTHONHOME=/wrong",)
    host, _ = node(lines=lines, scratch="$LOCAL", shipped=shipped_in(tmp_path))
    ((program, environment),) = host.started
    (place,) = (tmp_path / "local").glob("muster-environments-*/[0-9a-f]*")
    assert program.python == (f"{place}/env/bin/python",)
    assert environment["VIRTUAL_ENV"] == f"{place}/env"
    assert environment["PATH"].startswith(f"{place}/env/bin:")
    assert "PYTHONHOME" not in environment
    assert shelf.is_used(str(place))


def test_an_environment_that_a_node_can_t_have_is_said_with_the_node(node, tmp_path):
    with pytest.raises(SetupError, match=r"another processor \(n2\)"):
        node(shipped=shipped_in(tmp_path, machine="vax"))


# What an agent hears of a process that moves files: while it works, and at its end. The process here is a few lines.


SAY = """
import json, sys
def say(**message):
    print(json.dumps(message), flush=True)
"""


def made(script, **options):
    """Return the transfer that a script is, and the notes that it says."""
    notes = []
    argv = [sys.executable, "-c", SAY + script]
    return Transfer(argv, dict(os.environ), notes.append, **options), notes


async def test_notes_are_told_when_they_come_and_not_at_the_end():
    transfer, notes = made(
        """
say(note="a checkpoint is there")
say(progress={"bytes_done": 3})
sys.stdin.read()
say(done={"num_files": 1})
""",
        keeps_stdin=True,
    )
    await wait_until_async(lambda: notes, "the note")
    assert notes == ["a checkpoint is there"]
    await wait_until_async(lambda: transfer.progress, "the progress")
    assert transfer.progress == {"bytes_done": 3}
    assert transfer.child.poll() is None
    transfer.end_input()
    assert await transfer.finish() == {"num_files": 1}


async def test_who_says_much_before_the_end_is_not_held_up():
    """A task's checkpoints are uploaded for days; a pipe holds a thousand sentences."""

    script = 'for n in range(5000): say(note=f"checkpoint {n} uploaded")\nsys.stdin.read()\nsay(done={})\n'
    transfer, notes = made(script, keeps_stdin=True)
    await wait_until_async(lambda: len(notes) == 5000, "all notes")
    transfer.end_input()
    await transfer.finish()


async def test_an_error_has_the_words_of_the_other_process():
    parts = {"what": "access was denied", "where": "s3://b/a", "why": "403", "fix": None}
    transfer, _ = made(f"say(error={parts!r}); sys.exit(11)")
    with pytest.raises(MusterError) as caught:
        await transfer.finish()
    assert caught.value.parts() == parts


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("print('no JSON at all')", "exit code 0"),
        ("sys.exit('no such module')", "no such module"),
    ],
)
async def test_one_that_ends_without_a_message_has_failed(script, why):
    transfer, _ = made(script, log=lambda data: None)
    with pytest.raises(MusterError, match="ended without a message") as caught:
        await transfer.finish()
    assert caught.value.why == why


async def test_a_line_that_no_pipe_holds_is_read_whole():
    transfer, notes = made("say(note='a' * 300_000); say(done={})")
    await transfer.finish()
    assert notes == ["a" * 300_000]


async def test_it_does_not_outlive_who_waits_for_it():
    transfer, notes = made("say(note='here'); sys.stdin.read()", keeps_stdin=True)
    waiting = asyncio.create_task(transfer.finish())
    await wait_until_async(lambda: notes, "its start")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await wait_until_async(lambda: transfer.child.poll() == -9, "its end")
    assert read_process(transfer.child.pid) is None


async def test_a_long_transfer_says_how_far_it_is():
    script = """
say(progress={"bytes_done": 1 << 20, "total_bytes": 4 << 20})
sys.stdin.read()
say(done={})
"""

    transfer, notes = made(script, keeps_stdin=True)
    end = asyncio.create_task(transfer.finish_aloud("downloading x", say_every_s=0.01))
    said = "downloading x: 1 MiB of 4 MiB (25 %)"
    await wait_until_async(lambda: said in notes, "the words of its progress")
    transfer.end_input()
    assert await end == {}
