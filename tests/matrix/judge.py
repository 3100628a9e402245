"""Makes one fault in one world and judges what followed: the cause that was named, how soon, and what is left."""

import contextlib
import re
import subprocess
import time
from dataclasses import asdict, dataclass

from kit.waiting import wait_until
from matrix.faults import OTHERS, cut_link, lose_node
from matrix.world import NEXT_RUN_ID, NODES, WORKERS
from torchmuster.core.model.lease import SILENT_S

SHOWN_WITHIN_S = 5.0
LEFT_WITHIN_S = SILENT_S + 5.0
SWEPT = (
    "the agent was killed with its node, or by the scheduler when the link came back: what it had in the node's `/tmp` was"
    " seen to be removed by the next run there"
)
LOOK_FOR_S = 60.0  # an answer that comes too late is told with its time


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What the matrix says of a fault in a world.

    Attributes:
        word: "ok", "failed", "impossible" or "not run".
        why: What was wrong, or why it can't be made.
        shown_s: From the fault until the terminal showed the cause.
        limit_s: The most that this may be.
        clean_s: From then until nothing was left.
        note: What else is to be known of a cell that is ok.
        said: What the terminal showed.
    """

    word: str
    why: str = ""
    shown_s: float | None = None
    limit_s: float | None = None
    clean_s: float | None = None
    note: str = ""
    said: str = ""

    def document(self):
        """Return it for the JSON: what it has, and no terminal."""
        kept = asdict(self) | {"said": ""}
        return {key: value for key, value in kept.items() if value not in ("", None)}


class WrongError(Exception):
    """The product has not done what the matrix asks for."""


def judge(world, fault):
    """Return the cell of a fault in a world; the world is as new before, and whole again behind."""
    if fault.name in world.cannot:
        return Cell(word="impossible", why=world.cannot[fault.name])
    limit_s = SHOWN_WITHIN_S + (SILENT_S if fault.only_lease and world.is_silent else 0.0)
    found = {"limit_s": limit_s}
    world.prepare()
    with contextlib.ExitStack() as stack:
        options = fault.before(world, stack) if fault.before else {}
        before = world.files(NODES)
        running = world.run(**options)
        stack.callback(world.reset)
        stack.callback(running.process.wait)
        stack.callback(running.process.kill)
        try:
            _make_and_judge(running, fault, found, before)
        except (WrongError, AssertionError) as error:
            why = str(error).partition("\n")[0]
            return Cell(word="failed", why=why, said=running.said, **found)
        return Cell(word="ok", said=running.said, **found)


def _make_and_judge(running, fault, found, before):
    made_at = _make(running, fault)
    shown_at = _wait_shown(running, fault)
    found["shown_s"] = round(max(0.0, shown_at - made_at), 1)
    if fault.goes_on:
        running.world.cancel()
    _wait_end(running)
    _check_cause(running, fault)
    if fault.hurt is cut_link:
        _wait_workers_dead(running, fault.node)
        wait_until(
            lambda: not running.world.jobs(),
            "the end of the scheduler's job",
            _job_within_s(running.world),
        )
        running.world.heal_link(fault.node)
    _wait_clean(running.world)
    found["clean_s"] = round(time.time() - shown_at, 1)
    _check_files(running.world, fault, before, found)
    if found["shown_s"] > found["limit_s"]:
        raise WrongError(f"named after {found['shown_s']} s; the limit is {found['limit_s']:g} s")


def _make(running, fault):
    if fault.before is not None and fault.hurt is None:
        return running.wait_begun()
    running.wait_up()
    return fault.hurt(running)


def _wait_shown(running, fault):
    world = running.world
    node = fault.node and re.escape(world.called(fault.node))
    wanted = re.compile(fault.shown.format(interface=world.wrong_interface, node=node))
    try:
        wait_until(
            lambda: wanted.search(running.said) or running.process.poll() is not None,
            "the cause",
            LOOK_FOR_S,
        )
    except AssertionError:
        raise WrongError(f"the cause was not shown within {LOOK_FOR_S:g} s") from None
    if not wanted.search(running.said):
        raise WrongError(f"the cause was not named, but: {running.first_error}")
    return time.time()


def _wait_end(running):
    try:
        running.process.wait(LOOK_FOR_S)
    except subprocess.TimeoutExpired:
        raise WrongError(f"`muster run` did not end within {LOOK_FOR_S:g} s") from None


def _check_cause(running, fault):
    result = running.result()
    if result is None:
        raise WrongError("there is no result.json")
    if fault.state and result["state"] != fault.state:
        raise WrongError(f"the state is {result['state']}, not {fault.state}")
    cause = result.get("cause") or {}
    if fault.kind is not None and cause.get("kind") != fault.kind:
        raise WrongError(f"the cause is {cause.get('kind')}, not {fault.kind}")
    ranks = _ranks(running.world, fault)
    if ranks and cause.get("rank") not in ranks:
        raise WrongError(f"the cause is rank {cause.get('rank')}, not {_either(ranks)}")
    where = NODES[cause["rank"] // WORKERS] if ranks else fault.node
    node = where and running.world.called(where)
    if fault.kind is not None and cause.get("node") != node:
        raise WrongError(f"the cause is on {cause.get('node')}, not {node}")
    if node is not None and not re.search(rf"(?<!\w){re.escape(node)}(?!\w)", _told(result)):
        raise WrongError(f"the report does not name {node}")


def _ranks(world, fault):
    """Return the ranks that may be named; where all nodes share the disk, the first of each node."""
    if fault.name == "disk" and world.is_one_disk:
        return tuple(range(0, len(NODES) * WORKERS, WORKERS))
    return fault.ranks


def _either(ranks):
    return " or ".join(map(str, ranks))


def _told(result):
    report = result.get("report") or {}
    return " ".join([report.get("error") or "", report.get("at") or "", *report.get("because", ())])


def _wait_workers_dead(running, node):
    """Wait for the lease of a node that nobody can tell of the end; its agent waits longer, for the link."""
    try:
        wait_until(lambda: not running.workers_on(node), "dead workers", LEFT_WITHIN_S)
    except AssertionError:
        raise WrongError(f"workers live on {node} while its link is cut") from None


def _check_files(world, fault, before, found):
    """See that no file is left; of agents that died with their node, or were killed for it, at the latest by the next one.

    Raises:
        WrongError: Some are left.
    """
    if fault.hurt is lose_node:
        world.reset()  # the node comes back
    left = world.files(NODES) - before
    if left and fault.hurt in (lose_node, cut_link):
        world.reset()
        world.prepare()
        following = world.run(run_id=NEXT_RUN_ID)
        following.wait_up()
        world.cancel()
        _wait_end(following)
        left = world.files(NODES) - before
        found["note"] = SWEPT
    if left:
        raise WrongError(f"left behind files: {', '.join(sorted(left)[:4])}")


def _wait_clean(world):

    def ours():
        return [line[:80] for line in world.processes() if OTHERS not in line]

    _wait_none("processes", ours, LEFT_WITHIN_S)
    _wait_none("jobs of the scheduler", world.jobs, _job_within_s(world))


def _wait_none(what, look, limit_s):
    try:
        wait_until(lambda: not look(), "nothing left", limit_s)
    except AssertionError:
        raise WrongError(f"left behind {what}: {', '.join(look())}") from None


def _job_within_s(world):
    return max(LEFT_WITHIN_S, world.job_ends_within_s)
