"""What a client who follows a run in pods has running: the watch of its pods, the mirror of its record; and the end of both."""

import contextlib
from dataclasses import dataclass

from torchmuster.errors import MusterError
from torchmuster.files.layout import RunDir
from torchmuster.files.terminal import TerminalVoice
from torchmuster.owner.jobs.jobs import forget_views
from torchmuster.owner.pods.end import keep_last_message, remove
from torchmuster.owner.pods.mirror import RecordMirror
from torchmuster.owner.pods.reach import PodWatch, job_of, pod_order
from torchmuster.owner.pods.release import PlaceRelease
from torchmuster.owner.views.record import read_result


@dataclass(slots=True)
class RunCopy:
    """The copy of one run, while somebody follows it."""

    run_dir: RunDir
    job_id: str
    watch: PodWatch
    mirror: RecordMirror
    release: PlaceRelease
    _seen: int = 0

    @classmethod
    def of(cls, run_dir: RunDir, voice: TerminalVoice) -> "RunCopy | None":
        """Return the copy of a run, begun; None for a run that is not in pods."""
        order, job_id = pod_order(run_dir), job_of(run_dir)
        if order is None or job_id is None:
            return None
        watch = PodWatch(job_id)
        mirror = RecordMirror(run_dir, order, job_id, watch, voice.say, voice.print)
        watch.start()
        mirror.start()
        return cls(run_dir, job_id, watch, mirror, PlaceRelease(run_dir, order, job_id, voice.say))

    def has_news(self) -> bool:
        """Say whether something about the pods has changed since the last look; the cluster is asked anew then."""
        number, before = self.watch.number, self._seen
        self._seen = number
        if number != before:
            forget_views()
        return number != before

    def free_places(self) -> None:
        """Remove pods that are lost with their node."""
        with contextlib.suppress(MusterError):
            self.release.look()

    def take_last_words(self) -> None:
        """Take the result from the last message of the first pod, where no copy of the record comes."""
        if self.mirror.is_connected or read_result(self.run_dir) is not None:
            return
        with contextlib.suppress(MusterError):
            keep_last_message(self.run_dir, self.job_id)

    def close(self) -> None:
        """End watch and mirror; remove what is on the cluster of a run that is over."""
        self.watch.stop()
        self.mirror.stop()
        if read_result(self.run_dir) is not None:
            with contextlib.suppress(MusterError):
                remove(self.job_id)
