"""qdel, qhold, qrls, qsig, qrerun and pbs_attach: what changes a job that is there."""

import getopt
import os
import time

from fake_pbs.state import SERVER, fail, state, whole_id


def each_job(name, words, change, finished=35):
    """Change each job by `change(data, job_id, job)`, which returns a code; say what is wrong with the others."""
    code = 0
    for job_id in map(whole_id, (word for word in words if not word.startswith("-"))):
        with state() as data:
            job = data["jobs"].get(job_id)
            if job is None:
                code = fail(f"{name}: Unknown Job Id {job_id}", 153)
            elif job["state"] == "F":
                code = fail(f"{name}: Job has finished {job_id}", finished)
            else:
                code = change(data, job_id, job) or code
    return code


def qdel(words):
    def change(_data, _job_id, job):
        job["deleted"] = f"lab@{SERVER}"

    return each_job("qdel", words, change)


def qhold(words):
    def change(_data, _job_id, job):
        job["hold_types"] = "u"
        job["user_hold"] = True
        job["comment"] = f"Job held by lab on {time.strftime('%c')}"
        if job["state"] == "Q":
            job["state"], job["substate"] = "H", 20

    return each_job("qhold", words, change)


def qrls(words):
    def change(_data, _job_id, job):
        job["hold_types"], job["user_hold"] = "n", False

    return each_job("qrls", words, change)


def qsig(words):
    options, rest = getopt.getopt(words, "s:")
    signal_name = dict(options).get("-s", "SIGTERM")

    def change(_data, job_id, job):
        if job["state"] not in "RS":
            return fail(f"qsig: Request invalid for state of job {job_id}", 15)
        job["signals"].append(signal_name)
        return 0

    return each_job("qsig", rest, change)


def qrerun(words):
    code = 0
    for job_id in map(whole_id, words):
        with state() as data:
            job = data["jobs"].get(job_id)
            if "qrerun" in data["refuses"]:
                code = fail(f"qrerun: Unauthorized Request  {job_id}", 159)
            elif job is None:
                code = fail(f"qrerun: Unknown Job Id {job_id}", 153)
            elif job["state"] == "F":
                code = fail("qrerun: Job has finished", 35)
            elif job["state"] != "R":
                code = fail(f"qrerun: Request invalid for state of job {job_id}", 15)
            elif not job["rerun"]:
                code = fail(f"qrerun: Job is not rerunnable {job_id}", 7)
            else:
                job["rerun_asked"] = True
    return code


def pbs_attach(words):
    """Put the session of a process under the job again; as the plain user, recorded."""
    options = dict(getopt.getopt(words, "j:p:")[0])
    if set(options) != {"-j", "-p"}:
        return fail("usage: pbs_attach -j jobid -p pid", 2)
    with state() as data:
        job = data["jobs"].get(options["-j"])
        if job is None or job["state"] == "F":
            return fail(f"pbs_attach: no job {options['-j']}")
        job["pids"][str(os.getsid(int(options["-p"])))] = "attached"
    return 0
