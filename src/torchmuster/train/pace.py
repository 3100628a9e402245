"""Where the loop stands: the one value that loader, wrapped model and run share.

The loader says what the batch in hand is; the wrapped model weighs its gradient by it; the run counts
by it. Outside a batch of our own loader everything counts as a whole step.
"""

from dataclasses import dataclass, field

from torchmuster.train.beats import Beats, open_beats


@dataclass(slots=True)
class Pace:
    """The batch in hand.

    Attributes:
        weight: What this rank's mean loss counts in the global mean; 1 without our loader.
        count: Samples of this rank's share; 0 for a repeated sample that must not count; None
            without our loader.
        ends_step: Whether the optimizer steps after this micro-batch.
        accumulates: Whether a step has several micro-batches.
        serial: Counts the batches that were handed out.
        beats: Tells the agent what is done now.
    """

    weight: float = 1.0
    count: int | None = None
    ends_step: bool = True
    accumulates: bool = False
    serial: int = 0
    beats: Beats = field(default_factory=open_beats)

    def clear(self) -> None:
        """Say that no batch is in hand."""
        self.weight, self.count, self.ends_step, self.accumulates = 1.0, None, True, False
