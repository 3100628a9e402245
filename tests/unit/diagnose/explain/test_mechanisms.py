"""What no corpus holds: invented exceptions, error numbers, exit codes, signals, addresses."""

import errno
import os
import signal

import pytest

from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import JobOutcome
from torchmuster.diagnose.logs import read_logs
from unit.diagnose.explain.logs import PEER, cause_of, explain, failed, steps, traceback_of


@pytest.mark.parametrize(
    "error",
    [
        "zarr.errors.ChunkMisalignedError: 7",
        "FrobnicationError",
        "my.own.Kaputt: der Ofen ist aus",
        "TypeError: 'NoneType' object is not subscriptable",
    ],
)
def test_unknown_exception_is_the_cause_with_its_place(tmp_path, error):
    verdict = explain(tmp_path, n1=traceback_of(PEER, rank=0), n2=traceback_of(error, rank=1))
    assert verdict.first.cause == "exception"
    assert error in verdict.first.error
    assert verdict.first.at == "/home/u/train.py:9"


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EBADMSG, errno.ELOOP, errno.EMLINK])
def test_unknown_error_number_is_explained_by_its_name(tmp_path, number):
    error = f"OSError: [Errno {number}] {os.strerror(number)}: '/data/x'"
    verdict = explain(tmp_path, job=traceback_of(error))
    assert verdict.first.cause == "system-error"
    assert errno.errorcode[number] in verdict.first.error
    assert "/data/x" in verdict.first.error


@pytest.mark.parametrize("code", [3, 17, 99, 113])
def test_exit_code_without_a_word_is_the_cause(tmp_path, code):
    verdict = explain(tmp_path, job="loading\n" + failed(code))
    assert verdict.first.cause == "exit-code"
    assert f"exit code {code}" in verdict.first.error


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGFPE, "signal"),
        (signal.SIGXCPU, "signal"),
        (signal.SIGSYS, "signal"),
        (signal.SIGSEGV, "segfault"),
        (signal.SIGKILL, "killed"),
    ],
)
@pytest.mark.parametrize("as_shell", [False, True])
def test_every_signal_is_named(tmp_path, number, cause, as_shell):
    code = 128 + number if as_shell else -number
    verdict = explain(tmp_path, job="loading\n" + failed(code))
    assert verdict.first.cause == cause
    assert signal.Signals(number).name in verdict.first.error or cause != "signal"


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("(10.99.1.2, 31234)", "10.99.1.2:31234"),
        ("[10.99.1.2]:31234", "10.99.1.2:31234"),
        ("10.99.1.2:31234", "10.99.1.2:31234"),
        ("[2001:db8::15]:29500", "2001:db8::15:29500"),
    ],
)
@pytest.mark.parametrize("number", [errno.ENETUNREACH, errno.EHOSTUNREACH])
def test_unreachable_address_is_named_in_every_spelling(tmp_path, address, named, number):
    text = f"[W socket.cpp:601] [c10d] The client socket has failed to connect to {address} (errno: {number} - x).\n"
    first = explain(tmp_path, job=text).first
    assert first.cause == "no-route"
    assert named in first.error


def test_ranks_that_write_in_between_each_other_are_kept_apart(tmp_path):
    one = traceback_of("ValueError: of rank 0", rank=0).splitlines()
    other = traceback_of(PEER, rank=1).splitlines()
    mixed = "".join(f"{a}\n{b}\n" for a, b in zip(other, one, strict=True))
    verdict = explain(tmp_path, job=mixed)
    assert "ValueError: of rank 0" in verdict.first.error
    assert "rank 0" in verdict.first.error


def test_code_that_is_shown_in_a_traceback_means_nothing(tmp_path):
    code = 'raise OutOfLuck("CUDA out of memory, Killed, DUE TO TIME LIMIT")'
    assert cause_of(tmp_path, job=traceback_of("OutOfLuck: none left", code=code)) == "exception"


def test_signal_nine_is_no_lack_of_memory_without_a_word_of_the_kernel(tmp_path):
    verdict = explain(tmp_path, job=failed(-9))
    assert verdict.first.cause == "killed"
    assert verdict.first.confidence.value == "low"


def test_time_limit_after_a_failure_is_not_the_cause(tmp_path):
    raised = traceback_of("ValueError: x").splitlines()
    text = "".join(f"2026-01-01 10:05:00 {row}\n" for row in ("starting", *raised))
    text += "2026-01-01 18:00:00 slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-01-01T18:00:00 DUE TO TIME LIMIT ***\n"
    assert cause_of(tmp_path, job=text) == "exception"


def test_caught_exception_before_progress_is_no_failure(tmp_path):
    caught = traceback_of("KeyError: 'a'", function="read", code="return cache[key]")
    assert cause_of(tmp_path, job=steps(1, 2) + caught + steps(2, 4)) == "healthy"


def test_a_message_that_no_rule_knows_is_shown_as_a_guess_with_where_to_look(tmp_path):
    verdict = explain(tmp_path, job="starting\nfrobnicator: error: no such widget\n")
    assert verdict.first.cause == "reported"
    assert verdict.first.confidence.value == "low"
    assert "no such widget" in verdict.first.error
    assert verdict.outcome is JobOutcome.FAILED
    assert verdict.collect


def test_lines_without_an_end_and_without_a_failure_are_not_called_healthy(tmp_path):
    verdict = explain(tmp_path, job="loading the data\nusing 4 workers\n")
    assert verdict.outcome is JobOutcome.UNKNOWN
    assert not verdict.healthy
    assert verdict.first is None


def test_a_job_that_pbs_ends_for_a_lost_host_names_the_host(tmp_path):
    log = "step 1\n=>> PBS: job killed: node 1 (n2) requested job die, code 15009\n"
    first = explain(tmp_path, job=log).first
    assert (first.cause, first.at) == ("node-failed", "n2")


def test_a_reason_of_pbs_in_words_of_its_own_is_told(tmp_path):
    log = "step 1\n=>> PBS: job killed: ncpus 9.1 exceeded limit 8 (sum)\n"
    first = explain(tmp_path, job=log).first
    assert first.cause == "scheduler-ended"
    assert first.error == "PBS ended the job: ncpus 9.1 exceeded limit 8 (sum)"


MEETING = """
+ ping -c 1 n1
/var/spool/pbs/mom_priv/jobs/8.ctl.SC: line 9: ping: command not found
"""
TIMED_OUT = traceback_of("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError")


def test_a_command_that_a_script_did_without_is_not_the_cause(tmp_path):
    verdict = explain(tmp_path, job=MEETING + TIMED_OUT)
    assert verdict.first.cause == "launcher-on-too-few-nodes"


def test_a_launcher_that_is_missing_stays_the_cause(tmp_path):
    log = MEETING.replace("ping: command", "torchrun: command")
    assert explain(tmp_path, job=log + TIMED_OUT).first.cause == "command-missing"


PBSDSH = "/opt/pbs/bin/pbsdsh: invalid option -- 'n'"
MPIEXEC = "mpiexec:  unexpected error - no non-PBS mpiexec in PBS_O_PATH"


@pytest.mark.parametrize(
    ("line", "cause", "cure"),
    [
        (PBSDSH, "bad-arguments", "pbsdsh -- /full/path"),
        (MPIEXEC, "launch-failed", "write `muster torchrun`"),
    ],
)
def test_commands_of_pbs_that_start_nothing_have_their_cure(tmp_path, line, cause, cure):
    first = explain(tmp_path, job=f"starting on n1\n{line}\n").first
    assert first.cause == cause
    assert cure in first.hint


def test_an_array_of_a_script_beside_the_logs_is_no_list_of_nodes(tmp_path):
    script = "#!/bin/bash\nnodes=($(sort -u $PBS_NODEFILE))\nhead=${nodes[0]}\necho ${nodes[1]}\n"
    (tmp_path / "job.sh").write_text(script)
    case = Case(read_logs([str(tmp_path / "job.sh")], year=2026))
    assert list(case.allocated) == []


CAUGHT = """\
step 2 loss 2.000
Traceback (most recent call last):
  File "/home/u/train.py", line 12, in <module>
    1 / (step - 3)
    ~~^~~~~~~~~~~~
ZeroDivisionError: division by zero
skipping a bad batch
step 3 loss 2.000
step 4 loss 2.000
step 5 loss 2.000
step 6 loss 2.000
"""
GOODBYE = """\
[W1122 14:31:53.141048849 TCPStore.cpp:115] [c10d] recvVector failed on SocketImpl(fd=3, addr=[::ffff:10.7.7.2]:39930, remote=[::ffff:10.7.7.1]:29500): Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?
Exception raised from recvBytes at Utils.hpp:787 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7fa93d316b8d in libc10.so)
<omitting python frames>

W1122 14:31:54.144000 31 torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:1298] The node '10.7.7.2_31_0' has failed to shutdown the rendezvous '7' due to an error of type RendezvousConnectionError.
"""


def test_the_goodbye_of_a_launcher_that_leaves_second_is_no_failure(tmp_path):
    assert explain(tmp_path, n1=CAUGHT, n2=CAUGHT + GOODBYE).healthy


def test_a_lost_connection_without_a_goodbye_is_one(tmp_path):
    lost = GOODBYE.partition("W1122 14:31:54")[0]
    assert not explain(tmp_path, n1=CAUGHT, n2=CAUGHT + lost).healthy


def test_a_goodbye_hides_no_failure_of_a_worker_before_it(tmp_path):
    missing = "/venv/bin/python: can't open file '/shared/train.py': [Errno 2] No such file or directory\n"
    assert cause_of(tmp_path, n1="", n2=missing + GOODBYE) == "script-missing"
