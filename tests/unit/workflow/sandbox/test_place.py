import json
import os
import stat

import pytest

from kit.command import ran
from torchmuster.errors import MusterError, UsageError
from torchmuster.launcher.node import namespaces
from torchmuster.workflow.sandbox.place import PlacedFile, plan_view, view_argv, write_view

LIMIT_S = 90.0


def plan(tmp_path, *paths, mode=0o644, **options):
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    files = [PlacedFile(path=str(path), content=b"ours", mode=mode) for path in paths]
    options = {"working_dir": "/", "private_tmp": False, **options}
    return plan_view(files, str(folder), **options)


def problem(tmp_path, *paths, **options):
    with pytest.raises(UsageError) as caught:
        plan(tmp_path, *paths, **options)
    return caught.value.what + (caught.value.why or "")


def test_a_file_that_exists_is_covered_and_nothing_is_mirrored(tmp_path):
    (tmp_path / "here").write_text("theirs")

    made = plan(tmp_path, tmp_path / "here")

    assert made.mirrors == ()
    assert list(made.covers) == [str(tmp_path / "here")]


def test_a_new_file_mirrors_its_directory_alone(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "old").touch()
    (tmp_path / "there" / "sub").mkdir()
    (tmp_path / "there" / "link").symlink_to("old")

    (mirror,) = plan(tmp_path, tmp_path / "there" / "new").mirrors

    assert mirror.at == str(tmp_path / "there")
    assert (mirror.dirs, mirror.files, mirror.links) == (("sub",), ("old",), {"link": "old"})


def test_sockets_of_other_tasks_agents_are_not_mirrored(tmp_path):
    for name in ("muster-of_ours0", "muster-neighbor", "muster-a_users_"):
        (tmp_path / name).mkdir()
    for agent in ("muster-of_ours0", "muster-neighbor"):
        (tmp_path / agent / "owner.json").touch()

    (mirror,) = plan(tmp_path, tmp_path / "new", keep=[str(tmp_path / "muster-of_ours0")]).mirrors

    assert set(mirror.dirs) == {"folder", "muster-of_ours0", "muster-a_users_"}


def test_missing_directories_are_made_in_the_nearest_one_that_exists(tmp_path):
    (mirror,) = plan(tmp_path, tmp_path / "a" / "b" / "c").mirrors

    assert (mirror.at, mirror.made) == (str(tmp_path), ("a", "a/b"))


def test_a_top_level_directory_that_is_missing_mirrors_the_root(tmp_path):
    (mirror,) = plan(tmp_path, "/muster-none/x").mirrors

    assert mirror.at == "/"
    assert "proc" in mirror.dirs


def test_a_symlinked_directory_is_resolved_first(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    made = plan(tmp_path, tmp_path / "link" / "x")

    assert made.mirrors[0].at == str(tmp_path / "real")
    assert made.host_path(f"{tmp_path}/link/x") == made.host_path(f"{tmp_path}/real/x")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("x", "is not absolute"),
        ("/", "is the root directory"),
        ("//", "is the root directory"),
        ("/a/../b", "contains `..`"),
        ("/proc/x", "lies below /proc"),
        ("//sys/x", "lies below /sys"),
        ("/dev/shm/x", "lies below /dev"),
        ("/a\0b", "is not a path"),
        ("/etc", "is a directory on this machine"),
        ("/etc/passwd/x", "is not a directory on this machine"),
    ],
)
def test_a_path_that_can_not_be_is_refused_in_words(tmp_path, path, words):
    assert words in problem(tmp_path, path)


def test_all_problems_are_told_at_once(tmp_path):
    said = problem(tmp_path, "x", "/proc/y", "/a/b", "/a/b")

    assert said.startswith("3 files can't be placed")
    assert "`x` is not absolute" in said
    assert "`/a/b` is placed twice" in said


@pytest.mark.parametrize(
    ("target", "paths", "words"),
    [("/proc", ["link/x"], "lies below /proc"), (".", ["x", "link/x"], "is placed twice")],
    ids=["a path below /proc", "the same file twice"],
)
def test_what_is_refused_is_so_behind_a_symlink_too(tmp_path, target, paths, words):
    (tmp_path / "link").symlink_to(target)

    assert words in problem(tmp_path, *(tmp_path / path for path in paths))


@pytest.mark.parametrize("order", [1, -1])
def test_a_file_that_is_the_parent_of_another_is_refused(tmp_path, order):
    said = problem(tmp_path, *["/none/a", "/none/a/b"][::order])

    assert "`/none/a" in said
    assert "a file" in said


def test_a_new_file_in_the_run_directory_is_refused(tmp_path):
    said = problem(tmp_path, tmp_path / "x", shared=[str(tmp_path)])

    assert "lies in the run directory" in said


def test_a_working_directory_that_nobody_makes_is_refused(tmp_path):
    assert "does not exist" in problem(tmp_path, working_dir="/muster-none")
    assert plan(tmp_path, "/muster-none/x", working_dir="/muster-none").working_dir


def test_a_host_path_is_where_the_task_writes_or_the_path_itself(tmp_path):
    there = tmp_path / "there"
    (there / "sub").mkdir(parents=True)
    (there / "link").symlink_to("made")

    made = plan(tmp_path, there / "made" / "x")
    (mirror,) = made.mirrors

    assert made.host_path(f"{there}/made/x") == f"{mirror.folder}/made/x"
    assert made.host_path(f"{there}/later/y") == f"{mirror.folder}/later/y"
    assert made.host_path(f"{there}/link/y") == f"{mirror.folder}/made/y"
    assert made.host_path(f"{there}/sub/y") == f"{there}/sub/y"
    assert made.host_path("/etc/passwd") == "/etc/passwd"
    assert made.host_path(str(there)) == mirror.folder


def test_symlinks_in_a_circle_do_not_hang_the_lookup(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "a").symlink_to("b")
    (there / "b").symlink_to("a")

    assert plan(tmp_path, there / "x").host_path(f"{there}/a").startswith(str(there))


def test_a_large_tmp_keeps_what_is_needed_and_says_so(tmp_path):
    tmp = tmp_path / "tmp"
    for name in ["needed", *(f"n{number}" for number in range(20))]:
        (tmp / name).mkdir(parents=True)

    options = {"private_tmp": True, "tmp": str(tmp), "max_tmp_entries": 5}
    made = plan(tmp_path, keep=[str(tmp / "needed" / "deep")], **options)

    assert len(made.mirrors[0].dirs) == 5
    assert "needed" in made.mirrors[0].dirs
    assert made.notes[0].startswith(f"{tmp} has 21 entries: the task sees 5")


def test_a_large_tmp_keeps_the_symlink_on_the_way_to_what_is_needed(tmp_path):
    tmp = tmp_path / "tmp"
    for name in ["real", *(f"n{number}" for number in range(20))]:
        (tmp / name).mkdir(parents=True)
    (tmp / "link").symlink_to("real")

    options = {"private_tmp": True, "tmp": str(tmp), "max_tmp_entries": 2}
    (mirror,) = plan(tmp_path, keep=[str(tmp / "link")], **options).mirrors

    assert (mirror.dirs, mirror.links) == (("real",), {"link": "real"})


def test_tmp_that_is_the_run_directory_stays_shared_and_a_line_says_so(tmp_path):
    made = plan(tmp_path, private_tmp=True, tmp=str(tmp_path), shared=[str(tmp_path)])

    assert made.mirrors == ()
    assert "is shared by all tasks" in made.notes[0]


def test_the_files_are_written_with_their_modes_and_the_spec_is_private(tmp_path):
    (tmp_path / "there").mkdir(mode=0o750)
    made = plan(tmp_path, tmp_path / "there/x", mode=0o755)

    spec = write_view(made)

    assert stat.S_IMODE(os.stat(spec).st_mode) == 0o600
    written = made.host_path(f"{tmp_path}/there/x")
    assert stat.S_IMODE(os.stat(written).st_mode) == 0o755
    assert stat.S_IMODE(os.stat(os.path.dirname(written)).st_mode) == 0o750
    assert stat.S_IMODE(os.stat(made.folder).st_mode) == 0o700


def test_a_folder_serves_one_start(tmp_path):
    made = plan(tmp_path, tmp_path / "x")
    write_view(made)

    with pytest.raises(MusterError, match="can't be written"):
        write_view(made)


def launch(spec_path):
    return ran(view_argv(str(spec_path), ["true"]), LIMIT_S)


def test_a_view_that_can_not_be_built_ends_with_125_and_a_sentence(tmp_path):
    spec = tmp_path / "spec.json"
    cover = {"from": "/muster-none", "at": "/etc/passwd"}
    spec.write_text(json.dumps({"view": False, "working_dir": "/muster-none", "covers": [cover]}))

    ended = launch(spec)

    assert ended.returncode == 125
    assert ended.stderr.startswith("muster: entering the working directory failed: No such file")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_spec_that_is_none_ends_with_125_and_a_sentence(tmp_path, text):
    (tmp_path / "spec.json").write_text(text)

    ended = launch(tmp_path / "spec.json")

    assert ended.returncode == 125
    assert "spec.json" in ended.stderr


def test_a_spec_behind_a_symlink_is_not_read(tmp_path):
    (tmp_path / "spec.json").write_text('{"working_dir": "/"}')
    (tmp_path / "link.json").symlink_to("spec.json")

    assert launch(tmp_path / "spec.json").returncode == 0
    assert launch(tmp_path / "link.json").returncode == 125


def test_the_environment_is_passed_on_as_it_came(tmp_path):
    (tmp_path / "spec.json").write_text('{"working_dir": "/", "environment": {"B": "2"}}')
    argv = view_argv(str(tmp_path / "spec.json"), ["env"])

    ended = ran(argv, env={"A": "1", "PATH": os.environ["PATH"]})

    lines = set(ended.stdout.splitlines())
    assert lines == {"A=1", "B=2", f"PATH={os.environ['PATH']}"}


def test_a_command_is_found_past_files_that_are_not_executable(tmp_path):
    for name, mode in (("one", 0o644), ("two", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tool").touch(mode=mode)

    found = namespaces.find_command("tool", f"{tmp_path}/one:{tmp_path}/two")

    assert found == f"{tmp_path}/two/tool"
