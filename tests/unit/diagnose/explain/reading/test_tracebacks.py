"""Tracebacks as logs have them: raised from each other, wrapped, cut at either end, drawn in another way."""

import pytest

from unit.diagnose.explain.logs import cause_of, events_of, explain, traceback_of

PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.7.7.2]:197."
FAILED = (
    "E0314 09:00:00.000000 9 torch/distributed/elastic/multiprocessing/api.py:1] failed (exitcode: {code})"
    " local_rank: 0 (pid: 9) of binary: python\n"
)
DIRECT = "The above exception was the direct cause of the following exception:"
HANDLING = "During handling of the above exception, another exception occurred:"
MISSING = "FileNotFoundError: [Errno 2] No such file or directory: '/d/x'"


def raised(error, *, rank=None, function="main", code="step()", file="/home/u/t.py"):
    mark = f"[rank{rank}]: " if rank is not None else ""
    rows = (
        "Traceback (most recent call last):",
        f'  File "{file}", line 3, in {function}',
        f"    {code}",
        error,
    )
    return "".join(f"{mark}{row}\n" for row in rows)


def chain(first, between, last, *, rank=0, code="raise Wrapped()", function="inner"):
    mark = f"[rank{rank}]: "
    beneath = raised(first, rank=rank, function="inner")
    return f"{beneath}\n{mark}{between}\n\n{raised(last, rank=rank, function=function, code=code)}"


@pytest.mark.parametrize(
    ("first", "cause"),
    [
        (MISSING, "file-missing"),
        ("PermissionError: [Errno 13] Permission denied: '/d/x'", "permission"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            "cuda-out-of-memory",
        ),
        ("MemoryError: no room", "memory"),
        ("KeyError: 'lr'", "exception"),
        (PEER, "peer-lost"),
    ],
)
@pytest.mark.parametrize("between", [DIRECT, HANDLING])
@pytest.mark.parametrize("before", ["", "0: ", "n1-a: ", "Mar  3 12:00:00 ", "[default0]:"])
def test_exception_that_only_hands_on_another_means_what_that_one_does(
    tmp_path, first, cause, between, before
):
    text = chain(first, between, "TrainerError: fit failed on rank 0")
    lines = "".join(f"{before}{line}\n" for line in text.splitlines())
    assert cause_of(tmp_path, job=lines) == cause


def test_exception_around_another_is_the_cause_when_it_is_of_its_own_making(tmp_path):
    text = chain("KeyError: 'lr'", HANDLING, "ConfigError: 7", code="read()", function="read")
    assert "ConfigError: 7" in explain(tmp_path, job=text).first.error


def test_lost_server_of_a_library_is_no_lost_rank_though_it_is_handed_on(tmp_path):
    library = "/v/lib/python3.11/site-packages/redis/connection.py"
    first = raised("ConnectionResetError: [Errno 104] Connection reset by peer", file=library)
    last = raised("redis.exceptions.ConnectionError: reset", function="<module>", file=library)
    assert cause_of(tmp_path, job=f"{first}\n{DIRECT}\n\n{last}") == "exception"


def test_download_beneath_other_exceptions_is_no_name_of_the_job(tmp_path):
    library = "/v/lib/python3.11/site-packages/urllib3/connection.py"
    parts = [
        raised("socket.gaierror: [Errno -2] Name or service not known", file=library),
        raised("urllib3.exceptions.MaxRetryError: HTTPSConnectionPool", file=library),
        raised("OSError: We couldn't connect to the hub", function="<module>"),
    ]
    assert cause_of(tmp_path, job=f"\n{DIRECT}\n\n".join(parts)) == "download-failed"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("RuntimeError: [enforce fail at x.cc:747] . open file failed with strerror: Permission denied", "permission"),
        ("safetensors_rust.SafetensorError: I/O error: Permission denied (os error 13)", "permission"),
        ("OSError: Unable to open file (name = '/d/x.h5', errno = 2, error message = 'x')", "file-missing"),
        ("RuntimeError: Parent directory /d/y does not exist.", "file-missing"),
        ("FileNotFoundError: /d/x.csv", "file-missing"),
        ("RuntimeError: cannot save: Read-only file system", "read-only"),
    ],
)  # fmt: skip
def test_error_of_a_file_is_told_by_the_end_of_any_message(tmp_path, error, cause):
    assert cause_of(tmp_path, job=traceback_of(error, rank=0)) == cause


def test_connection_refused_at_the_end_of_a_message_is_no_error_of_a_file(tmp_path):
    assert (
        cause_of(tmp_path, job=traceback_of("FooError: to n1: Permission granted")) == "exception"
    )


def test_syntax_error_needs_no_traceback_line(tmp_path):
    text = '  File "/home/u/train.py", line 35\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
    (event,) = events_of(tmp_path, text)
    assert event.kind == "exception"
    assert event.get("where") == "/home/u/train.py:35"


def test_stacks_that_are_shown_are_no_exceptions(tmp_path):
    text = (
        'Thread 0x07 (most recent call first):\n  File "/home/u/t.py", line 3 in main\nloss: 0.5\n'
    )
    assert not [event for event in events_of(tmp_path, text) if event.kind == "exception"]


@pytest.mark.parametrize(
    "drawn", ["    raise ValueError(x)\n", "╭──── Traceback ────╮\n│ ❱ 3 x() │\n╰───╯\n"]
)
def test_last_line_of_a_traceback_names_the_exception_where_its_frames_are_not_there(
    tmp_path, drawn
):
    verdict = explain(tmp_path, job=f"{drawn}ValueError: bad thing\n" + FAILED.format(code=1))
    assert verdict.first.cause == "exception"
    assert verdict.first.confidence.value != "high"


@pytest.mark.parametrize(
    ("how", "cause"), [("signal SIGSEGV", "segfault"), ("exit code 3", "exit-code")]
)
def test_end_of_a_spawned_process_is_told_by_its_parent_s_exception(tmp_path, how, cause):
    error = f"torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with {how}"
    assert cause_of(tmp_path, job=traceback_of(error)) == cause


def test_launcher_s_exception_on_its_child_is_not_the_cause(tmp_path):
    library = "/v/lib/python3.11/site-packages/accelerate/commands/launch.py"
    error = "subprocess.CalledProcessError: Command '['python', 't.py']' returned non-zero exit status 1."
    text = traceback_of(PEER, rank=0) + raised(error, function="<module>", file=library)
    assert cause_of(tmp_path, job=text) == "peer-lost"


STACKS = """
    3 ranks wait in all_reduce (hang.py:15); rank 3 {does}

    rank 0 on n1, rank 1 on n1, rank 2 on n1:
      Current thread  (most recent call first):
        File "/opt/torch/distributed_c10d.py", line 3252 in all_reduce
        File "/home/u/hang.py", line 15 in <module>

    rank 3 on n1:
      Current thread  (most recent call first):
        File "/home/u/hang.py", line 13 in <module>

"""


@pytest.mark.parametrize(
    ("does", "cause"),
    [
        ("waits in all_gather (hang.py:13)", "collectives-differ"),
        ("on n1 is in read() (data.py:8) for 9 s", "rank-missing-in-collective"),
        ("has words that nobody knows", "unknown"),
    ],
)
def test_dump_of_stacks_is_no_traceback(tmp_path, does, cause):
    assert cause_of(tmp_path, **{"stacks-0": STACKS.format(does=does)}) == cause
