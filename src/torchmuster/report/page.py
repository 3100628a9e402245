"""Render the page of a run, and that of how two runs differ: one HTML file that loads nothing.

All text of a run is hostile input: Jinja escapes it, plots escape theirs with `Markup.format`, and
a Content-Security-Policy allows only our own script and style, by their hashes.
"""

import base64
import functools
import hashlib
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from torchmuster.core.model.text import span
from torchmuster.report import plots
from torchmuster.report.charts import PHASES, PlotSheet
from torchmuster.report.compare import Compared, Comparison, value_text
from torchmuster.report.plots import PlotLabels, PlotLine
from torchmuster.report.sheet import MAX_METRICS, Answer, sheet_of
from torchmuster.report.story import SeriesStory, Story, clock, figure, node_time, percent

_POLICY = (
    "default-src 'none'; img-src data:; style-src 'sha256-{style}'; script-src 'sha256-{script}';"
    " base-uri 'none'; form-action 'none'"
)


def render_page(story: Story) -> str:
    """Return the page of one run, workflow or sweep."""
    phases = [(name, style) for name, style, _ in PHASES]
    title = f"{story.name}: {story.ending.state}"
    return render("page.html.j2", title=title, story=story, sheet=sheet_of(story), phases=phases)


def render(template: str, **values: Any) -> str:
    """Return a page rendered from a template in this folder."""
    style, script = _asset("page.css"), _asset("page.js")
    policy = _POLICY.format(style=_digest(style), script=_digest(script))
    page = _templates().get_template(template)
    return page.render(style=Markup(style), script=Markup(script), policy=Markup(policy), **values)


@functools.cache
def _templates() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for show in (clock, figure, node_time, percent, span):
        found.filters[show.__name__] = show
    return found


@functools.cache
def _asset(name: str) -> str:
    return (resources.files("torchmuster.report") / name).read_text()


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


# The page that compares two runs.


def render_comparison(both: Comparison, one: Story, other: Story) -> str:
    """Return the page that compares two runs."""
    return render(
        "compare.html.j2",
        title=f"{both.one} and {both.other}",
        both=both,
        answers=_answers(both, one, other),
        metrics=_metrics(one, other),
        made=other.made,
        made_by=other.made_by,
    )


def _answers(both: Comparison, one: Story, other: Story) -> list[Answer]:
    first = both.first
    step = (
        f"step {first.step:,}" if first is not None else "none" if both.num_common else "not known"
    )
    more = (
        f"{first.metric}: {value_text(first.one)} and {value_text(first.other)}"
        if first is not None
        else f"{both.num_common:,} steps compared"
    )
    took = span(one.ending.elapsed_s), span(other.ending.elapsed_s)
    order = _names(both.data)
    order_differs = "different" if any(row.differs for row in both.data) else "the same"
    return [
        Answer(
            question="First step that differs?",
            answer=step,
            more=more,
            link="loss",
            tone="warn" if first else "",
        ),
        Answer(
            question="How long did they take?",
            answer=" and ".join(took),
            more=f"{one.ending.state} and {other.ending.state}",
            link="speed",
        ),
        Answer(
            question="Is the code the same?",
            answer="no" if _names(both.code) else "yes" if both.code else "not known",
            more=_names(both.code),
            link="code",
        ),
        Answer(
            question="The command and environment?",
            answer="different" if _names(both.environment) else "the same",
            more=_names(both.environment),
            link="environment",
        ),
        Answer(
            question="The order of the data?",
            answer=order_differs if both.data else "not known",
            more=order,
            link="data",
        ),
    ]


def _names(rows: tuple[Compared, ...]) -> str:
    return ", ".join(row.what for row in rows if row.differs)


def _metrics(one: Story, other: Story) -> list[PlotSheet]:
    mine = {s.name: s for s in (one.training.series if one.training else ())}
    theirs = {s.name: s for s in (other.training.series if other.training else ())}
    names = [name for name in mine if name in theirs][:MAX_METRICS]
    return [
        _metric(number, mine[name], theirs[name], one.name, other.name)
        for number, name in enumerate(names)
    ]


def _metric(number: int, one: SeriesStory, other: SeriesStory, mine: str, theirs: str) -> PlotSheet:
    words = f"{one.name} of {mine} and, dashed, of {theirs}."
    labels = PlotLabels(key=f"m{number}", title=one.name, words=words, x="step", y=one.name[:40])
    lines = [
        PlotLine(name=mine, points=[*zip(one.steps, one.values, strict=True)]),
        PlotLine(
            name=theirs, points=[*zip(other.steps, other.values, strict=True)], style="line other"
        ),
    ]
    return PlotSheet(labels=labels, svg=plots.line_plot(labels, lines))
