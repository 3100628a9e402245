"""Render the page of a run: one HTML file that loads nothing.

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
from torchmuster.report import words
from torchmuster.report.charts import PHASES
from torchmuster.report.sheet import sheet_of
from torchmuster.report.story import Story

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
    for name in ("clock", "figure", "percent", "node_time"):
        found.filters[name] = getattr(words, name)
    found.filters["span"] = span
    return found


@functools.cache
def _asset(name: str) -> str:
    return (resources.files("torchmuster.report") / name).read_text()


def _digest(content: str) -> str:
    return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
