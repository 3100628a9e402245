"""What is found of schedulers from what their commands print, of hosts, and of the test job."""

import os
from types import SimpleNamespace

import pytest

from kit.values import command_output
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.verdict import Report
from torchmuster.core.owner.create import failed_before_start
from torchmuster.errors import MusterError
from torchmuster.launcher.cli.engine_job import JobWatch
from torchmuster.launcher.cli.engines import ask, find_tool, list_queues, parse_version, reach_hosts
from torchmuster.launcher.engines.pbs import parse_qstat
from torchmuster.launcher.engines.slurm import parse_sinfo
from torchmuster.launcher.engines.ssh_command import SshHost
from torchmuster.launcher.model.job import JobState, JobView

SINFO = """\
main*|up|1-00:00:00|4|64|256000|gpu:a100:4
main*|up|1-00:00:00|2|32|128000|(null)
long|down|infinite|1|64|256000|(null)
"""
QSTAT = """\
Queue              Max   Tot Ena Str   Que   Run   Hld   Wat   Trn   Ext Type
---------------- ----- ----- --- --- ----- ----- ----- ----- ----- ----- ----
workq                0     3 yes yes     1     1     1     0     0     0 Exec
stopq                0     0 yes no      0     0     0     0     0     0 Exec
"""


def answer(*said, **more):
    return lambda argv: command_output(*said, **more)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("slurm 22.05.8\n", "22.05.8"),
        ("slurm-wlm 24.11.3", "24.11.3"),
        ("pbs_version = 23.06.06\n", "23.06.06"),
        ("Version: 6.1.2\nCommit: a1b2", "6.1.2"),
        ("OpenSSH_9.2p1 Debian-2, OpenSSL 3.0.9", "OpenSSH_9.2p1"),
        ("usage: qsub [-a date_time]", None),
    ],
)
def test_versions(text, version):
    assert parse_version(text) == version


def test_partitions_come_once_with_all_their_nodes():
    main, long = parse_sinfo(SINFO)
    assert (main.name, main.is_default, main.is_open) == ("main", True, True)
    assert "4 nodes of 64 CPUs and 256000 MB, at most 1-00:00:00, gpu:a100:4; 2 nodes" in main.about
    assert (long.name, long.is_default, long.is_open) == ("long", False, False)


def test_queues_that_are_not_started_are_closed():
    text = QSTAT + "closed 0 0 no yes 0 0 0 0 0 0 Exe*\n"
    found = [(queue.name, queue.is_open, queue.starts) for queue in parse_qstat(text)]
    assert found == [("workq", True, True), ("stopq", True, False), ("closed", False, True)]


@pytest.mark.parametrize("server", [0, 1])
def test_the_default_queue_is_told_by_the_server_where_it_answers(server):
    """Recorded: `qstat -Q` marks none."""
    texts = {"-Q": QSTAT, "-B": "Server: ctl\n    scheduling = True\n    default_queue = stopq\n"}

    def asking(argv):
        has_answer = server or argv[1] == "-Q"
        return command_output(texts[argv[1]]) if has_answer else command_output(status=1)

    found = list_queues("pbs", asking)
    assert [queue.is_default for queue in found.queues] == [False, bool(server)]
    assert found.problem is None


@pytest.mark.parametrize("parse", [parse_sinfo, parse_qstat])
def test_what_nobody_expected_is_no_queue(parse):
    assert parse("Warning: a | new | thing\n\n|\n") == ()


def test_a_tool_with_its_version():
    tool = find_tool("ssh", lambda name: f"/bin/{name}", answer(stderr="OpenSSH_9.2p1 Debian"))
    assert (tool.path, tool.version, tool.problem) == ("/bin/ssh", "OpenSSH_9.2p1", None)


def test_a_missing_tool_is_not_asked():
    assert find_tool("sbatch", lambda name: None, pytest.fail).path is None


@pytest.mark.parametrize(
    ("asking", "problem"),
    [
        (answer(status=None), "did not answer within 5 s"),
        (answer(stderr="a\nslurm_load: Unable to contact\n", status=1), "Unable to contact"),
        (answer(), "listed none"),
    ],
)
def test_why_there_are_no_queues(asking, problem):
    found = list_queues("slurm", asking)
    assert found.queues == ()
    assert problem in found.problem


def test_a_command_that_cannot_be_executed_is_a_finding():
    def broken(argv):
        raise MusterError("`sinfo` can't be started", why="Exec format error")

    assert list_queues("slurm", broken).problem == "Exec format error"


def test_a_real_command_is_asked():
    assert ask(["echo", "1.2"]).stdout == b"1.2\n"


def test_each_host_is_named_with_what_became_of_it():
    machine = os.uname().machine
    answers = {
        "good": command_output(f"Welcome!\ntorchmuster-reached\n{machine}\nPython 3.12.1\n"),
        "arm": command_output("torchmuster-reached\nother\n", status=127),
        "bad": command_output(stderr="bad: Permission denied (publickey).\n", status=255),
        "slow": command_output(status=None),
        "-o": command_output(),
    }

    hosts = [SshHost(name=name) for name in answers]
    found = reach_hosts(hosts, lambda argv: answers[argv[-2]])
    assert [(one["check"], one["ok"], one["found"]) for one in found] == [
        ("host good", True, f"{machine}, Python 3.12.1"),
        ("host arm", True, f"other, here {machine}, no python3 on PATH"),
        ("host bad", False, "bad: Permission denied (publickey)."),
        ("host slow", False, "it did not answer within 10 s"),
        ("host -o", False, "`-o` is not a valid host"),
    ]


def test_no_hosts_are_no_calls():
    assert reach_hosts([]) == []


def test_a_test_job_that_can_never_start_is_not_waited_for(run_dir):
    held = JobView(job_id="3.ctl", state=JobState.HELD, reason="job held")
    watch = JobWatch(run_dir, lambda _: held, lambda _: None, submitted_at=0.0, timeout_s=1e9)
    never = Report(error="job 3.ctl can never start: it could not be started 20 times")

    def cancel(run_dir):
        plain = codec.to_plain(failed_before_start(run_dir, 14, never))
        atomic.write_json(run_dir.result, plain)

    watch._never = SimpleNamespace(cancel_if_hopeless=cancel)

    assert watch.follow()
    assert watch.result.report == never
