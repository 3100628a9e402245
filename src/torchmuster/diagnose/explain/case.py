"""The facts of a job from its logs: allocated and silent hosts, sizes, addresses, progress."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from torchmuster.diagnose.explain.catalogue.index import signs
from torchmuster.diagnose.explain.events import LogEvent, LogLine, Who
from torchmuster.diagnose.explain.reading.scan import LogRecord
from torchmuster.launcher.model.scheduler import expand_hostlist

_HOST_TOKEN = re.compile(r"[A-Za-z][A-Za-z0-9-]*\d[A-Za-z0-9-]*(?:\.[A-Za-z0-9-]+)*")
# Not `${nodes[0]}` in a job script next to the logs.
_BRACKETED = re.compile(r"(?<![${\w-])[A-Za-z][\w-]*\[[\d,-]+\]")
_LABELLED = re.compile(
    r"(?P<label>[A-Za-z_ ]{0,40}(?:node|host|worker|master)[A-Za-z_ ]{0,24})[:=]\s*(?P<value>\S[^:]*)$",
    re.IGNORECASE,
)
_LIST_OPENS = re.compile(
    r"(?:nodes|hosts|nodelist|node list|hostlist)\b[^:]{0,20}:\s*$", re.IGNORECASE
)
_COUNT = re.compile(
    r"(?:number of nodes|num[_ ]?nodes|nnodes|nodes requested|select)\D{0,20}[:= ]\s*(?P<n>\d{1,5})\b",
    re.IGNORECASE,
)
_OPTION = re.compile(r"--?(?P<option>[a-z_-]+)[= ](?P<value>[^\s-]\S*)")
_KEYS = {
    "nnodes": "min_nodes",
    "rdzv_id": "run_id",
    "rdzv_endpoint": "rdzv_endpoint",
    "rdzv_backend": "rdzv_backend",
    "node_rank": "node_rank",
    "master_addr": "master_addr",
    "master_port": "master_port",
}
_HERE = re.compile(r"current|this|running on|hostname of|local ?host", re.IGNORECASE)
_ADDRESS_LABEL = re.compile(
    r"\b(?:ip|address|addr|port|version|path|log|file|id|name)\b", re.IGNORECASE
)


# The key of hints that hold wherever their values are known.
ANYWHERE = "anywhere"

# Surroundings, by what a line shows or by a kind of event.
_SHOWN = signs("shown.")
_SHOWS = {name: row.regexes[0] for name, row in _SHOWN.items()}
_SCHEDULERS = {
    "slurm": "sacct",
    "pbs": "qstat",
    "kubernetes": "kubectl",
}
# Suggested where a rule names only commands of other schedulers.
_SCHEDULER_COMMANDS = {
    "kubernetes": "kubectl describe pod POD",
}


def short(host: str) -> str:
    """Return a host's name in lower case without its domain; an address stays."""
    return host if re.fullmatch(r"[\d.]+|.*:.*", host) else host.partition(".")[0].lower()


@dataclass(slots=True)
class _Hosts:
    allocated: dict[str, LogLine] = field(default_factory=dict)
    spoke: dict[str, LogLine] = field(default_factory=dict)


class Case:
    """All events of a job, and the facts that follow from them without judgement."""

    def __init__(self, record: LogRecord) -> None:
        self.record = record
        self.events = sorted(record.events, key=lambda event: event.line.order)

    # Events.

    def of(self, *kinds: str) -> list[LogEvent]:
        """Return the events of these kinds, in the order in which they were read."""
        return [event for event in self.events if event.kind in kinds]

    def first(self, *kinds: str) -> LogEvent | None:
        """Return the earliest event of these kinds; None when there is none."""
        found = self.of(*kinds)
        return self.earliest(found) if found else None

    def earliest(self, events: Iterable[LogEvent]) -> LogEvent:
        """Return the earliest event: by time if all have one, else in reading order."""
        found = list(events)
        if all(event.line.when is not None for event in found):
            return min(found, key=lambda event: (event.line.when or 0.0, event.line.order))
        return min(found, key=lambda event: event.line.order)

    # Sizes.

    @cached_property
    def num_nodes(self) -> int | None:
        """How many nodes the job wanted: the largest number in its lines; None when unknown."""
        found: list[int] = []
        sizes = (*self.config("min_nodes"), *self.config("group_world_size"))
        found += [int(e.get("value")) for e in sizes if e.get("value").isdigit()]
        for event in self.of("variable"):
            if event.get("name") in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "NNODES"):
                found += [int(event.get("value"))] if event.get("value").isdigit() else []
        for line in self._frames():
            match = _COUNT.search(line.text)
            found += [int(match["n"])] if match is not None else []
        found.append(len(self.allocated))
        return max(found) or None

    @cached_property
    def world_size(self) -> int | None:
        """How many ranks there are, by stated sizes and by the ranks that wrote."""
        ranks = [event.who.rank for event in self.events if event.who.rank is not None]
        return max([self.stated_size or 0, *(rank + 1 for rank in ranks)], default=0) or None

    @cached_property
    def stated_size(self) -> int | None:
        """How many ranks there are, by lines that state the number."""
        sizes = [int(event.get("size")) for event in self.of("world") if event.get("size")]
        sizes += [
            int(word)
            for event in self.of("launch_config")
            if event.get("key") in ("world_sizes", "global_world_sizes")
            for word in re.findall(r"\d+", event.get("value"))
        ]
        return max(sizes, default=0) or None

    # Hosts.

    @cached_property
    def _hosts(self) -> _Hosts:
        hosts = _Hosts()
        for event in self.of("variable"):
            if event.get("name") in ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST"):
                self._allocate(hosts, event.get("value"), event.line)
        listing = False
        for line in self._frames():
            text = line.text.strip()
            if listing and _HOST_TOKEN.fullmatch(text):
                hosts.allocated.setdefault(short(text), line)
                continue
            listing = bool(_LIST_OPENS.search(text))
            match = _LABELLED.search(text)
            if match is not None and not _ADDRESS_LABEL.search(
                match["label"].replace("hostname", "")
            ):
                named = [
                    word
                    for word in re.split(r"[\s,]+", match["value"])
                    if _HOST_TOKEN.fullmatch(word)
                ]
                target = hosts.spoke if _HERE.search(match["label"]) else hosts.allocated
                for word in named:
                    target.setdefault(short(word), line)
            for word in _BRACKETED.findall(text):
                self._allocate(hosts, word, line)
        for event in self.events:
            if event.who.host is not None:
                hosts.spoke.setdefault(short(event.who.host), event.line)
        for log in self.record.logs:
            if log.who.host is not None and log.num_lines and log.last:
                hosts.spoke.setdefault(short(log.who.host), log.last[-1])
        return hosts

    def _allocate(self, hosts: _Hosts, text: str, line: LogLine) -> None:
        try:
            names = expand_hostlist(text)
        except ValueError:
            return
        for name in names[:4096]:
            hosts.allocated.setdefault(short(name), line)

    def _frames(self) -> Iterable[LogLine]:
        """Yield the first and the last lines of all logs: there scripts name hosts and sizes."""
        for log in self.record.logs:
            yield from log.header
            seen = {line.order for line in log.header}
            yield from (line for line in log.last if line.order not in seen)

    @property
    def allocated(self) -> dict[str, LogLine]:
        """The hosts that were allocated to the job, each with the line that says so."""
        return self._hosts.allocated

    @property
    def spoke(self) -> dict[str, LogLine]:
        """The hosts that wrote something."""
        return self._hosts.spoke

    @property
    def silent(self) -> list[str]:
        """The allocated hosts that wrote nothing; empty when no writer is known."""
        return [host for host in self.allocated if host not in self.spoke] if self.spoke else []

    @cached_property
    def may_lack_logs(self) -> bool:
        """Whether logs of nodes or ranks are missing, by file names and stated sizes."""
        names = [log.who for log in self.record.logs if log.num_lines]
        if not names:
            return False
        if all(who.rank is not None for who in names):
            return len({who.rank for who in names}) < (self.stated_size or 0)
        hosts = {short(who.host) for who in names if who.host is not None}
        if len(hosts) < len(names):
            return False  # a file without a host in its name may hold lines of all
        if self.num_nodes is not None and self.num_nodes > 1:
            return len(hosts) < self.num_nodes
        ranks = {event.who.rank for event in self.events if event.who.rank is not None}
        return len(hosts) == 1 and len(ranks) < (self.stated_size or 0)

    # Where it ran.

    @cached_property
    def surroundings(self) -> frozenset[str]:
        """Where the job ran, as its logs show: `container`, `slurm`, a launcher's name, ..."""
        kinds = {event.kind for event in self.events}
        found = {name for name, row in _SHOWN.items() if not kinds.isdisjoint(row.evidence)}
        lines = {line.text for line in self._frames()} | {event.line.text for event in self.events}
        lines |= {event.get("through") for event in self.events}
        lines |= {event.who.host or "" for event in self.events}
        return frozenset(
            found | {name for name, regex in _SHOWS.items() if any(map(regex.search, lines))}
        )

    def surroundings_of(self, event: LogEvent) -> frozenset[str]:
        """Return the surroundings that an event shows by its text and its traceback's libraries."""
        texts = (event.get("through"), *event.detail, event.line.text)
        return frozenset(name for name, regex in _SHOWS.items() if any(map(regex.search, texts)))

    def confirm(self, commands: str) -> str:
        """Return the commands without those of schedulers that did not run this job."""
        here = self.surroundings & _SCHEDULERS.keys()
        parts = re.split(r"; | {2,}(?=\()", commands)
        kept = [
            part
            for part in parts
            if not here
            or not any(word in part for name, word in _SCHEDULERS.items() if name not in here)
        ]
        if len(kept) < len(parts):
            kept += [question for name, question in _SCHEDULER_COMMANDS.items() if name in here]
        return "; ".join(kept)

    @cached_property
    def last_good(self) -> dict[str, int]:
        """The order of the last step or success in each log that has one."""
        found: dict[str, int] = {}
        signs = [step for log in self.record.logs for step in log.last_progress.values()]
        for event in (*signs, *self.of("success")):
            path = event.line.path
            found[path] = max(found.get(path, 0), event.line.order)
        return found

    # Values that the user set.

    def variable(self, *names: str) -> LogEvent | None:
        """Return the last line that sets or shows one of these variables."""
        found = [
            event for event in self.of("variable", "set_by_user") if event.get("name") in names
        ]
        return found[-1] if found else None

    def config(self, key: str) -> list[LogEvent]:
        """Return the launchers' settings of a key, as they print them or a shell traced them."""
        return [
            event
            for event in (*self.of("launch_config"), *self._options)
            if event.get("key") == key and event.get("value")
        ]

    @cached_property
    def _options(self) -> list[LogEvent]:
        """The options in traced command lines, in the form of printed settings."""
        found: list[LogEvent] = []
        for event in self.of("launch_line"):
            for option, value in _OPTION.findall(event.get("options")):
                key = _KEYS.get(option.replace("-", "_"))
                if key is not None and "$" not in value:
                    least = value.partition(":")[0] if key == "min_nodes" else value
                    fields = {"key": key, "value": least}
                    found.append(replace(event, kind="launch_config", fields=fields))
        return found

    # Ranks.

    @cached_property
    def progress(self) -> dict[Who, int]:
        """The progress of each writer: its last step, epoch or percentage."""
        found: dict[Who, int] = {}
        for log in self.record.logs:
            for who, event in log.last_progress.items():
                number = event.get("number") or event.get("percent")
                if number:
                    found[who] = int(number)
        return found
