"""What a job script does where the Python of the client can't run."""

import sys
from pathlib import Path

import pytest

from kit.command import ran
from torchmuster.launcher.engines.base import PYTHON, body
from torchmuster.launcher.files.code_copy import place_package
from torchmuster.launcher.model.job import JobRequest, NodeChunk


def run_script(tmp_path, python, *lines, path="/usr/bin:/bin"):
    """Run the shell part of a job's script whose head says which Python it got."""
    says = (PYTHON, "-c", "import sys; print('head of', sys.executable)")
    script = write_script(tmp_path, says, python=python, node_lines=lines)
    return ran(["/bin/bash", script], limit_s=30, env={"PATH": path})


def write_script(folder, head, **more):
    """Write the shell part of a job's script with this head; return its path."""
    job = JobRequest(name="r", chunks=(NodeChunk(),), head=head, log_path="/x.log", **more)
    (folder / "job.sh").write_text("\n".join(body(job)))
    return folder / "job.sh"


def test_where_the_clients_python_runs_no_line_is_run_in_the_script(tmp_path):
    done = run_script(tmp_path, sys.executable, f"touch {tmp_path}/never")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("head of")
    assert not (tmp_path / "never").exists()


def test_elsewhere_the_lines_bring_a_python_and_it_is_said(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    done = run_script(tmp_path, "/nope/python3", f"export PATH={tmp_path}/bin:$PATH")

    assert done.returncode == 0, done.stderr
    assert "muster: /nope/python3 does not run on" in done.stderr
    assert done.stdout.startswith("head of")


@pytest.mark.parametrize("lines", [(), ("if [ unbalanced",)])
def test_without_any_python_it_ends_with_four_lines_and_14(tmp_path, lines):
    (tmp_path / "bin").mkdir()
    for name in ("uname", "bash"):
        (tmp_path / "bin" / name).symlink_to(Path("/usr/bin") / name)
    done = run_script(tmp_path, "/nope/python3", *lines, path=str(tmp_path / "bin"))

    assert done.returncode == 14
    words = [line.partition(":")[0] for line in done.stderr.splitlines()[-4:]]
    assert words == ["error", "at", "because", "hint"]
    assert "no python3 on PATH" in done.stderr


def test_a_line_that_is_no_shell_does_no_harm_where_it_is_not_needed(tmp_path):
    assert run_script(tmp_path, sys.executable, "if [", "echo 'open").returncode == 0


def test_a_node_without_the_clients_torchmuster_takes_the_copy_beside_the_run(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "home"))
    (tmp_path / "a run").mkdir()
    place_package(str(tmp_path / "a run" / "package.zip"))
    program = "/nope/torchmuster/core/programs/__main__.py"
    script = write_script(
        tmp_path,
        (PYTHON, program, "conduct", "/no/such/run", "--engine=slurm"),
        python=sys.executable,
        package_copy=str(tmp_path / "a run" / "package"),
    )
    for _ in range(2):  # the second time it is there already
        done = ran(["/bin/bash", script], env={"PATH": "/usr/bin:/bin"})
        assert done.returncode == 3
        assert "the plan of the run can't be read" in done.stderr
        assert "muster: /nope/torchmuster is not on" in done.stderr
    assert sorted(path.name for path in (tmp_path / "a run").iterdir()) == [
        "package",
        "package.zip",
    ]
