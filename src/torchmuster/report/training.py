"""The story of a training, from `training.jsonl`: metrics, redone steps, saves, epochs, samples."""

import math
from collections.abc import Mapping

from torchmuster.core.model.text import place_of
from torchmuster.launcher.model.run import (
    MOST_POINTS,
    MOST_REDONE,
    MOST_SAVES,
    LibraryStart,
    Series,
    TrainingState,
    number,
    text,
    thinned,
)
from torchmuster.report.story import EpochStory, SaveStory, SeriesStory, TrainingStory

MAX_SERIES = 40


def when_reached(state: TrainingState, start: LibraryStart, step: int) -> float | None:
    """Return when an attempt reached a step, by its snapshots or metrics; None if it never did."""
    if step <= start.step:
        return start.at
    saved = next((save.at for save in reversed(state.saves) if save.step == step), None)
    reached = next((at for one, at in start.reached if one >= step), None)
    if saved is not None and (reached is None or saved <= reached) and saved >= start.at:
        return saved
    return reached


def training_story(state: TrainingState) -> TrainingStory | None:
    """Return the story of a training; None if the library has recorded no start."""
    if not state.starts:
        return None
    first = list(state.metrics.by_name)[:MAX_SERIES]
    epochs = sorted(state.epochs, key=lambda one: one.epoch)
    saves = sorted(state.saves, key=lambda one: one.step)
    return TrainingStory(
        step=state.starts[-1].last_step,
        steps_done=state.steps_done,
        is_finished=state.is_finished,
        series=tuple(
            _series(name, state.metrics.by_name[name]) for name in sorted(first, key=place_of)
        ),
        step_time=_series("step time", state.times) if state.times.points else None,
        epochs=tuple(
            EpochStory(
                epoch=one.epoch,
                step=one.step,
                elapsed_s=one.elapsed_s,
                values=_numbers_of(one.values),
                samples=one.samples,
                lost=one.lost,
                twice=one.twice,
                is_whole=one.is_whole,
            )
            for one in epochs
        ),
        num_epochs=state.num_epochs,
        saves=tuple(
            SaveStory(step=one.step, at=one.at, blocked_s=one.blocked_s, done_at=one.done_at)
            for one in saves[-MOST_SAVES:]
            if one.at is not None
        ),
        num_saves=state.num_saves,
        blocked_s=state.blocked_s,
        order=tuple((text(name, 80), text(value, 200)) for name, value in state.order.items()),
        folder=text(state.folder),
        num_dropped=state.num_dropped,
    )


def _numbers_of(values: Mapping[str, float]) -> tuple[tuple[str, float | None], ...]:
    return tuple((text(name, 80), number(value)) for name, value in [*values.items()][:MAX_SERIES])


def _series(name: str, series: Series) -> SeriesStory:
    kept, again = thinned(series.points, MOST_POINTS), thinned(series.redone, MOST_REDONE)
    since = series.since if series.points else None
    return SeriesStory(
        name=text(name, 80),
        steps=tuple(step for step, _ in kept),
        values=tuple(number(value) for _, value in kept),
        num_points=series.num_points,
        redone_steps=tuple(step for step, _ in again),
        redone_values=tuple(number(value) for _, value in again),
        not_finite=tuple((step, _word(value)) for step, value in series.not_finite),
        num_not_finite=series.num_not_finite,
        bad_since=(since, _word(series.newest[1])) if since is not None else None,
    )


def _word(value: float) -> str:
    return "nan" if math.isnan(value) else f"{value:+.0f}"
