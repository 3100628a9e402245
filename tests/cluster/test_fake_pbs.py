"""The pretended PBS answers as the real OpenPBS 23.06 that was recorded."""

import json

import pytest

from cluster.pbs import until

TWO_HOSTS = ("-l", "select=2:ncpus=4:mpiprocs=2:ngpus=2", "-l", "place=scatter")


def test_qsub_prints_number_and_server(pbs):
    assert [pbs.submit("true"), pbs.submit("true")] == ["0.ctl", "1.ctl"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-q", "nope"), "qsub: Unknown queue"),
        (("-l", "select=1:ngpus=bad"), "qsub: Illegal attribute or resource value"),
        (
            ("-l", "walltime=abc"),
            "qsub: Illegal attribute or resource value Resource_List.walltime",
        ),
    ],
)
def test_what_qsub_refuses(pbs, tmp_path, words, said):
    (tmp_path / "job.sh").write_text("true\n")
    done = pbs.call("qsub", *words, "job.sh")
    assert (done.returncode != 0, done.stderr.strip(), done.stdout) == (True, said, "")


def test_a_missing_script_is_refused(pbs):
    done = pbs.call("qsub", "/nonexist")
    assert done.returncode != 0
    assert done.stderr == "qsub: script file:: No such file or directory\n"


def test_unknown_jobs(pbs):
    done = pbs.call("qstat", "999.ctl")
    assert (done.returncode, done.stderr) == (153, "qstat: Unknown Job Id 999.ctl\n")
    done = pbs.call("qdel", "999.ctl")
    assert done.returncode != 0
    assert done.stderr == "qdel: Unknown Job Id 999.ctl\n"


def test_too_many_hosts_are_accepted_and_never_run(pbs):
    job = pbs.submit("true", "-l", "select=99:ncpus=2")
    never = "Can Never Run: Not enough total nodes available"
    until(lambda: pbs.view(job).get("comment") == never, "the comment")
    assert pbs.view(job)["job_state"] == "Q"
    assert "exec_host" not in pbs.view(job)


def test_a_running_job_has_its_hosts(pbs):
    job = pbs.submit("sleep 60", *TWO_HOSTS, "-l", "walltime=00:02:00")
    view = pbs.wait(job, "R")
    assert view["substate"] == 42
    assert view["exec_host"] == "n1/0*4+n2/0*4"
    assert view["comment"].endswith(" on (n1:ncpus=4:ngpus=2)+(n2:ncpus=4:ngpus=2)")
    assert "Exit_status" not in view
    resources = view["Resource_List"]
    assert (resources["walltime"], resources["nodect"]) == ("00:02:00", 2)


@pytest.mark.parametrize(
    ("code", "substate", "end"), [(0, 92, " and finished"), (7, 93, " and failed")]
)
def test_the_end_of_a_job(pbs, code, substate, end):
    view = pbs.wait(pbs.submit(f"exit {code}"))
    assert (view["Exit_status"], view["substate"]) == (code, substate)
    assert view["comment"].endswith(end)


def test_over_its_walltime(pbs):
    pbs.settings(kill_delay_s=0.5)
    job = pbs.submit("trap 'echo got TERM' TERM\nsleep 60 & wait; sleep 60", "-l", "walltime=1")
    view = pbs.wait(job)
    assert (view["substate"], view["Exit_status"]) == (93, -29)
    assert view["comment"].endswith(" and exceeded resource walltime")
    lines = pbs.output(job).splitlines()
    assert "got TERM" in lines
    assert lines[-1] == "=>> PBS: job killed: walltime 2 exceeded limit 1"


def test_qdel_terms_then_kills_everything(pbs):
    pbs.settings(kill_delay_s=0.5)
    job = pbs.submit("trap 'echo trapped' TERM\npbsdsh -- /bin/sleep 60 &\nsleep 60; sleep 60")
    pbs.wait(job, "R")
    until(lambda: len(pbs.processes()) >= 4, "the task")
    assert pbs.call("qdel", job).returncode == 0
    view = pbs.wait(job)
    assert view["comment"].endswith(" and terminated by lab@ctl")
    assert "trapped" in pbs.output(job)
    until(lambda: not pbs.processes(), "the processes to be gone")


def test_a_job_waits_for_another(pbs, tmp_path):
    first = pbs.submit(f"until test -e {tmp_path}/go; do /bin/sleep 0.05; done")
    second = pbs.submit("true", "-W", f"depend=afterok:{first}")
    view = pbs.view(second)
    assert (view["job_state"], view["substate"]) == ("H", 20)
    (tmp_path / "go").touch()
    assert pbs.wait(second)["Exit_status"] == 0


def test_a_job_after_a_failed_one_never_runs(pbs):
    first = pbs.submit("exit 1")
    second = pbs.submit("true", "-W", f"depend=afterok:{first}")
    third = pbs.submit("exit 3", "-W", f"depend=afterany:{first}")
    view = pbs.wait(second)
    assert view["substate"] == 92
    assert "Exit_status" not in view
    assert "comment" not in view
    assert pbs.wait(third)["Exit_status"] == 3


def test_a_held_job_stays(pbs):
    view = pbs.view(pbs.submit("true", "-h"))
    assert (view["job_state"], view["substate"]) == ("H", 20)


def test_the_script_runs_once_on_the_first_host_at_home(pbs):
    job = pbs.submit('pwd; cat "$PBS_NODEFILE"; echo $PBS_NODENUM $NCPUS', *TWO_HOSTS)
    pbs.wait(job)
    assert pbs.output(job).split() == [str(pbs.home), "n1", "n1", "n2", "n2", "0", "4"]


def test_pbsdsh_starts_one_process_for_each_line(pbs):
    shown = "echo $PBS_NODENUM ${PBS_NODEFILE:+file} $OMP_NUM_THREADS $PATH $PWD"
    job = pbs.submit(f"export MINE=1\npbsdsh -- /bin/sh -c '{shown} $MINE'", *TWO_HOSTS)
    pbs.wait(job)
    same = f"4 /bin:/usr/bin {pbs.home}"
    expected = [f"0 file {same}", f"0 {same}", f"1 file {same}", f"1 {same}"]
    assert sorted(pbs.output(job).splitlines()) == sorted(expected)


def test_pbsdsh_on_one_line(pbs):
    job = pbs.submit("pbsdsh -n 2 -- /bin/sh -c 'echo on $PBS_NODENUM in $TMPDIR'", *TWO_HOSTS)
    pbs.wait(job)
    assert pbs.output(job).startswith("on 1 in ")
    assert pbs.output(job).rstrip().endswith(f"pbs.{job}")


def test_pbsdsh_hides_exit_codes(pbs):
    job = pbs.submit("pbsdsh -n 0 -- /bin/sh -c 'exit 4'; echo code $?")
    pbs.wait(job)
    line = pbs.output(job).splitlines()
    assert line[0].startswith("pbsdsh: task 0x0000000")
    assert line[0].endswith(" exit status 4")
    assert line[1] == "code 0"


def test_there_is_no_u(pbs):
    job = pbs.submit("pbsdsh -u -- /bin/true; echo code $?")
    pbs.wait(job)
    assert "code 2" in pbs.output(job)


def test_pbs_tmrsh_takes_a_host_and_gives_the_code(pbs):
    job = pbs.submit("pbs_tmrsh n2 /bin/sh -c 'exit $((PBS_NODENUM + 4))'; echo $?", *TWO_HOSTS)
    pbs.wait(job)
    assert pbs.output(job) == "5\n"


def test_qsub_v_reaches_tasks_and_the_shell_does_not(pbs):
    pbs.environment["MINE"] = "no"
    words = "echo ${MINE:-unset} $GIVEN"
    job = pbs.submit(f"{words}\npbsdsh -- /bin/sh -c '{words}'", "-v", "GIVEN=yes")
    pbs.wait(job)
    assert pbs.output(job) == "unset yes\nunset yes\n"


def test_finished_jobs_need_the_history(pbs):
    job = pbs.submit("true")
    pbs.wait(job)
    assert pbs.call("qstat", job).returncode == 35
    state = json.loads((pbs.state / "queue.json").read_text())
    (pbs.state / "queue.json").write_text(json.dumps({**state, "history": False}))
    assert pbs.call("qstat", "-x", job).returncode == 153


def test_jobs_wait_for_room(pbs, tmp_path):
    first = pbs.submit(
        f"until test -e {tmp_path}/go; do /bin/sleep 0.05; done", "-l", "select=2:ncpus=8"
    )
    pbs.wait(first, "R")
    second = pbs.submit("true", "-l", "select=1:ncpus=1")
    until(lambda: "Insufficient" in pbs.view(second).get("comment", ""), "the comment")
    (tmp_path / "go").touch()
    assert pbs.wait(second)["Exit_status"] == 0


def test_qstat_q_lists_the_queues(pbs):
    pbs.settings(queues=["workq", "gpu"])
    lines = pbs.call("qstat", "-Q").stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["workq", "gpu"]
