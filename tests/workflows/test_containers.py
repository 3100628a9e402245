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
        lines = (self.folder / "calls").read_text().splitlines()
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


@pytest.fixture
def submit(engine, run_workflow):
    """Return a function that runs a script in a container of an image, to its end."""

    def submit(script, image="busybox:1", container="podman"):
        return run_workflow(one(script, image), "--container", container)

    return submit


@pytest.fixture
def start(engine, start_workflow):
    """Return a function that starts a script in a container; it has begun when it has written `up`."""

    def start(script, *options):
        started = start_workflow(one(script), "--container", "podman", *options)
        started.wait_for_file("up")
        return started

    return start


LOOP = "touch FOLDER/up; while :; do sleep 0.1; done"


def test_the_command_runs_in_the_image_with_the_variables_of_the_file(engine, submit):
    ran = submit('echo "$ONE|$TWO|$HOME" > {{output}}/said')

    assert ran.code == 0, ran.out
    assert (ran.output("t") / "said").read_text() == "a b|x\ny|\n"
    (argv,) = engine.calls("run")
    assert argv[argv.index("busybox:1") + 1] == "-c"
    assert "--env=TWO" in argv
    assert "--name=torchmuster-r-t-0" in argv
    assert f"--volume={ran.run_dir}:{ran.run_dir}" in argv
    assert "--volume=/opt:/opt" in argv


def test_files_of_the_task_are_mounted_read_only_and_no_value_is_in_the_line(engine, submit):
    ran = submit("true")

    assert ran.code == 0, ran.out
    (argv,) = engine.calls("run")
    (mount,) = [word for word in argv if word.endswith(":/etc/muster-none/conf:ro")]
    assert Path(mount.split("=")[1].split(":")[0]).read_text() == "of r"
    assert not os.path.exists("/etc/muster-none")
    assert not any("a b" in word or "x\ny" in word for word in argv)
    (variables,) = [word.split("=")[1] for word in argv if word.startswith("--env-file=")]
    assert stat.S_IMODE(os.stat(variables).st_mode) == 0o600


@pytest.mark.parametrize(
    ("script", "image", "state", "said"),
    [
        ("true", "missing", "FAILED_IMAGE_PULL", "initializing source docker://missing: denied"),
        ("true", "nodaemon", "FAILED_START_ERROR", "Is the docker daemon running?"),
        ("exit 125", "busybox:1", "FAILED", "exit code 125"),
    ],
    ids=["no such image", "no daemon", "the command's own 125"],
)
def test_an_engine_s_failure_is_told_in_its_words(engine, submit, script, image, state, said):
    ran = submit(script, image)

    assert ran.code != 0
    assert ran.result()["state"] == state
    assert said in ran.out


def test_a_restart_has_a_container_of_its_own_and_removes_the_one_before(engine, submit):
    script = "[ -e again ] && exit 0; touch again; exit 8"

    ran = submit(script)

    assert ran.code == 0, ran.out
    names = [word for argv in engine.calls("run") for word in argv if word.startswith("--name=")]
    assert names == ["--name=torchmuster-r-t-0", "--name=torchmuster-r-t-1"]
    before = engine.calls("rm")
    assert ["torchmuster-r-t-0", "torchmuster-r-t-1"] in [argv[-2:] for argv in before]


def test_sigterm_reaches_the_command_in_the_container(engine, start, tmp_path):
    started = start(f"trap 'touch FOLDER/ended; exit 0' TERM; {LOOP}")
    started.process.send_signal(signal.SIGTERM)
    started.wait()

    assert (tmp_path / "ended").exists(), started.out
    assert engine.containers() == []


def test_a_command_that_does_not_heed_sigterm_is_removed_with_its_container(engine, start):
    started = start(f"trap '' TERM; {LOOP}", "--grace", "1")
    started.process.send_signal(signal.SIGTERM)
    started.wait()

    assert engine.containers() == []
    assert any(argv[-1] == "torchmuster-r-t-0" for argv in engine.calls("rm"))


def test_kill_9_of_the_agent_leaves_no_container(engine, start):
    started = start("[ -e FOLDER/up ] && exit 0; touch FOLDER/up; sleep 60")
    (agent,) = wait_until(lambda: started.pids("--task=t"), "the agent")
    os.kill(agent, signal.SIGKILL)
    started.wait()

    assert started.result()["state"] == "COMPLETED", started.out
    assert engine.containers() == []


def test_a_barrier_works_in_a_container(engine, submit):
    call = f"PYTHONPATH={Path(__file__).parents[2] / 'src'} {sys.executable} -m torchmuster barrier --name b"

    ran = submit(f"{call} && echo through")

    assert ran.code == 0, ran.out
    assert "through" in ran.out


def test_tasks_without_an_image_are_named_before_anything_starts(engine, run_workflow):
    text = one("true").replace("    image: busybox:1\n", "")
    ran = run_workflow(text, "--container", "podman")

    assert ran.code == 2
    assert "no `image:` for --container podman: t" in ran.out
    assert not ran.run_dir.exists()


@pytest.mark.parametrize("container", ["none", "podman"])
def test_volume_mounts_have_an_effect_in_containers_only(engine, submit, container):
    ran = submit("true", container=container)

    assert ran.code == 0, ran.out
    assert ("`volumeMounts` has no effect" in ran.out) is (container == "none")
