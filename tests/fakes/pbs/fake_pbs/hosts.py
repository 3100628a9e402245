"""What a process of a job finds on its host."""

import getpass

from fake_pbs.state import STATE, look


def scratch(job_id):
    return str(STATE / "tmp" / f"pbs.{job_id}")


def on_host(host, command):
    """Return a command as it runs on a host: where the settings give a host words to `enter` it, they come before."""
    return [*look()["hosts"][host].get("enter", ()), *command]


def job_environment(job_id, job):
    """Return what the script finds."""
    first = job["asked"]["chunks"][0]
    return {
        "PATH": "/bin:/usr/bin",
        "SHELL": "/bin/bash",
        "USER": getpass.getuser(),
        "LOGNAME": getpass.getuser(),
        **job["variables"],
        "HOME": str(STATE / "home"),
        "FAKE_PBS": str(STATE),
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_JOBDIR": str(STATE / "home"),
        "PBS_JOBID": job_id,
        "PBS_JOBNAME": job["name"],
        "PBS_NODEFILE": str(STATE / "spool" / f"aux.{job_id}"),
        "PBS_NODENUM": "0",
        "PBS_QUEUE": job["queue"],
        "PBS_TASKNUM": "1",
        "NCPUS": str(first["ncpus"]),
        "OMP_NUM_THREADS": str(first["ncpus"]),
        "TMPDIR": scratch(job_id),
    }
