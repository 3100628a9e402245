"""Hosts of an ssh site that answer, refuse or hang."""

import os

from torchmuster.core import proc
from torchmuster.launcher.cli.engines import reach_hosts
from torchmuster.launcher.engines.ssh_command import SshHost


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
    assert [(one["check"], one["ok"], one["found"]) for one in found] == [
        ("host good", True, f"{machine}, Python 3.12.1"),
        ("host arm", True, f"other, here {machine}, no python3 on PATH"),
        ("host bad", False, "bad: Permission denied (publickey)."),
        ("host slow", False, "it did not answer within 10 s"),
        ("host -o", False, "`-o` is not a valid host"),
    ]


def test_no_hosts_are_no_calls():
    assert reach_hosts([]) == []
