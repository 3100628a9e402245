"""The pretended PBS answers as the real OpenPBS 23.06 that was recorded."""

import json
import sys
from pathlib import Path

import pytest

from kit.waiting import wait_until

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
    wait_until(lambda: pbs.view(job).get("comment") == never, "the comment")
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
    said = lines.index("=>> PBS: job killed: walltime 2 exceeded limit 1")
    assert said < lines.index("got TERM")  # recorded: one line before the script gets it


def test_qdel_terms_then_kills_everything(pbs):
    pbs.settings(kill_delay_s=0.5)
    job = pbs.submit("trap 'echo trapped' TERM\npbsdsh -- /bin/sleep 60 &\nsleep 60; sleep 60")
    pbs.wait(job, "R")
    wait_until(lambda: len(pbs.processes()) >= 4, "the task")
    assert pbs.call("qdel", job).returncode == 0
    view = pbs.wait(job)
    assert view["comment"].endswith(" and terminated by lab@ctl")
    assert "trapped" in pbs.output(job)
    wait_until(lambda: not pbs.processes(), "the processes to be gone")


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
    expected = [f"0 {same}", f"0 {same}", f"1 file {same}", f"1 file {same}"]
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
    assert line[0].endswith("pbsdsh: task 0x00000000 exit status 4")
    assert line[1] == "code 0"


def test_there_is_no_u(pbs):
    job = pbs.submit("pbsdsh -u -- /bin/true; echo code $?")
    pbs.wait(job)
    assert "pbsdsh: invalid option -- 'u'\nUsage: " in pbs.output(job)
    assert "code 1" in pbs.output(job)


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
    wait_until(lambda: "Insufficient" in pbs.view(second).get("comment", ""), "the comment")
    (tmp_path / "go").touch()
    assert pbs.wait(second)["Exit_status"] == 0


def test_qstat_q_lists_the_queues(pbs):
    pbs.settings(queues=["workq", "gpu"])
    lines = pbs.call("qstat", "-Q").stdout.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["workq", "gpu"]


BUSY = "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end: pass"


def test_a_job_is_what_is_in_its_sessions(pbs, tmp_path):
    (tmp_path / "busy.py").write_text(BUSY)
    run = f"{sys.executable} {tmp_path}/busy.py"
    one = f"import os; os.setsid(); os.execvp({sys.executable!r}, ['python', '{tmp_path}/busy.py'])"
    (tmp_path / "away.py").write_text(one)
    away_run = f"{sys.executable} {tmp_path}/away.py"
    inside = pbs.submit(f"{run}; sleep 1")
    away = pbs.submit(f"({away_run}); sleep 1")
    attached = pbs.submit(f"{away_run} & sleep 0.5; pbs_attach -j $PBS_JOBID -p $!; wait; sleep 1")
    assert pbs.wait(inside)["resources_used"]["cput"] >= "00:00:01"
    assert pbs.wait(away)["resources_used"]["cput"] == "00:00:00"
    assert pbs.wait(attached)["resources_used"]["cput"] >= "00:00:01"


def test_a_suspended_job_stands_still(pbs, tmp_path):
    job = pbs.submit(f"while true; do echo x >> {tmp_path}/beat; /bin/sleep 0.05; done")
    wait_until((tmp_path / "beat").exists, "the first beat")
    view = pbs.view(job)
    assert pbs.call("qsig", "-s", "suspend", job).returncode == 0
    suspended = pbs.wait(job, "S")
    assert suspended["substate"] == 43
    assert (suspended["comment"], suspended["exec_host"]) == (view["comment"], view["exec_host"])
    script = pbs.pids_of(job, "script")[0]

    def state():
        return Path(f"/proc/{script}/stat").read_text().rpartition(")")[2].split()[0]

    wait_until(lambda: state() == "T", "the script to stand still")
    pbs.call("qsig", "-s", "resume", job)
    pbs.wait(job, "R")
    wait_until(lambda: state() != "T", "the script to go on")


def test_pbsdsh_takes_options_of_the_program_without_dashes_for_its_own(pbs):
    job = pbs.submit("pbsdsh /bin/echo --x; echo code $?; pbsdsh -- /bin/echo --x", *TWO_HOSTS)
    pbs.wait(job)
    said = pbs.output(job)
    assert "pbsdsh: invalid option -- '-'\n" in said
    assert "code 1\n--x\n--x\n" in said


@pytest.mark.parametrize(
    ("words", "numbers"),
    [("-n 7", "1"), ("-c 1", "0"), ("-h n2", "1"), ("", "0011")],
)
def test_which_lines_pbsdsh_takes(pbs, words, numbers):
    job = pbs.submit(f"pbsdsh {words} -- /bin/sh -c 'echo $PBS_NODENUM'", *TWO_HOSTS)
    pbs.wait(job)
    assert sorted(pbs.output(job).split()) == list(numbers)


def test_a_program_that_is_not_there_is_told_in_bytes_that_are_no_text(pbs):
    job = pbs.submit("pbsdsh -n 0 -- /no/such; echo code $?")
    view = pbs.wait(job)
    said = Path(view["Output_Path"].partition(":")[2]).read_bytes()
    assert b"\xf0@" in said
    assert b": No such file or directory\n" in said
    assert said.endswith(b"exit status 254\ncode 0\n")


def test_task_numbers_are_hexadecimal_with_the_host_in_the_top_bits(pbs):
    one = "/bin/sh -c 'echo $PBS_TASKNUM'"
    job = pbs.submit(f"echo $PBS_TASKNUM; pbsdsh -- {one}", *TWO_HOSTS)
    pbs.wait(job)
    first, *tasks = pbs.output(job).split()
    assert first == "1"
    assert sorted(tasks) == ["00000001", "00000002", "20000001", "20000002"]


@pytest.mark.parametrize(
    ("command", "said", "code"),
    [
        ("pbs_tmrsh n2 /bin/sh -c 'kill -9 $$'", "", 9),
        ("pbs_tmrsh nohost true", 'pbs_tmrsh: host "nohost" is not a node in job <0.ctl>', 255),
        ("env -u PBS_JOBID pbs_tmrsh n2 true", "pbs_tmrsh: not executing under PBS", 255),
        ("env -u PBS_JOBID pbsdsh -- true", "pbsdsh: not executing under PBS", 1),
        ("mpiexec -n 2 x", "unexpected error - no non-PBS mpiexec in PBS_O_PATH", 1),
    ],
)
def test_what_fails_on_the_hosts(pbs, command, said, code):
    job = pbs.submit(f"{command}; echo code $?", *TWO_HOSTS)
    pbs.wait(job)
    assert said in pbs.output(job)
    assert f"code {code}\n" in pbs.output(job)


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (("-q", "closed"), "qsub: Queue is not enabled", 173),
        (("-q", "short", "-l", "walltime=1:00:00"), "qsub: Job violates queue and/or", 188),
        (("-l", "select=1:foo=1"), "qsub: Unknown resource: foo", 187),
        (("-l", "walltime=abc"), "qsub: Illegal attribute", 166),
        (("-W", "nonsense"), "qsub: illegal -W value\nusage: qsub", 2),
    ],
)
def test_exit_codes_of_qsub(pbs, tmp_path, words, said, code):
    pbs.settings(
        queues=["workq", "closed", "short"], closed=["closed"], max_walltime_s={"short": 300}
    )
    (tmp_path / "job.sh").write_text("true\n")
    done = pbs.call("qsub", *words, "job.sh")
    assert done.returncode == code
    assert done.stderr.startswith(said)


def test_a_stopped_queue_keeps_its_jobs(pbs):
    pbs.settings(queues=["workq", "stopq"], stopped=["stopq"])
    job = pbs.submit("true", "-q", "stopq")
    said = "Not Running: Queue not started."
    wait_until(lambda: pbs.view(job).get("comment") == said, "the comment")
    assert pbs.call("qstat", "-Q").stdout.splitlines()[3].split()[:5] == [
        "stopq",
        "0",
        "1",
        "yes",
        "no",
    ]
    pbs.call("qdel", job)
    view = pbs.wait(job)
    assert (view["substate"], view["comment"]) == (91, f"{said} and terminated")
    assert "Exit_status" not in view


def test_qhold_of_a_running_job_leaves_it_running(pbs):
    job = pbs.submit("sleep 60")
    pbs.wait(job, "R")
    pbs.call("qhold", job)
    view = pbs.view(job)
    assert (view["job_state"], view["Hold_Types"]) == ("R", "u")
    assert view["comment"].startswith("Job held by lab on ")


def test_who_waits_is_listed_on_both_sides(pbs):
    first = pbs.submit("sleep 60")
    second = pbs.submit("true", "-W", f"depend=afterok:{first}")
    third = pbs.submit("true", "-W", f"depend=afterany:{second}")
    assert pbs.view(second)["depend"] == f"afterok:{first}@ctl,beforeany:{third}@ctl"


def test_waiting_for_an_unknown_job_is_taken_and_never_runs(pbs):
    view = pbs.wait(pbs.submit("true", "-W", "depend=afterok:999"))
    assert (view["substate"], view["Hold_Types"]) == (92, "s")
    assert "Exit_status" not in view


def test_finished_jobs_are_told_beside_json_without_jobs(pbs):
    job = pbs.submit("true")
    pbs.wait(job)
    done = pbs.call("qstat", "-f", "-F", "json", job)
    assert (done.returncode, "Jobs" in json.loads(done.stdout)) == (35, False)
    assert pbs.call("qrerun", job).stderr == "qrerun: Job has finished\n"


def test_a_server_that_is_down(pbs):
    job = pbs.submit("sleep 60")
    pbs.wait(job, "R")
    pbs.change(is_down=True)
    said = "Connection refused\nqstat: cannot connect to server ctl (errno=15010)\n"
    assert pbs.call("qstat", job).stderr == said
    assert "Couldn't connect to cluster: ctl" in pbs.call("qdel", job).stderr
    pbs.change(is_down=False)


def test_output_comes_at_the_end_unless_it_is_kept_in_place(pbs, tmp_path):
    spooled = pbs.submit("echo said; sleep 60", "-o", str(tmp_path / "spooled"))
    pbs.submit("echo said; sleep 60", "-o", str(tmp_path / "kept"), "-k", "oed")
    kept_path = tmp_path / "kept"
    wait_until(lambda: kept_path.exists() and kept_path.read_text() == "said\n", "the line")
    pbs.wait(spooled, "R")
    assert not (tmp_path / "spooled").exists()


def test_output_without_a_folder_stays_on_the_host(pbs, tmp_path):
    job = pbs.submit("echo said", "-o", str(tmp_path / "gone" / "log"))
    pbs.wait(job)
    assert (pbs.state / "undelivered" / f"{job}.OU").read_text() == "said\n"
    assert not (tmp_path / "gone").exists()


def test_a_lost_host_ends_the_job_when_it_comes_back(pbs):
    job = pbs.submit("pbsdsh -n 2 -- /bin/sleep 60 & sleep 60", *TWO_HOSTS)
    wait_until(lambda: pbs.pids_of(job, "n2"), "the task")
    pbs.change(lost=["n2"])
    (task,) = pbs.pids_of(job, "n2")
    wait_until(lambda: not Path(f"/proc/{task}").exists(), "the end of the task")
    assert pbs.view(job)["job_state"] == "R"
    comment = pbs.view(job)["comment"]
    pbs.change(lost=[])
    view = pbs.wait(job)
    assert (view["substate"], view["Exit_status"], view["comment"]) == (93, 271, comment)
    said = "=>> PBS: job killed: node 1 (n2) requested job die, code 15009"
    assert said in pbs.output(job).splitlines()


def test_a_restart_of_the_server_loses_the_comments(pbs, tmp_path):
    go = tmp_path / "go"
    ends = pbs.submit(f"until test -e {go}; do /bin/sleep 0.05; done")
    deleted = pbs.submit("sleep 60")
    for job in (ends, deleted):
        pbs.wait(job, "R")
    pbs.restart_server()
    assert "comment" not in pbs.view(ends)
    go.touch()
    pbs.call("qdel", deleted)
    views = [pbs.wait(job) for job in (ends, deleted)]
    assert [(view["substate"], view["Exit_status"]) for view in views] == [(92, 0), (91, 271)]
    assert not any("comment" in view for view in views)


def test_an_array_is_a_job_for_each_index(pbs, tmp_path):
    job = pbs.submit("echo $PBS_JOBID; pwd", "-J", "1-2", "-N", "arr")
    assert job == "0[].ctl"
    view = pbs.wait(job)
    assert (view["substate"], view["Exit_status"], view["array"]) == (92, 0, "True")
    assert (view["array_indices_submitted"], view["array_indices_remaining"]) == ("1-2", "-")
    assert view["comment"].startswith("Job Array Began at ")
    assert view["comment"].endswith(" and finished")
    assert view["Output_Path"] == f"ctl:{tmp_path}/arr.o0.^array_index^"
    assert "exec_host" not in view
    for index in (1, 2):
        member = pbs.view(f"0[{index}].ctl")
        assert (member["array_id"], member["array_index"]) == (job, index)
        assert member["exec_host"].startswith("n1/")
        path = tmp_path / f"arr.o0.{index}"
        assert path.read_text().splitlines()[0] == f"0[{index}].ctl"
    both = pbs.call("qstat", "-x", "-t", "-f", "-F", "json", job)
    assert list(json.loads(both.stdout)["Jobs"]) == [job, "0[1].ctl", "0[2].ctl"]


def test_a_begun_array_is_in_state_b_and_is_deleted_whole(pbs):
    job = pbs.submit("sleep 60", "-J", "1-2")
    assert pbs.wait(job, "B")["array_state_count"].startswith("Queued:")
    pbs.wait("0[2].ctl", "R")
    pbs.call("qdel", job)
    pbs.wait(job)
    assert pbs.view("0[1].ctl")["substate"] == 91


@pytest.mark.parametrize("is_on", [True, False])
def test_eligible_time_is_told_where_the_server_counts_it(pbs, is_on):
    pbs.settings(eligible_time_enable=is_on)
    assert ("eligible_time" in pbs.wait(pbs.submit("true"))) is is_on
