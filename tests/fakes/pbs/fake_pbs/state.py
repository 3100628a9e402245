"""The state that all commands share: one JSON file, replaced whole."""

import contextlib
import fcntl
import json
import os
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_PBS"])
FAKES = Path(__file__).absolute().parents[1]
SERVER, VERSION = "ctl", "23.06.06"
HAS_ENDED = "Job has finished, use -x or -H to obtain historical job information"
DEFAULTS = {
    "next": 0,
    "hosts": {"n1": {"ncpus": 8, "ngpus": 4}, "n2": {"ncpus": 8, "ngpus": 4}},
    "queues": ["workq"],
    "stopped": [],  # queues that take jobs and start none
    "closed": [],  # queues that take none
    "max_walltime_s": {},  # of a queue
    "history": True,
    "eligible_time_enable": False,  # recorded: then no job has an eligible_time
    "json": True,  # older servers know no -F
    "is_down": False,
    "kill_delay_s": 2.0,
    "walltime_lag_s": 0.0,  # the recorded server took 6 s
    "deliver_retry_s": 0.2,  # the recorded one took 32 s
    "come_back_s": 0.5,  # from a lost host's return to the job's end: the recorded server took 75 s
    "lost": [],  # hosts
    "queue_walltime": None,  # of jobs that ask for none: "00:00:20"
    "refuses": [],  # qrerun: no operator's rights; qsub: not from execution hosts; depend
    "jobs": {},
}


@contextlib.contextmanager
def state():
    """Give the whole state, alone; what the block changes is kept."""
    with open(STATE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = STATE / "queue.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        data = {**DEFAULTS, **known}
        yield data
        new = path.with_suffix(".new")
        new.write_text(json.dumps(data, indent=1))
        new.replace(path)


def look():
    """Return the state without waiting for anybody: it is replaced whole."""
    path = STATE / "queue.json"
    return {**DEFAULTS, **(json.loads(path.read_text()) if path.exists() else {})}


def fail(text, code=1):
    print(text, file=sys.stderr)
    return code


def whole_id(word):
    return word if "." in word else f"{word}.{SERVER}"
