"""Where a training stands by events of its record, as the views say it."""

from torchmuster.launcher.model.run import TrainingState
from torchmuster.launcher.views.training import seen_in


def fold_training(events):
    """Return the state after these events."""
    state = TrainingState()
    for event in events:
        state.take(event)
    return state


def view_training(events):
    """Return what these events say; None when there is nothing in them."""
    return seen_in(fold_training(events))
