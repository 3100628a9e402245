"""Hosts of an ssh site that answer, refuse or hang."""

import os

from torchmuster.core import proc
from torchmuster.launcher.engines.ssh_command import SshHost
from torchmuster.launcher.jobs.reach import reach_hosts


def answer(status=0, out="", err=""):
    return proc.CommandOutput(status=status, stdout=out.encode(), stderr=err.encode())


def test_each_host_is_named_with_what_became_of_it():
    machine = os.uname().machine
    answers = {
        "good": answer(out=f"Welcome!\ntorchmuster-reached\n{machine}\nPython 3.12.1\n"),
        "arm": answer(out="torchmuster-reached\nother\n", status=127),
        "bad": answer(255, err="bad: Permission denied (publickey).\n"),
        "slow": answer(None),
        "-o": answer(),
    }

    def asking(argv):
        return answers[argv[-2]]

    found = reach_hosts([SshHost(name=name) for name in answers], asking)
    assert [(one.host, one.is_here, one.words) for one in found] == [
        ("good", True, f"{machine}, Python 3.12.1"),
        ("arm", True, f"other, here {machine}, no python3 on PATH"),
        ("bad", False, "bad: Permission denied (publickey)."),
        ("slow", False, "it did not answer within 10 s"),
        ("-o", False, "`-o` is not a valid host"),
    ]


def test_no_hosts_are_no_calls():
    assert reach_hosts([]) == []
