"""Tasks in containers, with an engine that is a script: it records its command lines and runs the command."""

import json
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from kit.waiting import wait_until

TASK = """
workflow:
  name: c
  tasks:
  - name: t
    image: IMAGE
    command: [bash, -c]
    args: [SCRIPT]
    environment: {ONE: a b, TWO: "x\\ny", PATH: "/usr/bin:/bin"}
    volumeMounts: [/opt]
    exitActions: {RESTART: '8'}
    files:
    - {path: /etc/muster-none/conf, contents: "of {{workflow_id}}"}
"""


def one(script, image="busybox:1"):
    return TASK.replace("IMAGE", image).replace("SCRIPT", json.dumps(script))


class Engine:
    """The folder of a fake engine."""

    def __init__(self, folder):
        self.folder = folder

    def install(self, name):
        source = Path(__file__).with_name("fake_engine.py").read_text()
        program = self.folder / name
        program.write_text(f"#!{sys.executable} -S\n{source}")
        program.chmod(0o755)

    def calls(self, kind):
        """Return the command lines of this kind, in their order."""
        try:
            lines = (self.folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [argv for line in lines if (argv := json.loads(line))[0] == kind]

    def containers(self):
        made = self.folder / "made"
        return sorted(os.listdir(made)) if made.is_dir() else []


@pytest.fixture
def engine(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    made = Engine(folder)
    made.install("podman")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    yield made
    for name in made.containers():
        os.kill(int((folder / "made" / name).read_text()), signal.SIGKILL)


def test_the_command_runs_in_the_image_with_the_variables_of_the_file(engine, run_workflow):
    ran = run_workflow(one('echo "$ONE|$TWO|$HOME" > {{output}}/said'), "--container", "podman")

    assert ran.code == 0, ran.out
    assert (ran.output("t") / "said").read_text() == "a b|x\ny|\n"
    (argv,) = engine.calls("run")
    assert argv[argv.index("busybox:1") + 1] == "-c"
    assert "--env=TWO" in argv
    assert "--name=torchmuster-r-t-0" in argv
    assert f"--volume={ran.run_dir}:{ran.run_dir}" in argv
    assert "--volume=/opt:/opt" in argv


def test_files_of_the_task_are_mounted_read_only_and_no_value_is_in_the_line(engine, run_workflow):
    ran = run_workflow(one("true"), "--container", "podman")

    assert ran.code == 0, ran.out
    (argv,) = engine.calls("run")
    (mount,) = [word for word in argv if word.endswith(":/etc/muster-none/conf:ro")]
    assert Path(mount.split("=")[1].split(":")[0]).read_text() == "of r"
    assert not os.path.exists("/etc/muster-none")
    assert not any("a b" in word or "x\ny" in word for word in argv)
    (variables,) = [word.split("=")[1] for word in argv if word.startswith("--env-file=")]
    assert stat.S_IMODE(os.stat(variables).st_mode) == 0o600


def test_an_image_that_can_not_be_had_is_a_failed_image_pull(engine, run_workflow):
    ran = run_workflow(one("true", image="missing"), "--container", "podman")

    assert ran.code != 0
    assert ran.result()["state"] == "FAILED_IMAGE_PULL"
    assert "initializing source docker://missing: denied" in ran.out


def test_a_daemon_that_does_not_run_is_told_in_its_own_words(engine, run_workflow):
    ran = run_workflow(one("true", image="nodaemon"), "--container", "podman")

    assert ran.result()["state"] == "FAILED_START_ERROR"
    assert "Is the docker daemon running?" in ran.out


def test_the_commands_own_125_is_an_exit_code(engine, run_workflow):
    ran = run_workflow(one("exit 125"), "--container", "podman")

    assert ran.result()["state"] == "FAILED"
    assert "exit code 125" in ran.out


def test_a_restart_has_a_container_of_its_own_and_removes_the_one_before(engine, run_workflow):
    script = "[ -e again ] && exit 0; touch again; exit 8"

    ran = run_workflow(one(script), "--container", "podman")

    assert ran.code == 0, ran.out
    names = [word for argv in engine.calls("run") for word in argv if word.startswith("--name=")]
    assert names == ["--name=torchmuster-r-t-0", "--name=torchmuster-r-t-1"]
    before = engine.calls("rm")
    assert ["torchmuster-r-t-0", "torchmuster-r-t-1"] in [argv[-2:] for argv in before]


def test_sigterm_reaches_the_command_in_the_container(engine, start_workflow, tmp_path):
    script = f"trap 'touch {tmp_path}/ended; exit 0' TERM; touch {tmp_path}/up; "
    script += "while :; do sleep 0.1; done"
    started = start_workflow(one(script), "--container", "podman")

    started.wait_for_file("up")
    started.process.send_signal(signal.SIGTERM)
    started.wait()

    assert (tmp_path / "ended").exists(), started.out
    assert engine.containers() == []


def test_a_command_that_does_not_heed_sigterm_is_removed_with_its_container(
    engine, start_workflow, tmp_path
):
    script = f"trap '' TERM; touch {tmp_path}/up; while :; do sleep 0.1; done"
    started = start_workflow(one(script), "--container", "podman", "--grace", "1")

    started.wait_for_file("up")
    started.process.send_signal(signal.SIGTERM)
    started.wait()

    assert engine.containers() == []
    assert any(argv[-1] == "torchmuster-r-t-0" for argv in engine.calls("rm"))


def test_kill_9_of_the_agent_leaves_no_container(engine, start_workflow, tmp_path):
    script = f"[ -e {tmp_path}/up ] && exit 0; touch {tmp_path}/up; sleep 60"
    started = start_workflow(one(script), "--container", "podman")

    started.wait_for_file("up")
    (agent,) = wait_until(lambda: started.pids("--task=t"), "the agent")
    os.kill(agent, signal.SIGKILL)
    started.wait()

    assert started.result()["state"] == "COMPLETED", started.out
    assert engine.containers() == []


def test_a_barrier_works_in_a_container(engine, run_workflow):
    call = f"PYTHONPATH={Path(__file__).parents[2] / 'src'} {sys.executable} -m torchmuster barrier --name b"

    ran = run_workflow(one(f"{call} && echo through"), "--container", "podman")

    assert ran.code == 0, ran.out
    assert "through" in ran.out


def test_tasks_without_an_image_are_named_before_anything_starts(engine, run_workflow):
    ran = run_workflow(
        one("true").replace("image: IMAGE", "").replace("    image: busybox:1\n", ""),
        "--container",
        "podman",
    )

    assert ran.code == 2
    assert "no `image:` for --container podman: t" in ran.out
    assert not ran.run_dir.exists()


def test_a_missing_engine_is_told_with_those_that_are_here(engine, run_workflow):
    ran = run_workflow(one("true"), "--container", "apptainer")

    assert ran.code == 2
    assert "there is no `apptainer` on this machine" in ran.out
    assert "podman" in ran.out.partition("installed here:")[2].splitlines()[0]


@pytest.mark.parametrize("container", ["none", "podman"])
def test_volume_mounts_have_an_effect_in_containers_only(engine, run_workflow, container):
    ran = run_workflow(one("true"), "--container", container)

    assert ran.code == 0, ran.out
    assert ("`volumeMounts` has no effect" in ran.out) is (container == "none")
