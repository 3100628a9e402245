"""A part of a run's head hears each event of the record. It runs on the first node, with the standard library alone."""

from torchmuster.core.head.training_head import HeadPart, TrainingHead
from torchmuster.core.model.events import RecordEvent, WorkerEndedEvent


class Counter(HeadPart):
    """Counts the workers that have ended, and says so when all have."""

    def __init__(self, head: TrainingHead) -> None:
        super().__init__(head)
        self._num_ended = 0

    def hear(self, event: RecordEvent) -> None:
        """Count, and say it once."""
        if not isinstance(event, WorkerEndedEvent):
            return
        self._num_ended += 1
        attempt = self.head.policy.attempt
        if attempt is not None and self._num_ended == len(self.head.rank_nodes(attempt)):
            self.head.notice(f"all {self._num_ended} workers have ended")
