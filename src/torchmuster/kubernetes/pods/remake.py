"""Restores deleted Secrets and Services of a run: replacement pods can't start without them."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchmuster.core import proc
from torchmuster.kubernetes.engine.dialect import DIALECT, kubectl, place_of
from torchmuster.kubernetes.engine.manifest import owned_by, secret_of
from torchmuster.kubernetes.pods.reach import ask, refused
from torchmuster.kubernetes.pods.watch import PodWatch
from torchmuster.launcher.jobs.jobs import read_files
from torchmuster.launcher.model.job import JobRequest

_EVERY_S = 5.0
_ASK_S = 25.0
_KINDS = ("secret/", "service/")


@dataclass(slots=True)
class ObjectRestorer:
    """Checks the objects of one Job whenever its pods have changed.

    Attributes:
        job: The request, with the files that its pods bring along.
        say: Gets a message on each object that was restored.
    """

    job: JobRequest
    job_id: str
    watch: PodWatch
    say: Callable[[str], None]
    _seen: int = -1
    _at: float = 0.0

    def look(self) -> None:
        """Create again what is missing, while the Job exists.

        Raises:
            EngineError: The cluster can't be queried, or refuses.
            OSError: A file for the pods is no longer here.
        """
        if self.watch.number == self._seen or time.monotonic() < self._at:
            return
        self._seen, self._at = self.watch.number, time.monotonic() + _EVERY_S
        context, namespace, name = place_of(self.job_id)
        mine = [_name_of(one) for one in json.loads(DIALECT.script(self.job))["items"]]
        named = [one for one in mine if one.startswith(_KINDS)]
        words = ("get", f"jobs.batch/{name}", *named, "--ignore-not-found", "-o", "name")
        there = set(ask(kubectl(context, namespace, *words)).split())
        missing = [one for one in named if one not in there]
        if f"job.batch/{name}" in there and missing:
            self._make(missing, context, namespace, name)

    def _make(self, missing: Sequence[str], context: str, namespace: str, name: str) -> None:
        made = json.loads(
            ask(kubectl(context, namespace, "get", f"jobs.batch/{name}", "-o", "json"))
        )
        wanted = [one.partition("/")[2] for one in missing if one.startswith("secret/")]
        brings = tuple(pair for pair in self.job.brings if secret_of(name, pair[0]) in wanted)
        files = {path: b"" for path, _ in self.job.brings}
        files |= read_files(
            replace(self.job, brings=brings)
        )  # files of an existing Secret may be gone here
        objects = json.loads(DIALECT.with_files(self.job, files))["items"]
        for one in (one for one in objects if _name_of(one) in missing):
            one["metadata"] |= owned_by(made)["metadata"]
            argv = kubectl(context, namespace, "create", "-f", "-")
            said = proc.ask(argv, json.dumps(one).encode(), _ASK_S)
            if said.status != 0:
                raise refused(argv, said.stderr.decode(errors="replace"))
            what = f"{one['kind']} {one['metadata']['name']}"
            self.say(f"the {what} was deleted by somebody: it was made again")


def _name_of(one: Mapping[str, Any]) -> str:
    return f"{one['kind'].lower()}/{one['metadata']['name']}"
