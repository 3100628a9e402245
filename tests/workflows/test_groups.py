"""Groups of tasks with real processes: order, data, retries, losses, stops."""

import os
import signal
import socket
import tempfile

import pytest

from kit.command import insist
from kit.waiting import wait_until

ONE = """
workflow:
  name: one
  tasks:
  - name: t
    command: [bash, -c]
    args:
    - |
      SCRIPT
"""


def one(script, options=""):
    """Return a workflow of one task that runs this script."""
    lines = script.strip().splitlines()
    text = ONE.replace("SCRIPT", "\n      ".join(lines))
    return text + options


def pair(lead, worker, options="", task_options=""):
    """Return a workflow of one group: a lead and a worker."""
    return f"""
workflow:
  name: pair
  groups:
  - name: g
{options}
    tasks:
    - name: lead
      lead: true
      command: [bash, -c, {lead!r}]
{task_options}
    - name: w
      command: [bash, -c, {worker!r}]
{task_options}
"""


AGAIN = "      exitActions: {RESCHEDULE: '7', RESTART: '8'}"


# Order and data.


@pytest.mark.short
def test_what_one_group_writes_the_next_one_reads(run_workflow):
    run = run_workflow("""
workflow:
  name: serial
  groups:
  - name: first
    tasks:
    - name: make
      command: [bash, -c, 'mkdir -p {{output}}/a; echo 42 > {{output}}/a/x']
  - name: second
    tasks:
    - name: use
      inputs: [{task: make}]
      command: [bash, -c, 'cat {{input:0}}/a/x > {{output}}/seen']
""")
    assert run.code == 0, run.out
    assert (run.output("use") / "seen").read_text() == "42\n"
    assert run.result()["groups"] == {"first": "COMPLETED", "second": "COMPLETED"}


def test_a_failed_group_fails_what_depends_on_it_and_nothing_else(run_workflow):
    run = run_workflow("""
workflow:
  name: tree
  tasks:
  - name: bad
    command: [bash, -c, 'exit 3']
  - name: below
    inputs: [{task: bad}]
    command: ['true']
  - name: deeper
    inputs: [{task: below}]
    command: ['true']
  - name: beside
    command: ['true']
""")
    states = {name.removesuffix("-group"): s for name, s in run.result()["groups"].items()}
    upstream = dict.fromkeys(["below", "deeper"], "FAILED_UPSTREAM")
    assert states == {"bad": "FAILED", "beside": "COMPLETED", **upstream}, run.out
    assert run.code == 3
    assert run.result()["state"] == "FAILED"


COUNTS_ALL = "    ignoreNonleadStatus: false"
AFTER_FAILURE = "until [ -e FOLDER/failed ]; do sleep 0.05; done"
FAILURE = "touch FOLDER/failed; exit 4"


def test_a_failing_lead_ends_the_group_with_its_code(run_workflow):
    run = run_workflow(pair("echo the cause >&2; exit 5", "sleep 60"))
    assert run.code == 5, run.out
    assert "task lead failed: exit code 5" in run.out
    assert "the cause" in run.out


def test_a_failing_worker_is_the_group_s_failure_only_when_asked(run_workflow):
    run = run_workflow(pair("sleep 60", "exit 4", COUNTS_ALL))
    assert run.code == 4, run.out
    assert "task w failed" in run.out


def test_a_group_succeeds_with_its_lead_though_a_worker_has_failed(run_workflow):
    # The lead's end is the group's: the worker's has to be heard of before it.
    run = run_workflow(pair(f"{AFTER_FAILURE}; sleep 1", FAILURE))
    assert run.code == 0, run.out
    assert "w is FAILED: exit code 4; the group continues" in run.out


def test_a_failing_lead_is_named_with_the_worker_that_had_failed_before_it(run_workflow):
    run = run_workflow(pair(f"{AFTER_FAILURE}; sleep 0.3; exit 9", FAILURE))
    assert run.code == 9, run.out
    assert "task lead failed: exit code 9" in run.out
    assert "w had failed before: exit code 4" in run.out


# Again.


def test_a_rescheduled_task_begins_afresh_and_a_restarted_one_keeps_its_place(run_workflow):
    script = """
echo x >> FOLDER/count
n=$(wc -l < FOLDER/count)
ls {{output}} > FOLDER/output-$n; ls /tmp | grep -c ^mine- > FOLDER/tmp-$n
touch {{output}}/mine-$n /tmp/mine-$n
echo "attempt {{attempt}}"
[ $n = 1 ] && exit 8
[ $n = 2 ] && exit 7
exit 0
"""
    run = run_workflow(one(script, "    exitActions: {RESCHEDULE: '7', RESTART: '8'}\n"))
    assert run.code == 0, run.out

    def seen(number):
        return (run.folder / f"output-{number}").read_text().split()

    assert [seen(1), seen(2), seen(3)] == [[], ["mine-1"], []]
    kept = [(run.folder / f"tmp-{n}").read_text().strip() for n in (1, 2, 3)]
    assert kept == ["0", "1", "0"]
    assert [f"attempt {n}" in run.out for n in (0, 1, 2, 3)] == [True, True, True, False]
    assert [path.name for path in run.output("t").iterdir()] == ["mine-3"]


def test_a_task_that_never_succeeds_ends_after_its_retries(run_workflow):
    options = "    exitActions: {RESCHEDULE: '7'}\n    max_retries: 2\n"
    run = run_workflow(one("echo x >> FOLDER/count; exit 7", options))
    assert run.code == 7, run.out
    assert len((run.folder / "count").read_text().split()) == 3
    assert "tried again 2 times already" in run.out


def test_a_rescheduled_lead_restarts_its_workers_in_place(run_workflow):
    lead = (
        "echo x >> FOLDER/lead; until [ $(wc -l < FOLDER/w) -ge $(wc -l < FOLDER/lead) ];"
        " do sleep 0.05; done; [ $(wc -l < FOLDER/lead) = 1 ] && exit 7; exit 0"
    )
    worker = "echo {{output}} >> FOLDER/w; exec sleep 60"
    run = run_workflow(pair(lead, worker, task_options=AGAIN))
    assert run.code == 0, run.out
    places = (run.folder / "w").read_text().split()
    assert len(places) == 2
    assert len(set(places)) == 1


# Losses.


def test_a_task_whose_agent_is_killed_is_tried_again_once(start_workflow):
    script = "echo $$ >> FOLDER/began; [ {{attempt}} = 1 ] && exit 0; exec sleep 60"
    run = start_workflow(one(script))
    run.wait_for_file("began")
    agent = run.pid("--task=t")
    os.kill(agent, signal.SIGKILL)
    assert run.wait() == 0, run.out
    assert run.attempts(run.result()["groups"].popitem()[0], "t") == 2
    assert run.out.count("RESCHEDULE") == 1, run.out
    first = int((run.folder / "began").read_text().split()[0])
    assert not os.path.exists(f"/proc/{first}")


def test_a_task_leaves_what_it_wrote_to_tmp_and_no_mirror_of_the_rest_also_when_its_agent_is_killed(
    start_workflow,
):
    with tempfile.TemporaryDirectory(dir="/tmp") as of_the_machine:
        script = f"ls -d {of_the_machine} && touch /tmp/of-the-task FOLDER/began-{{{{attempt}}}}\n"
        run = start_workflow(one(script + "[ {{attempt}} = 1 ] && exit 0; exec sleep 60"))
        run.wait_for_file("began-0")
        os.kill(run.pid("--task=t"), signal.SIGKILL)
        assert run.wait() == 0, run.out

    left = [path.name for path in (run.run_dir / "tasks").rglob("*")]
    assert left.count("of-the-task") == 2
    assert os.path.basename(of_the_machine) not in left
    assert len(left) <= 2 * 20


@pytest.mark.short
def test_a_group_whose_head_is_killed_goes_on(start_workflow):
    script = "touch FOLDER/began-{{attempt}}; [ {{attempt}} = 0 ] && exec sleep 60; exit 0"
    run = start_workflow(one(script))
    run.wait_for_file("began-0")
    head = run.pid("--listen-fd")
    os.kill(head, signal.SIGKILL)
    assert run.wait() == 0, run.out
    assert "was lost; it is started again" in run.out


def test_nothing_outlives_the_owner(start_workflow):
    lead = "touch FOLDER/began; (setsid sleep 7777 &); sleep 7777"
    run = start_workflow(pair(lead, "trap '' TERM; sleep 7777"))
    run.wait_for_file("began")
    run.process.kill()
    wait_until(lambda: not run.processes(), f"the end of {run.processes()}")


# Stops.


def test_a_command_has_a_grace_in_which_it_saves_something(start_workflow):
    save = "trap 'sleep 0.3; echo kept > FOLDER/saved; exit 0' TERM"
    run = start_workflow(one(f"{save}\ntouch FOLDER/began\nwhile :; do sleep 0.05; done"))
    run.wait_for_file("began")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.out
    assert (run.folder / "saved").read_text() == "kept\n"
    assert run.result()["state"] == "FAILED_CANCELED"


def test_a_second_ctrl_c_waits_for_no_grace(start_workflow):
    command = "trap '' TERM INT\ntouch FOLDER/began\nwhile :; do sleep 0.05; done"
    run = start_workflow(one(command), "--grace", "3600s")
    run.wait_for_file("began")
    run.process.send_signal(signal.SIGINT)
    wait_until(lambda: "Ctrl-C again for SIGKILL at once" in run.out, "the first answer")
    assert run.process.poll() is None
    insist(run.process)
    assert run.wait() == 128 + signal.SIGINT, run.out


def test_what_runs_too_long_ends_as_exec_timeout(run_workflow):
    text = one("echo early > {{output}}/x; sleep 60")
    run = run_workflow(text.replace("name: one", "name: one\n  timeout: {exec_timeout: 5s}"))
    assert run.result()["state"] == "FAILED_EXEC_TIMEOUT", run.out
    assert run.code not in (0, 130)
    assert "longer than its exec_timeout of 5 s" in run.out
    assert (run.output("t") / "x").exists(), "what it wrote is kept"


def test_what_waits_too_long_for_room_ends_as_queue_timeout(run_workflow):
    cpus = len(os.sched_getaffinity(0))
    run = run_workflow(f"""
workflow:
  name: queue
  timeout: {{queue_timeout: 1s}}
  resources:
    default: {{cpu: {cpus}}}
  tasks:
  - name: a
    command: [sleep, '8']
  - name: b
    command: ['true']
""")
    assert sorted(run.result()["groups"].values()) == ["COMPLETED", "FAILED_QUEUE_TIMEOUT"], run.out
    assert run.code != 0


# Output and ports.


def test_a_flood_of_output_does_not_stall_the_command(run_workflow):
    run = run_workflow(one("yes 0123456789012345678901234567890123456789 | head -c 100000000"))
    assert run.code == 0, run.out[-2000:]
    (log,) = (run.run_dir / "logs").glob("*/t/attempt-0/rank-0.log")
    assert log.stat().st_size >= 100_000_000, "the log has every line"
    log.unlink()


def test_a_port_is_free_and_the_same_in_all_tasks(run_workflow):
    say = "echo {{port}} {{port:other}} > FOLDER"
    run = run_workflow(pair(f"{say}/lead", f"{say}/w; sleep 0.1", COUNTS_ALL))
    assert run.code == 0, run.out
    ports = (run.folder / "lead").read_text()
    assert ports == (run.folder / "w").read_text()
    first, second = map(int, ports.split())
    assert first != second
    with socket.socket() as trying:
        trying.bind(("127.0.0.1", first))


LISTEN = (
    "import os, socket, time; s = socket.socket(); s.bind(('127.0.0.1', {{port}})); s.listen();"
    " open('FOLDER/lead', 'a').write('{{port}} ');"
    " [time.sleep(0.05) for _ in iter(lambda: os.path.exists('FOLDER/w1'), True)]"
)


def test_a_rescheduled_worker_gets_the_port_on_which_its_lead_listens(run_workflow):
    script = (
        "until [ -e FOLDER/lead ]; do sleep 0.05; done;"
        " echo {{port}} > FOLDER/w{{attempt}}; [ {{attempt}} = 0 ] && exit 7; exit 0"
    )
    text = pair("LEAD", script, task_options=AGAIN)
    text = text.replace("[bash, -c, 'LEAD']", f'[python3, -c, "{LISTEN}"]')
    run = run_workflow(text)
    assert run.code == 0, run.out
    assert (run.folder / "w1").read_text().strip() == (run.folder / "lead").read_text().strip()


def test_two_tasks_on_one_port_are_told_why_that_fails(run_workflow):
    bind = (
        "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', {{port}}));"
        " s.listen(); time.sleep(20)"
    )
    text = pair("LEAD", "WORKER", COUNTS_ALL)
    for word in ("LEAD", "WORKER"):
        text = text.replace(f"[bash, -c, '{word}']", f'[python3, -c, "{bind}"]')
    run = run_workflow(text)
    assert run.code == 1, run.out
    assert "share its network" in run.out
    assert "{{port:" in run.out
