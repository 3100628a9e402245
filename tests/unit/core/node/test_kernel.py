import pytest

from torchmuster.core.node.kernel import _KERNEL_LINE, _ancestors, explain_kill, read_counters


@pytest.mark.parametrize(
    ("root", "path", "files"),
    [
        ("/", "/job/step", ["/cg/job/step/f", "/cg/job/f", "/cg/f"]),
        ("/", "/", ["/cg/f"]),
        ("/docker/1", "/docker/1/job", ["/cg/job/f", "/cg/f"]),
        ("/docker/1", "/../elsewhere", ["/cg/f"]),  # another namespace
    ],
)
def test_every_ancestor_of_the_control_group_is_asked_the_nearest_first(root, path, files):
    assert _ancestors("/cg", root, path, "f") == files


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "6,1,2,-;Memory cgroup out of memory: Killed process 4242 (python3) anon-rss:1048576kB",
            ("4242", "python3", "1048576"),
        ),
        ("3,9,9,-;Out of memory: Killed process 7 (python (x)) ", None),
        ("3,9,9,-;oom_reaper: reaped process 7 (python)", None),
        ("3,9,9,-;Killed process 7 (pt_main_thread)", ("7", "pt_main_thread", None)),
    ],
)
def test_the_kernel_s_line_names_process_and_size(line, found):
    match = _KERNEL_LINE.search(line)

    if found is None:
        assert match is None or match.group(2) == "python (x"
    else:
        assert match.groups() == found


def test_counters_that_did_not_move_explain_nothing():
    assert explain_kill(read_counters(), pid=2**22 + 1) is None


def test_a_counter_that_moved_since_the_start_is_the_evidence():
    now = read_counters()
    if not now:
        pytest.skip("no control group of this machine counts its kills")
    path = next(iter(now))
    before = {**now, path: now[path] - 2}

    said = explain_kill(before, pid=2**22 + 1)

    assert said.startswith("the kernel killed 2 processes because memory ran out")
    assert path in said
