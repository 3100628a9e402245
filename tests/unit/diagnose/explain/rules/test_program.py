"""Exceptions of any library: what each means, how surely, and what only stood beside it."""

import pytest

from kit.tables import rows
from unit.diagnose.explain.logs import cause_of, explain, steps, traceback_of

PLUGIN = "NCCL INFO NET/Plugin: dlerror=libnccl-net.so: cannot open shared object file: No such file or directory\n"
DRIVER = "libibverbs: Warning: couldn't load driver 'libefa.so': libefa.so: cannot open shared object file: No such file\n"
AUTOCAST = "a.py:1: UserWarning: User provided device_type of 'cuda', but CUDA is not available. Disabling\n"
LOOPBACK = "n1:123:124 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>\n"
COMPILED = "The installed version of bitsandbytes was compiled without GPU support.\n"
CONDA = "/var/spool/slurmd/job1/slurm_script: line 5: conda: command not found\n"
REMAPPED = "NVRM: Xid (PCI:0000:01:00): 63, Row Remapper: New row marked for remapping\n"


def loader_error(type_name, message):
    return (
        traceback_of(f"{type_name}: Caught {type_name} in DataLoader worker process 0.")
        + "Original Traceback (most recent call last):\n"
        + '  File "/v/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 1, in _worker_loop\n'
        + "    data = fetcher.fetch(index)\n"
        + '  File "/home/u/data.py", line 88, in __getitem__\n    return read(path)\n'
        + f"{type_name}: {message}\n"
    )


@pytest.mark.parametrize(
    ("cause", "error"),
    rows(
        """
        data-broken         json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
        checkpoint-broken   _pickle.UnpicklingError: pickle data was truncated
        shapes-differ       RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x10 and 20x5)
        exception           ValueError: time limit exceeded in config
        memory              MemoryError
        no-gpu              AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'
        builds-differ       RuntimeError: operator torchvision::nms does not exist
        no-process-group    ValueError: Default process group has not been initialized, please make sure to call init_process_group.
        no-launcher         KeyError: 'SLURM_PROCID'
        no-launcher         KeyError: 'OMPI_COMM_WORLD_RANK'
        exception           KeyError: 'model'
        memory              RuntimeError: unable to mmap 1024 bytes from file </torch_1_2>: Cannot allocate memory (12)
        open-files          RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)
        small-dev-shm       RuntimeError: unable to write to file </torch_1_2>: No space left on device (28)
        open-files          RuntimeError: received 0 items of ancdata
        system-error        BlockingIOError: [Errno 11] Resource temporarily unavailable
        system-error        RuntimeError: can't start new thread
        disk-full           sqlite3.OperationalError: database or disk is full
        read-only           sqlite3.OperationalError: attempt to write a readonly database
        disk-full           pyarrow.lib.ArrowInvalid: Error writing bytes. Detail: [errno 28] No space left on device
        quota               some.Error: the project quota has been exceeded
        download-failed     urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>
        download-failed     requests.exceptions.ConnectionError: Max retries exceeded with url: /x ([Errno 101] Network is unreachable)
        download-failed     OSError: We couldn't connect to 'https://huggingface.co' to load this file
        cuda-out-of-memory  RuntimeError: CUDA error: out of memory
        cuda-out-of-memory  RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED
        no-gpu              RuntimeError: Distributed package doesn't have NCCL built in
        no-gpu              RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.
        driver-mismatch     RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver
        no-launcher         KeyError: 'LOCAL_RANK'
        exception           KeyError: 'RANKING'
        # A name that the user's own file lacks is no missing package.
        exception           ImportError: cannot import name 'f' from 'model' (/home/u/model.py)
        import-path         ImportError: cannot import name 'f' from partially initialized module 'm' (most likely due to a circular import) (/home/u/m.py)
        import-path         ImportError: attempted relative import with no known parent package
        versions-differ     ImportError: cannot import name 'f' from 'x' (/v/lib/python3.11/site-packages/x/__init__.py)
        # Nor is a library that the loader refuses.
        wrong-library       ImportError: /opt/lib/libstdc++.so.6: file too short
        wrong-library       ImportError: /opt/lib/libstdc++.so.6: invalid ELF header
        wrong-library       ImportError: /opt/lib/libstdc++.so.6: cannot open shared object file: No such file
        # The error of a file is told by the end of any message.
        permission          RuntimeError: [enforce fail at x.cc:747] . open file failed with strerror: Permission denied
        permission          safetensors_rust.SafetensorError: I/O error: Permission denied (os error 13)
        file-missing        OSError: Unable to open file (name = '/d/x.h5', errno = 2, error message = 'x')
        file-missing        RuntimeError: Parent directory /d/y does not exist.
        file-missing        FileNotFoundError: /d/x.csv
        read-only           RuntimeError: cannot save: Read-only file system
        exception           FooError: to n1: Permission granted
        # A program's own words are not those of its scheduler, and its own connection is not that of a rank.
        exception           CacheError: entry Evicted, preempted by a newer one: time limit exceeded
        exception           redis.exceptions.ConnectionError: Connection reset by peer
        # What could not be fetched is a download.
        download-failed     requests.exceptions.SSLError: HTTPSConnectionPool(host='x', port=443)
        download-failed     urllib.error.URLError: <urlopen error [Errno 110] Connection timed out>
        download-failed     huggingface_hub.errors.LocalEntryNotFoundError: no network
        # The end of a process is told by the exception of its parent.
        segfault            torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGSEGV
        exit-code           torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 3
        small-dev-shm       RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.
        cancelled           KeyboardInterrupt
        """
    ),
)
def test_exception_of_any_library_is_named_by_what_it_means(tmp_path, error, cause):
    assert cause_of(tmp_path, job=traceback_of(error)) == cause


@pytest.mark.parametrize(
    ("type_name", "message", "cause"),
    [
        ("KeyError", "'cat'", "exception"),
        ("OSError", "[Errno 5] Input/output error: '/data/x.jpg'", "disk-error"),
        ("OSError", "[Errno 24] Too many open files: '/data/x.jpg'", "open-files"),
        ("RuntimeError", "Cannot re-initialize CUDA in forked subprocess.", "cuda-after-fork"),
    ],
)
def test_exception_of_a_loader_worker_means_what_it_meant_there(
    tmp_path, type_name, message, cause
):
    assert cause_of(tmp_path, job=loader_error(type_name, message)) == cause


def test_exception_group_means_what_is_in_it(tmp_path):
    verdict = explain(
        tmp_path,
        job="""
          + Exception Group Traceback (most recent call last):
          |   File "/home/u/train.py", line 9, in <module>
          |     main()
          | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
          +-+---------------- 1 ----------------
            | Traceback (most recent call last):
            |   File "/home/u/train.py", line 5, in read
            |     parse()
            | ValueError: bad label
            +------------------------------------
        """.replace("\n        ", "\n"),
    )
    assert "ValueError: bad label" in verdict.first.error


@pytest.mark.parametrize("before", [PLUGIN, DRIVER, AUTOCAST, LOOPBACK, COMPILED, CONDA, REMAPPED])
@pytest.mark.parametrize("steps", ["", steps(0, 30)], ids=["at-once", "after-steps"])
def test_what_was_said_in_passing_is_beaten_by_the_exception_after_it(tmp_path, before, steps):
    raised = traceback_of("ValueError: bad label 7", rank=1)
    assert cause_of(tmp_path, job=before + steps + raised) == "exception"


@pytest.mark.parametrize("line", [CONDA, "ERROR: Unable to locate a modulefile for 'cuda/99'\n"])
def test_what_was_missing_is_the_cause_where_an_import_fails_after_it(tmp_path, line):
    raised = traceback_of("ModuleNotFoundError: No module named 'torch'")
    cause = "command-missing" if line == CONDA else "module-load"
    assert cause_of(tmp_path, job=line + raised) == cause


@pytest.mark.parametrize(
    ("error", "sure"),
    [
        ("ValueError: bad label 7", "medium"),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x784 and 512x10)", "high"),
        ("RuntimeError: the driver answered in a strange way", "medium"),
        ("app.StoreError: could not connect to 10.0.0.4:6379", "medium"),
    ],
)
def test_exception_that_speaks_of_its_surroundings_is_not_surely_the_programs(
    tmp_path, error, sure
):
    assert explain(tmp_path, job=traceback_of(error)).first.confidence.value == sure


@pytest.mark.parametrize(
    ("folder", "module", "hint"),
    [
        ("/home/u/clone/src", "train/snapshot/staging.py", "torchmuster itself failed here"),
        ("/v/lib/python3.11/site-packages", "train/saves.py", "torchmuster itself failed here"),
        ("/v/lib/python3.11/site-packages", "train/wrap.py", "make the plain one a DTensor"),
    ],
)
def test_what_torch_refuses_our_library_is_no_mistake_of_the_script(tmp_path, folder, module, hint):
    mixed = "RuntimeError: aten.copy_.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed operators!"
    frames = (
        f'  File "{folder}/torchmuster/{module}", line 9, in copy\n'
        '  File "/v/lib/python3.11/site-packages/torch/distributed/tensor/_dispatch.py", line 5, in dispatch\n'
    )
    verdict = explain(tmp_path, n1=traceback_of(mixed).replace(mixed, frames + mixed))
    assert verdict.first.hint.startswith(hint)


# Programs that a rank started: what they said themselves is the cause, not their exit code.


COUNTS = (
    "subprocess.CalledProcessError: Command '['tar', 'xf', 'x']' returned non-zero exit status 2."
)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("tar: /archive/photos.tar: Cannot open: No such file or directory", "file-missing"),
        ("mkshards: error: 3 of 4 parts are invalid", "exception"),
    ],
)
def test_the_words_of_a_program_that_was_started_come_first(tmp_path, said, cause):
    first = explain(tmp_path, job=f"{said}\n{traceback_of(COUNTS)}").first
    assert first.cause == cause
    assert said in first.error
    assert first.at == "/home/u/train.py:9"


def test_a_program_that_said_nothing_leaves_its_exit_code(tmp_path):
    assert "exit status 2" in explain(tmp_path, job=traceback_of(COUNTS)).first.error
