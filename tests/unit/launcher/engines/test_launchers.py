"""Which command starts agents on the other hosts, from what is there."""

import pytest

from torchmuster.errors import UsageError
from torchmuster.launcher.engines.allocation import choose_launcher, find_commands, parse_launchers
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.engines.pbs import DIALECT as PBS
from torchmuster.launcher.engines.slurm import DIALECT as SLURM
from torchmuster.launcher.model.job import AllocatedNode, NodeLauncher

NODE = AllocatedNode(name="n2", slot=4)


def no_file(path):
    raise FileNotFoundError(path)


def choose(dialect, there, wanted=(), environment=None, read=no_file):
    """Choose where these commands are."""
    return choose_launcher(
        dialect, wanted, environment or {}, lambda word: word if word in there else None, read
    )


def test_pbsdsh_is_the_usual_way_and_not_worth_a_line():
    way = choose(PBS, {"pbsdsh", "ssh"})
    assert (way.kind, way.program, way.sentence) == (NodeLauncher.PBSDSH, None, None)


def test_first_that_is_there_is_taken_and_said():
    way = choose(PBS, {"pbs_tmrsh", "ssh"})
    assert way.kind is NodeLauncher.TMRSH
    assert way.sentence == (
        "agents of the other hosts are started by pbs_tmrsh: there is no pbsdsh and no mpiexec here that works"
    )


@pytest.mark.parametrize(
    ("environment", "read", "folder"),
    [
        ({"PBS_EXEC": "/cm/pbs"}, no_file, "/cm/pbs"),
        ({}, lambda path: "PBS_SERVER=s\nPBS_EXEC=/x/pbs\n", "/x/pbs"),
        ({}, no_file, "/opt/pbs"),
    ],
)
def test_command_is_looked_for_where_pbs_is_installed(environment, read, folder):
    way = choose(PBS, {f"{folder}/bin/pbsdsh"}, environment=environment, read=read)
    words = [f"{folder}/bin/pbsdsh", "-n", "4", "--", "/bin/x", "a b"]
    assert way.argv(PBS, NODE, ["/bin/x", "a b"]) == words
    assert f"{folder}/bin/pbsdsh" in way.sentence


def test_list_of_the_site_is_obeyed_in_its_order():
    way = choose(
        PBS, {"pbsdsh", "ssh"}, wanted=(NodeLauncher.MPIEXEC, NodeLauncher.SSH, NodeLauncher.PBSDSH)
    )
    assert way.kind is NodeLauncher.SSH
    assert "by ssh: there is no mpiexec here that works" in way.sentence


def test_nothing_there_is_an_error_that_names_all():
    with pytest.raises(EngineError) as caught:
        choose(PBS, set())
    assert caught.value.why == "none of these exists: pbsdsh, mpiexec, pbs_tmrsh, ssh"
    assert "/opt/pbs/bin" in caught.value.where


@pytest.mark.parametrize(
    ("wanted", "end"),
    [
        ((NodeLauncher.MPIEXEC,), "another MPI's"),
        ((), "; none of these exists: pbsdsh, pbs_tmrsh, ssh"),
    ],
)
def test_openpbs_s_own_mpiexec_is_not_called_missing(wanted, end):
    with pytest.raises(EngineError) as caught:
        choose(PBS, {"mpiexec"}, wanted=wanted, read=lambda _: "no non-PBS mpiexec in PBS_O_PATH")
    assert "mpiexec is OpenPBS's own, which only calls another MPI's" in caught.value.why
    assert caught.value.why.endswith(end)


def test_slurm_has_one_way():
    assert choose(SLURM, set()).kind is None


def test_words_of_the_command_line_are_ways():
    assert parse_launchers("pbs_tmrsh,ssh") == (NodeLauncher.TMRSH, NodeLauncher.SSH)
    assert parse_launchers(None) == ()
    with pytest.raises(UsageError, match="`rsh` is not a launcher"):
        parse_launchers("pbsdsh,rsh")


WRAPPER = "#!/bin/sh\necho mpiexec:  unexpected error - no non-PBS mpiexec in PBS_O_PATH\n"


@pytest.mark.parametrize(
    ("path", "text", "kind"),
    [
        ("/usr/bin/mpiexec", WRAPPER, NodeLauncher.TMRSH),
        ("/opt/pbs/bin/mpiexec", "another text", NodeLauncher.TMRSH),
        ("/usr/bin/mpiexec", "the one of an MPI", NodeLauncher.MPIEXEC),
    ],
)
def test_pbs_s_own_mpiexec_is_no_way(path, text, kind):
    there = {"mpiexec": path, "pbs_tmrsh": "/opt/pbs/bin/pbs_tmrsh", path: path}
    read = lambda name: text if name == path else no_file(name)  # noqa: E731
    wanted = (NodeLauncher.MPIEXEC, NodeLauncher.TMRSH)
    assert choose_launcher(PBS, wanted, {}, there.get, read).kind is kind


@pytest.mark.parametrize(
    ("dialect", "there", "path"),
    [
        (PBS, {"/opt/pbs/bin/qstat"}, "/usr/bin:/opt/pbs/bin"),
        (PBS, {"qstat", "/opt/pbs/bin/qstat"}, "/usr/bin"),
        (PBS, set(), "/usr/bin"),
        (SLURM, {"/opt/pbs/bin/squeue"}, "/usr/bin"),
    ],
)
def test_a_job_whose_shell_has_lost_the_path_of_pbs_finds_its_commands(dialect, there, path):
    environment = {"PATH": "/usr/bin"}
    find_commands(dialect, environment, lambda word: word if word in there else None, no_file)
    assert environment["PATH"] == path
