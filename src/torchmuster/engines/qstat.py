"""What `qstat` prints. `-f` in both of its forms: JSON, and text with wrapped lines; a dictionary for each job.

PBS writes JSON with a printer of its own, so what is not JSON in it is mended first: `007` and `1.` without quotes,
lone backslashes, tabs and newlines in values, a key twice, a line behind the end.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchmuster.engines.base import Queue, QueueQuestion

_MAX_DEPTH = 32
_BARE = re.compile(r'("(?:[^"\\]|\\.)*")|(?<=[:\s])([-+]?[0-9.][^\s,{}\[\]":]*)(?=\s*[,}\]])')
_LONE_BACKSLASH = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')


def read_jobs(stdout: str) -> dict[str, dict[str, Any]]:
    """Return the fields of jobs by their ids; nested ones are `Resource_List` of JSON or `Resource_List.x` of text.

    Raises:
        ValueError: It is none of the forms.
    """
    text = stdout.strip()
    if not text:
        return {}
    if re.search(r"^Job Id: ", text, re.MULTILINE):
        return _from_text(text)
    if "{" in text:
        return _from_json(text[text.index("{") :])
    raise ValueError("it is neither JSON nor text")


def _from_json(text: str) -> dict[str, dict[str, Any]]:
    if re.search(r"[\[{]\s*" * _MAX_DEPTH, text):
        raise ValueError("it is nested too deeply")
    try:
        found = _decode(text)
    except ValueError:
        mended = _LONE_BACKSLASH.sub(lambda m: m[0] if m[1] else r"\\", text)
        found = _decode(_BARE.sub(_quote, mended))
    jobs = found.get("Jobs", {}) if isinstance(found, dict) else None
    if not isinstance(jobs, dict) or not all(isinstance(job, dict) for job in jobs.values()):
        raise ValueError("it holds no jobs")
    return jobs


def _decode(text: str) -> Any:
    # strict=False: control characters in a value; raw_decode: text behind the end.
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=_merge)
    return decoder.raw_decode(text)[0]


def _merge(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; tables of the same name are one table: some servers begin `Jobs` anew for each job."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        known = found.get(key)
        both = isinstance(known, dict) and isinstance(value, dict)
        found[key] = {**known, **value} if both and isinstance(known, dict) else value
    return found


def _quote(match: re.Match[str]) -> str:
    """Put quotes around what begins as a number and is none in JSON: `007`, `1.`, `2:00`."""
    if match[1] is not None:
        return match[1]
    word = match[2]
    return word if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", word) else f'"{word}"'


def _from_text(text: str) -> dict[str, dict[str, Any]]:
    jobs: dict[str, dict[str, Any]] = {}
    fields: dict[str, Any] | None = None
    last = ""
    for line in text.splitlines():
        if line.startswith("Job Id: "):
            fields = jobs.setdefault(line.removeprefix("Job Id: ").strip(), {})
            last = ""
        elif fields is None:
            continue  # what the site prints before
        elif line.startswith("\t") and last:
            fields[last] += line[1:]  # qstat wraps long values and begins the rest with a tab
        elif (match := re.fullmatch(r" +([A-Za-z_][\w.@-]*) = ?(.*)", line)) is not None:
            last = match[1]
            fields[last] = match[2]
    return jobs


def parse_qstat(text: str) -> tuple[Queue, ...]:
    """Return the queues of `qstat -Q`: name, limit, total, enabled, started, ..., type; routes too."""
    found: list[Queue] = []
    for line in text.splitlines():
        cells = line.split()
        if len(cells) < 6 or cells[3] not in ("yes", "no") or cells[4] not in ("yes", "no"):
            continue
        running = f"{cells[2]} jobs"
        found.append(
            Queue(
                name=cells[0],
                is_open=cells[3] == "yes",
                starts=cells[4] == "yes",
                about=running,
            )
        )
    return tuple(found)


def mark_default(queues: Sequence[Queue], text: str) -> tuple[Queue, ...]:
    """Return the queues with the one marked that `qstat -B -f` names: `default_queue = workq`."""
    match = re.search(r"^\s*default_queue = (\S+)", text, re.MULTILINE)
    name = match[1] if match else None
    return tuple(replace(queue, is_default=queue.name == name) for queue in queues)


QUEUES_OF_PBS = QueueQuestion(
    argv=("qstat", "-Q"),
    parse=parse_qstat,
    default_argv=("qstat", "-B", "-f"),  # the default queue stands with the server only
    mark_default=mark_default,
)
