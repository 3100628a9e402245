"""What a pod is told: a file of the Secret, written by the client."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model import codec

ENDED_FILE = "pod-ended.json"  # in the run directory: nothing more will be written there
FINAL_CODE = 113  # the run has ended, and the Job is to end with it
AGAIN_CODE = 75  # this pod was taken away: the Job makes another one
ORDER_FILE, KEY_FILE, PLAN_FILE = "order.json", "key", "plan.json"
PACKAGE_FILE, CODE_FILE, START_FILE = "package.txz", "code.tar.gz", "start.py"
PROGRAMS_VARIABLE = "MUSTER_PROGRAMS"  # of sessions: how our programs are started in this pod
ORDER_VARIABLE = "MUSTER_ORDER"  # of sessions: the path of the pod's order
_INDEX_VARIABLES = ("MUSTER_POD_INDEX", "JOB_COMPLETION_INDEX")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOrder:
    """One run, as its pods know it.

    Attributes:
        job: The name of its Job and Service; a pod's host name is JOB-INDEX.
        port: Of every pod's door; the one above it is the head's, on the first pod's loopback.
        home: $MUSTER_HOME in the pods.
        code_root: The code folder's path on the client.
        code_bytes: Of the code's archive, where it does not travel in the Secret; None where it does.
        code_sha: Of the archive.
        warn_s: How long before its time limit the workers are warned.
        start_limit_s: How long the client waits for the first pod; None for as long as any, as in a queue.
        time_limit_s: From the first start of the run on; None for no limit.
    """

    run_id: str
    job: str
    num_pods: int
    port: int
    home: str
    code_root: str
    code_sha: str
    code_bytes: int | None = None
    warn_s: float = 0.0
    start_limit_s: float | None = None
    time_limit_s: float | None = None

    @property
    def run_dir(self) -> RunDir:
        """Return the run directory of the first pod."""
        return RunDir(os.path.join(self.home, "runs", self.run_id))

    @property
    def head_port(self) -> int:
        """Return the port by which clients call the head."""
        return self.port + 1

    def host(self, index: int) -> str:
        """Return what a pod is called; the Service's name behind a dot makes it known to DNS."""
        return f"{self.job}-{index}"


def read_order(path: str) -> PodOrder:
    """Return the order of a pod.

    Raises:
        CodecError: It is not one.
    """
    return codec.from_plain(PodOrder, atomic.read_json(path))


def own_index(environment: Mapping[str, str]) -> int:
    """Return which pod of the run this is."""
    texts = (environment.get(name, "") for name in _INDEX_VARIABLES)
    return next((int(text) for text in texts if text.isdecimal()), 0)
