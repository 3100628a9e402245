"""Tracebacks as logs have them: raised from each other, wrapped, cut at either end, drawn in another way."""

import pytest

from kit.tables import rows
from unit.diagnose.explain.logs import PEER, cause_of, events_of, explain, failed, traceback_of

DIRECT = "The above exception was the direct cause of the following exception:"
HANDLING = "During handling of the above exception, another exception occurred:"
MISSING = "FileNotFoundError: [Errno 2] No such file or directory: '/d/x'"
FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"


def chain(first, between, last, *, rank=None, function="main", code="raise Wrapped()"):
    """Return an exception of `main` and one after it, which a function that `main` calls has raised, or `main` itself."""
    mark = f"[rank{rank}]: " if rank is not None else ""
    beneath = traceback_of(first, rank=rank, function="main")
    above = traceback_of(last, rank=rank, function=function, code=code)
    if function != "main":
        above = above.replace(
            "last):\n", 'last):\n  File "/home/u/train.py", line 40, in main\n', 1
        )
    return f"{beneath}\n{mark}{between}\n\n{above}"


@pytest.mark.parametrize(
    ("first", "cause"),
    [
        (MISSING, "file-missing"),
        ("PermissionError: [Errno 13] Permission denied: '/d/x'", "permission"),
        (FULL, "cuda-out-of-memory"),
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
    text = chain(first, between, "TrainerError: fit failed on rank 0", rank=0)
    lines = "".join(f"{before}{line}\n" for line in text.splitlines())
    assert cause_of(tmp_path, job=lines) == cause


def test_lost_server_of_a_library_is_no_lost_rank_though_it_is_handed_on(tmp_path):
    library = "/v/lib/python3.11/site-packages/redis/connection.py"
    first = traceback_of("ConnectionResetError: [Errno 104] Connection reset by peer", file=library)
    last = traceback_of("redis.exceptions.ConnectionError: reset", file=library)
    assert cause_of(tmp_path, job=f"{first}\n{DIRECT}\n\n{last}") == "exception"


def test_download_beneath_other_exceptions_is_no_name_of_the_job(tmp_path):
    library = "/v/lib/python3.11/site-packages/urllib3/connection.py"
    parts = [
        traceback_of("socket.gaierror: [Errno -2] Name or service not known", file=library),
        traceback_of("urllib3.exceptions.MaxRetryError: HTTPSConnectionPool", file=library),
        traceback_of("OSError: We couldn't connect to the hub"),
    ]
    assert cause_of(tmp_path, job=f"\n{DIRECT}\n\n".join(parts)) == "download-failed"


def test_syntax_error_needs_no_traceback_line(tmp_path):
    text = '  File "/home/u/train.py", line 35\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
    (event,) = events_of(tmp_path, text)
    assert event.kind == "exception"
    assert event.get("where") == "/home/u/train.py:35"


def test_stacks_that_are_shown_are_no_exceptions(tmp_path):
    text = 'Thread 0x07 (most recent call first):\n  File "/home/u/t.py", line 3 in main\nloss: 1\n'
    assert not [event for event in events_of(tmp_path, text) if event.kind == "exception"]


@pytest.mark.parametrize(
    "drawn", ["    raise ValueError(x)\n", "╭──── Traceback ────╮\n│ ❱ 3 x() │\n╰───╯\n"]
)
def test_last_line_of_a_traceback_names_the_exception_where_its_frames_are_not_there(
    tmp_path, drawn
):
    verdict = explain(tmp_path, job=f"{drawn}ValueError: bad thing\n" + failed())
    assert verdict.first.cause == "exception"
    assert verdict.first.confidence.value != "high"


def test_launcher_s_exception_on_its_child_is_not_the_cause(tmp_path):
    library = "/v/lib/python3.11/site-packages/accelerate/commands/launch.py"
    error = "subprocess.CalledProcessError: Command '['python', 't.py']' returned non-zero exit status 1."
    text = traceback_of(PEER, rank=0) + traceback_of(error, file=library)
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


# Two exceptions in a chain: which one tells the cause. Each case was really made to fail once.


DURING = "During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize(
    ("told", "between", "function", "code", "first", "last"),
    rows(
        """
        # An envelope, raised from the cause.
        rate is -3         direct  main   raise                  ValueError: rate is -3  RuntimeError: worker failed
        'warmup'           direct  main   raise                  KeyError: 'warmup'  RuntimeError: no set-up
        # It names something itself, and beneath it is only a look-up.
        no decoder         direct  main   raise                  KeyError: 3  DecodeError: sample 3 of b.tar has no decoder for .webp
        # A look-up failed, and what the program did instead fails.
        ConfigError        during  main   read()                 KeyError: 'lr'  ConfigError: no learning rate
        3 rows             during  load   check(t)               KeyError: 'en'  ValueError: table en holds 3 rows
        unknown attention  during  slow   raise                  ModuleNotFoundError: No module named 'fast_attn'  ValueError: unknown attention 'fast'
        has no len         during  main   return len(x)          AttributeError: 'int' object has no attribute 'shape'  TypeError: object of type 'int' has no len()
        # The handler of a real failure breaks down itself.
        4x512              during  save   torch.save(self.modle)  RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x512 and 768x10)  AttributeError: 'Trainer' object has no attribute 'modle'
        # Cleaning up fails after it.
        index 11           during  close  raise                  IndexError: index 11 is out of bounds  ValueError: I/O operation on closed file.
        """,
        6,
    ),
)
def test_the_link_that_tells_the_cause_is_chosen(
    tmp_path, told, between, function, code, first, last
):
    between = {"direct": DIRECT, "during": HANDLING}[between]
    log = chain(first, between, last, function=function, code=code)
    assert told in explain(tmp_path, job=log).first.error


def test_a_traceback_within_a_message_tells_what_it_is(tmp_path):
    inner = traceback_of("IndexError: list index out of range", function="produce")
    outer = traceback_of("RuntimeError: prefetch thread died:", function="main")
    first = explain(tmp_path, job=outer + inner).first
    assert "list index out of range" in first.error


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("ValueError:\n\nThe layout is wrong:\n * hidden size 100 is not divisible", "hidden size"),
        ("ValidationError: 2 validation errors for Config\nrate\n  not a number", "not a number"),
        ("RuntimeError: micro batch 3 failed:\n  stage 1\n  no room on stage 1", "no room"),
    ],
)
def test_a_heading_is_shown_with_what_stands_below_it(tmp_path, message, told):
    assert told in explain(tmp_path, job=traceback_of(message)).first.error


def test_an_ending_that_another_rank_has_broken_is_put_together(tmp_path):
    start, frame = "Traceback (most recent call last):\n", '  File "/home/u/fit.py", line 7, in f\n'
    log = f"{start}{start}{frame}{frame}    KeyErrorreturn layers['mlp']\n: 'mlp'\n"
    first = explain(tmp_path, job=log).first
    assert "KeyError: 'mlp'" in first.error


# Reports of crashes in native code, as each program draws them: the library, the function and the line are named.


UCX = """\
step 4 loss 1.2
[cn7:811:0:811] Caught signal 11 (Segmentation fault: address not mapped to object at address 0xc)
==== backtrace (tid:    811) ====
 0  /opt/ucx/lib/libucs.so.0(ucs_handle_error+0x2dc) [0x7f55e1cbfe9c]
 1  /opt/ucx/lib/libucs.so.0(+0x2908c) [0x7f55e1cc008c]
 2  /lib/x86_64-linux-gnu/libc.so.6(+0x3c050) [0x7f7a6265a050]
 3  {frame} [0x7f55e2612164]
 4  /lib/x86_64-linux-gnu/libffi.so.8(+0x6f7a) [0x7f55e3e55f7a]
 5  /opt/py/lib/libpython3.11.so.1.0(_PyObject_MakeTpCall+0x7d) [0x7f55e455861d]
=================================
"""
WITH_SYMBOLS = """\
[cn7:811:0:811] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x18)
==== backtrace (tid:    811) ====
 0 0x0000000000012d20 __funlockfile()  :0
 1 0x000000000003c2d1 uct_rc_mlx5_iface_check_rx_completion()  ???:0
 2 0x0000000000036afc opal_progress()  ???:0
=================================
"""
OPEN_MPI = """\
iteration 3
[box:05706] *** Process received signal ***
[box:05706] Signal: Segmentation fault (11)
[box:05706] Signal code: Address not mapped (1)
[box:05706] [ 0] /lib/x86_64-linux-gnu/libc.so.6(+0x3c050)[0x7f83c345a050]
[box:05706] [ 1] /apps/openmpi/lib/libmpi.so.40(PMPI_Comm_size+0x32)[0x7f83c24e1184]
[box:05706] *** End of error message ***
"""
FAULTHANDLER = """\
step 0 loss 2.3
Fatal Python error: Segmentation fault

Thread 0x00007f7470fbeb80 (most recent call first):
  File "/home/u/feed.py", line 90 in wait

Current thread 0x00007f7470fbeb81 (most recent call first):
  File "/opt/env/lib/python3.11/site-packages/fastrope/ops.py", line 12 in rotate
  File "/home/u/fit.py", line 31 in forward
  File "/home/u/fit.py", line 44 in <module>
"""
ABSEIL = """\
*** SIGSEGV received at time=1795406576 on cpu 0 ***
PC: @     0x7fd32309c184  (unknown)  gather_rows
    @     0x7fd325a5a050  501696448  (unknown)
"""
KERNEL = """\
[E1121 16:31:26.306000 255 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -11) local_rank: 1 (pid: 259) of binary: python3
[ 2123.405069] python[259]: segfault at c ip 00007fa8f4442184 sp 00007ffead94d570 error 4 in libsplit.so[1184,7fa8f4442000+1000]
"""


OF_USER = UCX.format(frame="/home/u/ops/libfused.so(gather_rows+0x1b)")
OF_UCX = UCX.format(frame="/opt/ucx/lib/libucp.so.0(ucp_worker_progress+0xd)")


@pytest.mark.parametrize(
    ("log", "named", "advice"),
    [
        (OF_USER, "in gather_rows of libfused.so", "libfused.so"),
        (OF_UCX, "in ucp_worker_progress of libucp.so.0", "UCX_TLS"),
        (WITH_SYMBOLS, "in uct_rc_mlx5_iface_check_rx_completion", "UCX_TLS"),
        (OPEN_MPI, "in PMPI_Comm_size of libmpi.so.40", "mpi4py"),
        (FAULTHANDLER, "in rotate of fastrope, called at /home/u/fit.py:31", "rotate of fastrope"),
        (ABSEIL, "in gather_rows", "gather_rows"),
        (KERNEL, "in libsplit.so", "libsplit.so"),
    ],
)
def test_the_library_of_a_crash_is_named(tmp_path, log, named, advice):
    first = explain(tmp_path, job=log).first
    assert first.cause == "segfault"
    assert named in first.error
    assert advice in first.hint


def test_a_crash_that_ray_does_not_know_is_that_of_its_worker(tmp_path):
    error = (
        "ray.exceptions.WorkerCrashedError: The worker died unexpectedly while executing this task."
    )
    assert cause_of(tmp_path, job=traceback_of(error) + ABSEIL) == "segfault"


def test_lines_that_look_like_frames_are_no_traceback_that_was_cut(tmp_path):
    assert "ends before its message" not in explain(tmp_path, job=FAULTHANDLER).first.error


def test_an_assertion_of_native_code_is_named_with_its_check(tmp_path):
    log = "python: heads.c:9: check_heads: Assertion `n % 8 == 0' failed.\nAborted (core dumped)\n"
    first = explain(tmp_path, job=log).first
    assert first.cause == "aborted"
    assert "n % 8 == 0" in first.error
