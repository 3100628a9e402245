"""Reports of crashes in native code, as each program draws them: the library, the function and the line are named."""

import pytest

from unit.diagnose.explain.logs import explain

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


@pytest.mark.parametrize(
    ("log", "named", "advice"),
    [
        (
            UCX.format(frame="/home/u/ops/libfused.so(gather_rows+0x1b)"),
            "in gather_rows of libfused.so",
            "libfused.so",
        ),
        (
            UCX.format(frame="/opt/ucx/lib/libucp.so.0(ucp_worker_progress+0xd)"),
            "in ucp_worker_progress of libucp.so.0",
            "UCX_TLS",
        ),
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
    log = (
        "Traceback (most recent call last):\n"
        '  File "/home/u/serve.py", line 5, in <module>\n'
        "    ray.get(answer)\n"
        "ray.exceptions.WorkerCrashedError: The worker died unexpectedly while executing this task.\n"
    )
    first = explain(tmp_path, job=log + ABSEIL).first
    assert first.cause == "segfault"


def test_lines_that_look_like_frames_are_no_traceback_that_was_cut(tmp_path):
    assert "ends before its message" not in explain(tmp_path, job=FAULTHANDLER).first.error


def test_an_assertion_of_native_code_is_named_with_its_check(tmp_path):
    log = "python: heads.c:9: check_heads: Assertion `n % 8 == 0' failed.\nAborted (core dumped)\n"
    first = explain(tmp_path, job=log).first
    assert first.cause == "aborted"
    assert "n % 8 == 0" in first.error
