import dataclasses
import json
import os
import re
import shutil
import stat
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.workflows import workflow_plan
from torchmuster.core import proc
from torchmuster.errors import MusterError, UsageError
from torchmuster.workflow.plan import GroupPlan, TaskNetwork, TaskPlan, TrainingPlan
from torchmuster.workflow.record import State
from torchmuster.workflow.sandbox import container
from torchmuster.workflow.sandbox.container import Container, ContainerSpec, Mount, container_argv


def spec(kind="podman", **changes):
    base = ContainerSpec(
        kind=kind,
        program=f"/usr/bin/{kind}",
        image="busybox:1",
        words=["sh", "-c", "echo hi"],
        name="torchmuster-r-t-0",
        working_dir="/runs/r/work",
        uid=1000,
        gid=100,
        mounts=[
            Mount(source="/runs/r", target="/runs/r"),
            Mount(source="/runs/r/file0", target="/tmp/x.sh", read_only=True),
        ],
        volume_mounts=["/data", "/mnt/a:/b"],
    )
    return dataclasses.replace(base, **changes)


def plan(*tasks, kind="podman", network=TaskNetwork.SHARED):
    return workflow_plan(GroupPlan(name="g", tasks=tasks), container=kind, network=network)


def nowhere(name):
    return None


def everywhere(name):
    return f"/usr/bin/{name}"


@pytest.mark.parametrize("kind", ["podman", "docker"])
def test_the_command_replaces_the_images_own(kind):
    argv = container_argv(spec(kind))

    assert argv[:4] == [f"/usr/bin/{kind}", "run", "--rm", "--init"]
    assert argv[-4:] == ["--entrypoint=sh", "busybox:1", "-c", "echo hi"]
    assert "--workdir=/runs/r/work" in argv
    assert "--user=1000:100" in argv
    assert "--name=torchmuster-r-t-0" in argv
    assert "--network=host" in argv


def test_every_mount_stands_in_the_line_and_files_are_read_only():
    volumes = [word for word in container_argv(spec()) if word.startswith("--volume=")]

    ours = ["--volume=/runs/r:/runs/r", "--volume=/runs/r/file0:/tmp/x.sh:ro"]
    assert volumes == [*ours, "--volume=/data:/data", "--volume=/mnt/a:/b"]


@pytest.mark.parametrize(
    ("kind", "uid", "kept"), [("podman", 1000, True), ("podman", 0, False), ("docker", 1000, False)]
)
def test_users_are_kept_where_podman_maps_them(kind, uid, kept):
    assert ("--userns=keep-id" in container_argv(spec(kind, uid=uid))) is kept


def test_gpus_are_named_in_each_engines_words():
    gpus = {kind: container_argv(spec(kind, gpus=("0", "GPU-7"))) for kind in container.ENGINES}

    assert {"--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=GPU-7"} < set(gpus["podman"])
    assert '--gpus="device=0,GPU-7"' in gpus["docker"]
    assert "--nv" in gpus["apptainer"]
    assert not any("gpu" in word or word == "--nv" for word in container_argv(spec("apptainer")))


def test_a_private_network_is_joined_by_its_path():
    assert "--network=ns:/proc/7/fd/9" in container_argv(spec(network="/proc/7/fd/9"))


def test_privileged_is_passed_on():
    assert "--privileged" in container_argv(spec(privileged=True))
    assert "--privileged" not in container_argv(spec())


@pytest.mark.parametrize(
    ("image", "shown"),
    [("busybox:1", "docker://busybox:1")]
    + [(file, file) for file in ("oras://x/y", "/i/x.sif", "./x", "x.sif")],
)
def test_apptainer_runs_an_image_of_a_registry_or_a_file(image, shown):
    argv = container_argv(spec("apptainer", image=image))

    assert argv[:2] == ["/usr/bin/apptainer", "exec"]
    assert argv[-6:] == ["--pwd", "/runs/r/work", shown, "sh", "-c", "echo hi"]
    assert argv[argv.index("--bind") + 1] == "/runs/r:/runs/r"


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not name.startswith(container._ENGINE_PREFIXES)
)
values = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(variables=st.dictionaries(names, values, max_size=5))
@pytest.mark.parametrize("kind", ["podman", "docker"])
def test_every_variable_reaches_the_container_whole_by_one_way(kind, variables):
    engine, text, by_name = container.split_environment(kind, variables, {})

    in_file = dict(line.split("=", 1) for line in text.split("\n")[:-1])
    assert {**in_file, **{name: engine[name] for name in by_name}} == variables
    assert not set(in_file) & set(by_name)
    for value in in_file.values():
        assert (value.strip(), set(value) & set("\"'#\r")) == (value, set())


def test_a_plain_variable_does_not_touch_the_engine_itself():
    ours, theirs = {"PATH": "/usr/bin", "HOME": "/root"}, {"PATH": "/opt/bin", "HOME": ""}
    found = container.split_environment("podman", theirs, ours)

    assert found == (ours, "PATH=/opt/bin\nHOME=\n", [])


@pytest.mark.parametrize("name", ["PATH", "DOCKER_HOST"])
def test_a_value_of_several_lines_that_would_change_the_engine_is_refused(name):
    with pytest.raises(MusterError, match=f"`{name}` can't be given"):
        container.split_environment("podman", {name: "a\nb"}, {"PATH": "/usr/bin"})


@pytest.mark.parametrize("name", ["A\nB", "#A", "A=B", ""])
def test_a_name_that_would_forge_a_line_of_the_file_is_refused(name):
    with pytest.raises(MusterError, match="can't be the name"):
        container.split_environment("docker", {name: "x"}, {})


def test_apptainer_gets_variables_under_its_own_prefix():
    ours = {"PATH": "/usr/bin"}
    found = container.split_environment("apptainer", {"PATH": "a\nb"}, ours)

    assert found == ({**ours, "APPTAINERENV_PATH": "a\nb"}, "", [])


@pytest.mark.parametrize("kind", container.ENGINES)
def test_gpu_numbers_of_the_machine_stay_out_where_the_engine_counts_anew(kind):
    ours = {"CUDA_VISIBLE_DEVICES": "3", "A": "1"}

    inside = container.gpu_variables(kind, TaskPlan(name="t"), ours)

    assert ("CUDA_VISIBLE_DEVICES" in inside) is (kind == "apptainer")
    asked = TaskPlan(name="t", environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert container.gpu_variables(kind, asked, ours) == ours


@pytest.mark.parametrize("run", ["r_1.x-2", "a b/c"])
def test_a_name_is_one_that_engines_take(run):
    assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", container.container_name(run, "t", 3))


def test_containers_are_removed_at_once():
    podman = container.removal_argv("podman", "/usr/bin/podman", ["a"])
    assert podman == ["/usr/bin/podman", "rm", "--force", "--ignore", "--time=0", "a"]
    assert container.removal_argv("docker", "/d", ["a", "b"]) == ["/d", "rm", "--force", "a", "b"]
    assert container.removal_argv("apptainer", "/a", ["a"]) == []


def test_a_missing_engine_is_told_with_those_that_are_here():
    with pytest.raises(UsageError) as caught:
        container.find_engine("podman", lambda name: "/x" if name == "docker" else None)

    assert caught.value.what == "there is no `podman` on this machine"
    assert caught.value.why.endswith("installed here: docker")
    assert caught.value.fix == "--container docker"


def test_all_problems_of_a_workflow_in_containers_come_at_once():
    training = TrainingPlan(nodes="1", nproc_per_node=None, script="x.py")
    tasks = [TaskPlan(name="bare"), TaskPlan(name="train", image="x", training=training)]

    private = plan(*tasks, kind="docker", network=TaskNetwork.PRIVATE)
    found = [error.what for error in container.container_problems(private, nowhere)]

    assert found == [
        "there is no `docker` on this machine",
        "no `image:` for --container docker: bare",
        "training tasks (`script:`) don't run in containers: train",
        "--container docker can't have --task-network private here",
    ]


def test_a_workflow_with_images_has_no_problem():
    assert container.container_problems(plan(TaskPlan(name="t", image="x")), everywhere) == []
    assert container.container_problems(plan(TaskPlan(name="t"), kind="none"), nowhere) == []


PULL = "Error: initializing source docker://nowhere.invalid/x:1: pinging container registry"
DAEMON = "Cannot connect to the Docker daemon at unix:///x.sock. Is the docker daemon running?"
FATAL = "FATAL:   While making image from oci registry: unable to pull docker://x"


@pytest.mark.parametrize(
    ("kind", "status", "line", "state"),
    [
        ("podman", 125, PULL, State.FAILED_IMAGE_PULL),
        ("docker", 125, "docker: Error response from daemon: manifest for x not found", "pull"),
        ("docker", 125, DAEMON, State.FAILED_START_ERROR),
        ("podman", 125, "Error: unknown flag: --cidfil", State.FAILED_START_ERROR),
        ("apptainer", 255, FATAL, State.FAILED_IMAGE_PULL),
    ],
)
def test_a_container_that_never_began_has_a_state_and_the_engines_words(kind, status, line, state):
    failure = container.read_failure(spec(kind), status, ["", line], was_made=False)

    assert failure.state is (State.FAILED_IMAGE_PULL if state == "pull" else state)
    assert failure.why == line


def test_a_commands_own_status_is_never_taken_for_the_engines():
    assert container.read_failure(spec(), 125, [PULL], was_made=True) is None
    assert container.read_failure(spec(), 1, [PULL], was_made=False) is None
    assert container.read_failure(spec("apptainer"), 255, ["no"], was_made=False) is None


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker client")
def test_the_real_docker_client_without_a_daemon_is_understood(tmp_path):
    program = shutil.which("docker")
    real = spec("docker", program=program, mounts=(), volume_mounts=(), id_file=f"{tmp_path}/id")
    environment = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock", "PATH": os.environ["PATH"]}
    said = tmp_path / "said"
    with said.open("wb") as out:
        child = proc.start(container_argv(real), env=environment, stdout=out, stderr=out)
        status = child.wait(60)

    lines = said.read_text().splitlines()
    failure = container.read_failure(real, status, lines, was_made=(tmp_path / "id").exists())

    assert failure is not None, lines
    assert failure.state is State.FAILED_START_ERROR
    assert "daemon" in failure.why


def fake(folder, body):
    path = folder / "podman"
    path.write_text(f"#!{sys.executable}\nimport sys, os\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_the_launcher_removes_leftovers_before_it_becomes_the_engine(tmp_path):
    log = tmp_path / "log"
    program = fake(tmp_path, f"open({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')")
    made = Container(spec(program=program, env_file=f"{tmp_path}/vars"), str(tmp_path))

    argv = made.write(["torchmuster-r-t-0"], "KEY=secret\n")
    assert proc.start(argv).wait(30) == 0

    first, second = log.read_text().splitlines()
    assert first == "rm --force --ignore --time=0 torchmuster-r-t-0"
    assert second.startswith("run --rm --init")
    assert "secret" not in first + second + " ".join(argv)
    for name in ("vars", "container.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert "secret" not in json.dumps(json.loads((tmp_path / "container.json").read_text()))


def test_the_first_process_of_a_container_is_asked_for_once_it_is_made(tmp_path):
    log = tmp_path / "log"
    program = fake(tmp_path, f"open({str(log)!r}, 'a').write('x'); print(4711)")
    made = Container(spec(program=program, id_file=f"{tmp_path}/id"), str(tmp_path))

    assert made.pid() == 0
    assert not log.exists()
    (tmp_path / "id").write_text("c0ffee")
    assert [made.pid(), made.pid()] == [4711, 4711]
    assert log.read_text() == "x"
