"""Tasks with views of their own on one machine: what each sees, and what the machine keeps."""

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest

TASK = "muster-view-test.sh"
DEADLINE_S = 60.0


def mounts():
    return Path("/proc/self/mounts").read_text()


def script(text):
    return "#!/bin/sh\n" + text + "\n"


def test_two_tasks_see_their_own_file_at_one_path_and_the_machine_none(stage):
    path = f"/tmp/{TASK}"
    before = mounts()

    ended = stage.run(
        *({"name": n, "files": {path: script(f"echo I am {n}")}, "command": [path]} for n in "ab")
    )

    assert [ended["tasks"][n]["out"] for n in "ab"] == ["I am a\n", "I am b\n"]
    assert not os.path.exists(path)
    assert mounts() == before


def test_a_file_is_found_below_directories_that_the_machine_does_not_have(stage):
    files = {"/muster-none/x": "one\n", "/opt/muster-none/deep/z": "two\n"}
    command = ["sh", "-c", "cat /muster-none/x /opt/muster-none/deep/z; echo new > /muster-none/y"]

    task = stage.run_one(files=files, command=command, working_dir="/muster-none")

    assert (task["code"], task["out"], task["err"]) == (0, "one\ntwo\n", "")
    assert not os.path.exists("/muster-none")
    assert not os.path.exists("/opt/muster-none")


def test_a_file_of_the_machine_is_covered_for_the_task_only(stage):
    before = Path("/etc/passwd").read_text()

    task = stage.run_one(files={"/etc/passwd": "ours\n"}, command=["cat", "/etc/passwd"])

    assert task["out"] == "ours\n"
    assert Path("/etc/passwd").read_text() == before


def test_user_group_pid_and_session_stay_what_they_were(stage):
    facts = "echo $$ $(id -u) $(id -g) $(cut -d' ' -f4 /proc/$$/stat)"

    ended = stage.run(
        {"name": "a", "files": {"/muster-none/x": ""}, "command": ["sh", "-c", facts]}
    )
    task = ended["tasks"]["a"]

    pid, uid, gid, parent = task["out"].split()
    assert (int(pid), int(uid), int(gid)) == (task["pid"], ended["uid"], ended["gid"])
    assert int(parent) > 0
    assert task["report"] is None


def test_what_a_task_writes_to_tmp_is_its_own_and_can_be_found_from_outside(stage):
    write = "mkdir /tmp/muster-models && echo {} > /tmp/muster-models/w && cat /tmp/muster-models/w"
    path = "/tmp/muster-models/w"

    ended = stage.run(
        *({"name": n, "command": ["sh", "-c", write.format(n)], "ask": [path]} for n in "ab")
    )

    assert [ended["tasks"][n]["out"] for n in "ab"] == ["a\n", "b\n"]
    assert not os.path.exists("/tmp/muster-models")
    places = [ended["tasks"][n]["host_paths"][path] for n in "ab"]
    assert [Path(place).read_text() for place in places] == ["a\n", "b\n"]


def test_the_run_directory_is_the_real_one_in_both_directions(stage):
    base = f"{stage.base}/run1"
    later = f"until [ -e {base}/go ]; do sleep 0.01; done; cat {base}/go; echo back > {base}/answer"

    with stage.popen([{"name": "a", "command": ["sh", "-c", later]}], hold=True) as child:
        child.stdout.readline()
        Path(base, "going").write_text("from outside\n")
        Path(base, "going").rename(Path(base, "go"))  # whole, or not there
        out, err = child.communicate(timeout=DEADLINE_S)

    assert "from outside" in out, err
    assert Path(base, "answer").read_text() == "back\n"


def test_entries_of_tmp_from_before_the_start_stay_visible(stage):
    with tempfile.NamedTemporaryFile(dir="/tmp", prefix="muster-seen-") as seen:
        os.chmod(seen.name, 0o644)
        Path(seen.name).write_text("seen\n")
        task = stage.run_one(command=["cat", seen.name])

    assert task["out"] == "seen\n"


def test_a_symlink_of_a_task_can_not_lead_our_files_outside(stage):
    outside = Path(stage.base, "outside")
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    link = Path(stage.base, "link")
    link.symlink_to(outside)

    task = stage.run(
        {"name": "a", "files": {f"{link}/x": "ours\n"}, "command": ["cat", f"{link}/x"]}
    )["tasks"]["a"]

    assert task["out"] == "ours\n"
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "code", "sentence"),
    [
        (["sleeep", "1"], 127, "did you mean `sleep`?"),
        (["/etc/passwd"], 126, "not executable"),
        (["/tmp/muster-odd"], 127, "the interpreter in the first line"),
        (["/tmp/muster-plain"], 126, "begins with #!"),
    ],
)
def test_a_command_that_can_not_run_ends_with_a_code_and_a_sentence(stage, command, code, sentence):
    files = {"/tmp/muster-odd": "#!/muster/none\n", "/tmp/muster-plain": "text\n"}

    task = stage.run_one(files=files, command=command)

    assert task["code"] == code
    assert sentence in task["err"]
    assert task["report"]["code"] == code
    assert sentence in task["report"]["what"]


def test_a_tmp_of_more_entries_than_the_limit_shows_what_is_needed(stage):
    task = stage.run_one(command=["ls", "/tmp"], options={"max_tmp_entries": 1})

    assert task["out"].split() == [os.path.basename(stage.base)]
    if len(os.listdir("/tmp")) > 1:
        assert "the task sees 1 of them" in task["notes"][0]


def test_kill_9_of_a_task_leaves_nothing_mounted_and_nothing_on_the_machine(stage):
    path, before = f"/tmp/{TASK}", mounts()
    files = {path: script("exec sleep 600"), "/muster-none/x": ""}

    with stage.popen([{"name": "a", "files": files, "command": [path]}], hold=True) as child:
        (pid,) = json.loads(child.stdout.readline())["pids"]
        os.kill(pid, signal.SIGKILL)
        child.communicate(timeout=DEADLINE_S)

    assert not os.path.exists(path)
    assert not os.path.exists("/muster-none")
    assert mounts() == before


def test_a_view_of_500_entries_takes_a_mount_for_each(stage):
    """How long that takes is measured by `benchmarks/workflows.py`."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="muster-many-") as many:
        for number in range(500):
            Path(many, f"f{number}").touch()
        os.chmod(many, 0o755)
        count = ["sh", "-c", f"ls {many} | wc -l; wc -l < /proc/self/mounts"]
        options = {"private_tmp": False}
        ended = stage.run_one(files={f"{many}/new": ""}, command=count, options=options)

    entries, seen = map(int, ended["out"].split())
    assert entries == 501
    assert seen - len(mounts().splitlines()) <= 501 + 20  # the folder itself, /tmp, ...
