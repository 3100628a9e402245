"""Logs as other people's programs write them: made anew after each class of miss that blind rounds have shown.

Nothing here is copied: names, times, order and noise are ours, the forms are those that were misread.
"""

import pytest

from torchmuster.diagnose.explain.own_run import sentence_with_doubt
from unit.diagnose.explain.logs import explain, traceback_of

WRAPPED = """\
Traceback (most recent call last):
  File "/data/projects/vision/tools/fit_detector.py", line 114, in <module>
    main()
  File "/data/projects/vision/tools/../detect/engine/runner.py", line
57, in main
    model = build(cfg)
  File "/data/projects/vision/tools/../detect/modeling/heads/roi_align
.py", line 31, in build
    path = os.fspath(cfg.weights)
TypeError: expected str, bytes or os.PathLike object, not NoneType
"""
FLAT = """\
Traceback (most recent call last):
File "fit.py", line 12, in <module>
main()
File "fit.py", line 9, in main
labels = labels.view(8, -1)
RuntimeError: shape '[8, -1]' is invalid for input of size 30
"""
MOVED = """\
(Actor pid=811) starting
    Traceback (most recent call last):
      File "serve.py", line 40, in start
        torch.cuda.init()
      File "/opt/env/lib/python3.11/site-packages/torch/cuda/__init__.py", line 319, in _lazy_init
        torch._C._cuda_init()
    RuntimeError: No CUDA GPUs are available
"""
THROWN = """\
terminate called after throwing an instance of 'std::runtime_error'
  what():  CUDA error: an illegal memory access was encountered
"""
INTERRUPTED = """\
  File "/opt/env/lib/python3.10/site-packages/torch/distributed/elastic/multiprocessing/api.py", line 62, in _terminate
    raise SignalException(f"Process {os.getpid()} got signal: {sigval}", sigval=sigval)
torch.distributed.elastic.multiprocessing.api.SignalException: Process 4410 got signal: 2
"""
CUT = "epoch 0 step 3 loss 2.1\n" + traceback_of("X", code="loss.backward()").removesuffix("X\n")
BUS_ERROR = """\
Fatal Python error: Bus error

Thread 0x00007f11 (most recent call first):
  File "/opt/env/lib/python3.11/site-packages/safetensors/torch.py", line 311 in load_file
Traceback (most recent call last):
  File "/home/u/serve.py", line 20, in <module>
    answer = pipe.recv()
  File "/opt/env/lib/python3.11/multiprocessing/connection.py", line 250, in recv
    buf = self._recv_bytes()
EOFError
"""
UNREACHABLE = """\
[W socket.cpp:558] [c10d] The client socket has failed to connect to ?UNKNOWN? (errno: 101 - Network is unreachable).
[E socket.cpp:610] [c10d] The client socket has failed to connect to any network address of (10.77.3.4, 29511).
Traceback (most recent call last):
  File "/opt/env/lib/python3.10/site-packages/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py", line 155, in _create_tcp_store
    store = TCPStore(
RuntimeError: The client socket has failed to connect to any network address of (10.77.3.4, 29511). The client socket has failed to connect to ?UNKNOWN? (errno: 101 - Network is unreachable).
"""
LOST_LINE = (
    traceback_of("TypeError: unsupported operand type(s) for -: 'int' and 'NoneType'")
    + "./pretrain.sh: 9: --weight_decay: not found\n"
)
BROKEN_NODE = """\
slurmstepd: error: Munge encode failed: Failed to access "/var/run/munge/munge.socket.2": Input/output error
/scratch/u/copy.sh: line 12: /bin/mv: Input/output error
/scratch/u/copy.sh: line 19: /bin/rm: Input/output error
"""
KILLED_CHILD = """\
step 10 loss 1.9
step 11 loss 1.8
Traceback (most recent call last):
  File "/opt/env/lib/python3.8/site-packages/torch/distributed/launch.py", line 263, in <module>
    main()
  File "/opt/env/lib/python3.8/site-packages/torch/distributed/launch.py", line 256, in main
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['python', '-u', 'fit.py']' died with <Signals.SIGKILL: 9>.
"""
NUMPY_2 = traceback_of("ModuleNotFoundError: No module named 'numpy._core.numeric'")
NO_DRIVER = traceback_of(
    "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"
)
ENGINE = traceback_of(
    "OSError: [Errno 95] Operation not supported: 'ipc:///tmp/9f'",
    file="/opt/env/lib/python3.12/site-packages/engine/ipc.py",
    function="bind",
) + traceback_of(
    "RuntimeError: Engine process failed to start. See stack trace for the root cause."
)


@pytest.mark.parametrize(
    ("log", "cause", "words"),
    [
        (WRAPPED, "exception", "expected str, bytes or os.PathLike"),
        (FLAT, "shapes-differ", "shape '[8, -1]'"),
        (MOVED, "no-gpu", "GPU"),
        (THROWN, "cuda-error", "illegal memory access"),
        (INTERRUPTED, "cancelled", "SIGINT"),
        (CUT, "exception", "the log ends before its message"),
        (BUS_ERROR, "bus-error", "SIGBUS"),
        (UNREACHABLE, "no-route", "10.77.3.4:29511"),
        (LOST_LINE, "exception", "unsupported operand"),
        (BROKEN_NODE, "disk-error", "2 programs"),
        (KILLED_CHILD, "killed", "SIGKILL"),
        (NUMPY_2, "versions-differ", "numpy 2"),
        (NO_DRIVER, "no-gpu", "driver"),
    ],
)
def test_the_cause_is_found_in_the_form_in_which_it_was_misread(tmp_path, log, cause, words):
    first = explain(tmp_path, job=log).first
    assert first is not None
    assert first.cause == cause
    assert words in first.error


def test_an_exception_that_points_at_another_one_is_not_the_cause(tmp_path):
    assert "Operation not supported" in explain(tmp_path, job=ENGINE).first.evidence[0].text


@pytest.mark.parametrize(
    "log",
    [
        # A command that somebody typed at the prompt of the terminal, after the run.
        "AP 0.41\nresults written\n(env) u@box:~/work$ capture-pane -S -9000\n-bash: capture-pane: command not found\n",
        # A store that is closed in good order says so at the level of information.
        "[I1121 19:59:29.91 TCPStoreLibUvBackend.cpp:1354] [c10d] uv_loop_close failed with:-16 errn:EBUSY desc:resource busy or locked\ntraining finished\n",
        # Tried again, and then it worked.
        (
            "2026-01-02 10:00:00,000 - tracker - INFO - Traceback (most recent call last):\n"
            '2026-01-02 10:00:00,000 - tracker - INFO -   File "/v/tracker.py", line 3, in send\n'
            "2026-01-02 10:00:00,000 - tracker - INFO -     post()\n"
            "2026-01-02 10:00:00,000 - tracker - INFO - OSError: timed out\n"
            "step 1 loss 2.0\nstep 2 loss 1.9\nstep 3 loss 1.8\nstep 4 loss 1.7\ntraining finished\n"
        ),
        # Pods that wait until they are admitted.
        (
            "Normal  Pending   kueue-admission  couldn't assign flavors to pod set main: insufficient unused quota for cpu\n"
            "Normal  Admitted  kueue-admission  Admitted by ClusterQueue main, wait time since reservation was 0s\n"
        ),
    ],
)
def test_what_frightens_but_ends_nothing_accuses_nobody(tmp_path, log):
    verdict = explain(tmp_path, job=log)
    assert verdict.first is None or verdict.first.confidence.value == "low"


@pytest.mark.parametrize(
    "log", [CUT, KILLED_CHILD, INTERRUPTED, "Process 0 exit with status code 137.\n"]
)
def test_a_failed_run_is_not_called_healthy(tmp_path, log):
    assert not explain(tmp_path, job=log).healthy


def test_a_port_that_is_taken_while_others_are_waited_for_may_be_a_second_rank_0(tmp_path):
    text = (
        "[W socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).\n"
        "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.\n"
    )
    first = explain(tmp_path, job=text).first
    assert first.cause == "port-taken"
    assert first.confidence.value == "medium"
    assert "duplicate-rank" in first.rivals


def test_a_file_s_name_is_no_host(tmp_path):
    name = "run-017-my-first-try"
    assert name not in explain(tmp_path, **{name: KILLED_CHILD}).first.error


COPY_WITHOUT_ROOM = """\
Traceback (most recent call last):
  File "/home/mira/fit.py", line 71, in <module>
    publish(path)
  File "/home/mira/fit.py", line 40, in publish
    shutil.copy(path, target)
  File "/opt/env/lib/python3.11/shutil.py", line 258, in copyfile
    _fastcopy_sendfile(fsrc, fdst)
OSError: [Errno 28] No space left on device: '/data/runs/7/weights.pt' -> '/var/spool/share/outbox/weights.pt'
"""
FULL_AT_FIRST_LOAD = """\
reading 40 files
Traceback (most recent call last):
  File "/home/mira/fit.py", line 31, in <module>
    net = net.to("cuda")
  File "/opt/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1173, in to
    return self._apply(convert)
  File "/opt/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1159, in convert
    return t.to(
RuntimeError: CUDA error: out of memory
"""
FULL_BEFORE_ENGINE = (
    "ValueError: Free memory on device (9.5/47.4 GiB) on startup is less than desired GPU memory"
    " utilization (0.9, 42.7 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n"
)
MAPPED_ADDRESS = (
    "[W socket.cpp:697] [c10d] The client socket has failed to connect to [::ffff:10.66.2.9]:29511"
    " (errno: 113 - No route to host).\n"
)
RAY_ONE_WORKER = """\
Traceback (most recent call last):
  File "/home/mira/tune.py", line 12, in <module>
    ray.get(task)
ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.
Memory on the node (IP: 10.66.2.9, ID: 9f) where the task (task ID: 1e, name=Worker.load, pid=70, memory used=90.10GB) was running was 120.50GB / 125.00GB (0.964), which exceeds the memory usage threshold of 0.95.
"""
LAUNCH_TIMEOUT = """\
NVRM: Xid (PCI:0000:41:00): 8, pid=990, name=python3, channel 0x0000000a
"""


@pytest.mark.parametrize(
    ("log", "cause", "said", "not_said"),
    [
        (COPY_WITHOUT_ROOM, "disk-full", "df -h /var/spool/share/outbox;", "/data/runs"),
        (FULL_AT_FIRST_LOAD, "cuda-out-of-memory", "nothing was loaded", "checkpointing"),
        (FULL_BEFORE_ENGINE, "gpu-memory-taken", "9.5 of the 47.4 GiB", "max-model-len"),
        (MAPPED_ADDRESS, "no-route", "nc -vz 10.66.2.9 29511", "ffff"),
        (RAY_ONE_WORKER, "out-of-memory", "90.10 of the 125.00 GB", "raise RAY_memory"),
        (LAUNCH_TIMEOUT, "cuda-error", "drives no display", "exclude the node"),
    ],
)
def test_the_advice_is_for_what_the_log_shows(tmp_path, log, cause, said, not_said):
    first = explain(tmp_path, job=log).first
    words = f"{first.error} {first.hint} {first.confirm}"
    assert first.cause == cause
    assert said in words
    assert not_said not in words


@pytest.mark.parametrize(
    ("said", "package"),
    [
        ("C++ compiler. Please specify via CXX variable.", "g++ in"),
        ("C compiler. Please specify via CC variable.", "gcc in"),
    ],
)
def test_the_package_of_the_compiler_that_is_missing_is_named(tmp_path, said, package):
    first = explain(tmp_path, job=f"RuntimeError: Failed to find {said}\n").first
    assert first.cause == "no-compiler"
    assert f"install {package}" in first.hint


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("IsADirectoryError: [Errno 21] Is a directory: '/data/conf'", "a folder is given"),
        ("FileNotFoundError: [Errno 2] No such file or directory: ''", "an empty text"),
    ],
)
def test_a_path_that_names_no_file_points_at_the_line_that_opens_it(tmp_path, message, said):
    text = traceback_of(message, function="load", code="with open(args.config) as file:")
    first = explain(tmp_path, job=text).first
    assert first.cause == "bad-setting"
    assert said in first.error
    assert "train.py:9, `with open(args.config) as file:`" in first.hint


@pytest.mark.parametrize("load", ["net(batch)", "loss.backward()"])
def test_memory_that_runs_out_later_is_not_called_full_from_the_start(tmp_path, load):
    text = FULL_AT_FIRST_LOAD.replace("reading 40 files", "step 300 loss 1.2")
    assert "nothing was loaded" not in explain(tmp_path, job=text).first.error
    text = traceback_of("RuntimeError: CUDA error: out of memory", code=load)
    assert "nothing was loaded" not in explain(tmp_path, job=text).first.error


PROFILED = """\
INFO 03-02 07:10:01 [worker.py:88] memory without CUDA graphs is counted; to turn this off, run without GPU memory profiling
INFO 03-02 07:10:04 [server.py:31] ready
"""
WARNED = "node7:81:92 [0] set_option:41 NCCL WARN NET/OFI Could not find {what} symbol\n"
OWN_LINES = "".join(f"sample of shard {name} has 8 rows\n" for name in "abcdefghijklmn")


@pytest.mark.parametrize(
    "after",
    [
        "",
        "node7:81:92 [0] NCCL INFO init.cc:310 -> 3\n" * 20,
        OWN_LINES + "fit.py: error: the group could not be made\n",
        OWN_LINES + "RuntimeError: the group is broken\n",
    ],
)
def test_a_warning_of_nccl_is_shown_as_a_doubt_where_no_work_goes_on(tmp_path, after):
    verdict = explain(tmp_path, job=WARNED.format(what="fooGetTable") + after)
    doubts = [one for one in verdict.found if one.cause == "nccl-warning"]
    assert [sentence_with_doubt(one).startswith("possible cause: ") for one in doubts] == [True]


SCHEDULED = """\
Warning  FailedScheduling  9m  default-scheduler  0/5 nodes are available: 5 Insufficient nvidia.com/gpu.
Normal   Scheduled         7m  default-scheduler  Successfully assigned ml/fit-worker-0 to node-3.example.com
Normal   Started           7m  kubelet            Started container trainer
"""


@pytest.mark.parametrize(
    "log",
    [PROFILED, WARNED.format(what="fooGetTable") + OWN_LINES, SCHEDULED],
    ids=[
        "a notice of how memory is counted",
        "a warning of NCCL after which the program works",
        "a pod that was scheduled at last",
    ],
)
def test_what_sounds_like_a_lack_and_is_none_is_no_failure(tmp_path, log):
    assert explain(tmp_path, job=log).first is None


def test_a_pod_still_waits_when_another_one_is_scheduled(tmp_path):
    log = SCHEDULED.replace("FailedScheduling  9m", "FailedScheduling  pod/fit-worker-1")
    assert explain(tmp_path, job=log).first.cause == "no-capacity"


@pytest.mark.parametrize(("wrong", "outcome"), [("0 OK", "ended well"), ("3 FAILED", "failed")])
def test_the_sum_of_nccl_tests_tells_how_the_benchmark_ended(tmp_path, wrong, outcome):
    rows = "     4194304       1048576     float     sum      -1    90.1   46.5   87.2      0\n" * 4
    log = f"{rows}# Out of bounds values : {wrong}\n# Avg bus bandwidth    : 87.2 \n#\n"
    assert explain(tmp_path, job=log).outcome.value == outcome


TIMED_OUT = (
    "[rank1]:[E ProcessGroupNCCL.cpp:523] [Rank 1] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=88, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=600000) ran for 600101 milliseconds before timing out.\n"
)
PRESSED = traceback_of("KeyboardInterrupt", code="batch = queue.get()")
LABELLED = "10.9.8.7: [rank5]: FileNotFoundError: [Errno 2] No such file or directory: '/data/mira/cache/7_doc.npy'\n"


@pytest.mark.parametrize(("log", "cause"), [(PRESSED, "cancelled"), (LABELLED, "file-missing")])
def test_what_ended_one_rank_comes_before_the_timeout_of_the_others(tmp_path, log, cause):
    assert explain(tmp_path, job=f"step 4 loss 2.0\n{log}{TIMED_OUT}").first.cause == cause


def test_what_steps_went_on_after_is_not_what_a_timeout_waited_for(tmp_path):
    log = f"{LABELLED}step 4 loss 2.0\nstep 5 loss 1.9\nstep 6 loss 1.9\n{TIMED_OUT}"
    assert explain(tmp_path, job=log).first.cause == "rank-missing-in-collective"


CANCELLED = "slurmstepd: error: *** JOB 4410 ON n7 CANCELLED AT 2026-02-03T10:11:12 ***\n"
TIME_LIMIT = CANCELLED.replace(" ***\n", " DUE TO TIME LIMIT ***\n")
PUT_AWAY = (
    "(raylet) A worker died or was killed while executing a task by an unexpected system error. Worker exit type: SYSTEM_ERROR"
    " Worker exit detail: SystemExit is raised. Exit code: 1. The process receives a SIGTERM.\n"
)


@pytest.mark.parametrize(
    "log",
    [
        f"step 9 loss 1.0\nTraining finished in 80 s\n{CANCELLED}",
        f"step 9 loss 1.0\nFinal test metrics: 'acc': 0.5\n{PUT_AWAY}",
    ],
)
def test_a_job_that_is_put_away_after_its_work_ended_well(tmp_path, log):
    verdict = explain(tmp_path, job=log)
    assert verdict.healthy
    assert any(note.startswith("after its end: ") for note in verdict.notes)


@pytest.mark.parametrize(
    "log",
    [
        f"step 9 loss 1.0\n{CANCELLED}",
        f"Training finished in 80 s\nstep 9 loss 1.0\n{CANCELLED}",
        f"step 9 loss 1.0\nTraining finished in 80 s\n{TIME_LIMIT}",
        f"step 9 loss 1.0\nTraining finished in 80 s\n{LABELLED}{CANCELLED}",
    ],
)
def test_a_job_that_is_ended_before_its_work_did_not_end_well(tmp_path, log):
    assert not explain(tmp_path, job=log).healthy


FRAMES = """\
Traceback (most recent call last):
  File "/home/u/tune.py", line 61, in <module>
    main()
  File "/home/u/tune.py", line 40, in main
"""


def test_an_assertion_without_a_message_takes_none_from_the_next_line(tmp_path):
    log = f"{FRAMES}    assert batch.has_labels\nAssertionError\nWarning: no tracker was closed\n"
    error = explain(tmp_path, job=log).first.error
    assert "assert batch.has_labels" in error
    assert "tracker" not in error


@pytest.mark.parametrize(
    "footer",
    [
        "\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.\n",
        "The flag --old-log is deprecated. Use the --new-log flag to choose where to write.\n",
        "   On Windows, ensure you've installed the\n   shared build of it.\n",
    ],
)
def test_a_footer_is_no_advice(tmp_path, footer):
    log = f"{FRAMES}    start()\nValueError: wanted 4 lanes, but got 3\n{footer}"
    assert "do what the message says" not in explain(tmp_path, job=log).first.hint


def test_advice_of_a_message_is_a_whole_sentence(tmp_path):
    log = f"{FRAMES}    start()\nValueError: 3 lanes are odd. Set lanes to\n  an even number.\n"
    assert "Set lanes to an even number" in explain(tmp_path, job=log).first.hint


def test_the_sentence_after_an_attempt_that_failed_is_the_cause(tmp_path):
    code = "/opt/env/lib/python3.12/site-packages/plans/load.py"
    log = (
        traceback_of("zlib.error: wrong header\n", file=code, function="__init__")
        + "During handling of the above exception, another exception occurred:\n\n"
        f'{FRAMES}    Plan(name)\n  File "{code}", line 12, in __init__\n    raise ValueError(\n'
        "ValueError: a plan is a file or packed text, and this is neither: ../plans/two.json\n"
    )
    assert "../plans/two.json" in explain(tmp_path, job=log).first.error


def test_a_server_that_did_not_come_up_has_a_log_of_its_own(tmp_path):
    log = f'{FRAMES}    raise RuntimeError("server launch failed")\nRuntimeError: server launch failed\n'
    hint = explain(tmp_path, job=log).first.hint
    assert "that server's own log" in hint
    assert "no library is involved" not in hint


def test_an_abort_of_mpi_that_says_completed_successfully_is_no_success(tmp_path):
    log = (
        "*** An error occurred in MPI_Init\n*** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort)\n"
        "[host1:71142] Local abort before MPI_INIT completed completed successfully, but am not able to aggregate error"
        " messages, and not able to guarantee that all other processes were killed!\n"
    )
    assert not explain(tmp_path, job=log).healthy
