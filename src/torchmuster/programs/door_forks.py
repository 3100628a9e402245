"""What a door's fork becomes: the agent of a run, with its own spawner forked from it before anything else."""

import importlib
import os
import signal
import sys
from dataclasses import dataclass, replace

from torchmuster import proc
from torchmuster.files.layout import RunDir
from torchmuster.model import contract
from torchmuster.model.codec import from_words, to_words
from torchmuster.model.plan import RunPlan
from torchmuster.node.door import messages
from torchmuster.node.door.forked import ForkedChild
from torchmuster.node.options import AgentOptions, AgentOrder
from torchmuster.node.spawner.start import control_pair

_OF_THE_LAUNCHER = (
    "TORCHELASTIC_",
    "TORCHMUSTER_",
    "MUSTER_PLACE",
    "MUSTER_NODE",
    "MUSTER_SCRATCH",
)
# What an agent, and the head in it, import when they run.
_OF_AGENTS = (
    "asyncio",
    "torchmuster.programs.main",
    "torchmuster.node.agent",
    "torchmuster.node.setup",
    "torchmuster.node.voice",
    "torchmuster.node.remote.main",
    "torchmuster.head.training_head",
    "torchmuster.net.listener",
    "torchmuster.net.store_relay",
)
_RANK_NAMES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)
# Set for every worker, unless the user has set them.
_ADDED = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "RES_OPTIONS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


def import_agents(root: str) -> None:
    """Import what an agent needs, from the folder that holds torchmuster."""
    sys.path.insert(0, root)
    for name in _OF_AGENTS:
        importlib.import_module(name)
    sys.path.remove(root)


def forget_launcher(
    setup: messages.SessionSetup, plan: RunPlan, entry: str, root: str
) -> messages.DoorNode:
    """Remove what the run that is the session has given to its worker, and return what its node gave: a run in it has its own.

    Args:
        setup: Of the session.
        plan: Of the run that is the session, as this node has it.
        entry: The file that our interpreter runs.
        root: The folder that holds torchmuster.
    """
    of_site = tuple(os.environ.get(contract.SITE_NAMES_VARIABLE, "").split())
    names = [n for n in os.environ if n in _RANK_NAMES or n.startswith(_OF_THE_LAUNCHER)]
    given = {*setup.variables, *of_site}
    for name in [*names, *(name for name in _ADDED if name not in given)]:
        os.environ.pop(name, None)
    is_here = plan.engine == "local"
    first, _, others = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    # What a supervisor's PYTHONPATH brings is not the user's; a host's that has no torchmuster is.
    if is_here and first == root:  # `proc.own_package_environment`
        os.environ.pop("PYTHONPATH")
        if others:
            os.environ["PYTHONPATH"] = others
    asked = plan.program.python
    return messages.DoorNode(
        asked=asked,
        python=asked if is_here else _own_python(entry),
        environment=dict(os.environ),
        site_names=of_site,
    )


def _own_python(entry: str) -> tuple[str, ...]:
    """Return the interpreter that runs us, and its flags, as they were called."""
    words = sys.orig_argv
    return tuple(words[: words.index(entry)]) if entry in words else (sys.executable,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrigin:
    """What a fork of a door was before.

    Attributes:
        door: The process that it was forked from.
        mask: The signals that were blocked before.
    """

    door: int
    mask: set[int | signal.Signals]

    def leave(self) -> None:
        """Be a process of its own."""
        proc.stand_apart()
        proc.die_with_parent(self.door)
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)


def become_remote(
    fds: list[int], session: RunDir, place: int, node: messages.DoorNode, origin: ForkOrigin
) -> int:
    """Be a remote end, whose agents the door forks, to its end; `fds` are the file of the order and its three streams."""
    origin.leave()
    try:
        os.close(fds[0])
        for target, fd in enumerate(fds[1:]):
            os.dup2(fd, target)
            os.close(fd)
        from torchmuster.node.remote.main import serve_beside_door

        serve_beside_door(session, place, node)
    except BaseException as error:  # noqa: BLE001 - nothing of it may run on as a door
        _report(error)
    os._exit(1)


def become_agent(
    order: messages.ForkAgent, fds: list[int], origin: ForkOrigin, *, is_warm: bool
) -> int:
    """Be the agent to its end; returns in its spawner only, with the descriptor to the agent.

    Args:
        order: What was asked for.
        fds: The file of the order, standard output and errors, the lifeline, the head's socket.
        origin: What we were forked from.
        is_warm: What is imported serves this run.
    """
    origin.leave()
    code = 1
    try:
        os.close(fds[0])
        null = os.open(os.devnull, os.O_RDONLY)
        for target, fd in enumerate((null, fds[1], fds[2])):
            os.dup2(fd, target)
            os.close(fd)
        _take_environment(order.environment)
        os.umask(order.umask)
        os.chdir(order.cwd)
        importlib.invalidate_caches()
        from torchmuster.programs.launch import read_launch
        from torchmuster.programs.main import run_agent

        listen_fd = fds[4] if order.has_head else None
        told = from_words(AgentOrder, list(order.arguments))
        launch = read_launch(to_words(replace(told, lifeline_fd=fds[3], listen_fd=listen_fd)))
        launch = replace(launch, agent=_settled(launch.agent, order.python))
        forked = None
        if is_warm:
            ours, theirs = control_pair()
            agent = os.getpid()
            pid = os.fork()
            if pid == 0:
                proc.stand_apart()
                proc.die_with_parent(agent)
                ours.close()
                if launch.listening is not None:
                    launch.listening.detach()
                close_all(fds[3:])
                _take_environment(dict(launch.agent.environment))
                os.chdir(launch.agent.plan.program.cwd)
                return theirs.detach()
            theirs.close()
            forked = (ForkedChild(pid), ours)
        code = run_agent(launch, forked)
    except BaseException as error:  # noqa: BLE001 - nothing of an agent may run on as a door
        _report(error)
    os._exit(code)


def _settled(agent: AgentOptions, python: tuple[str, ...]) -> AgentOptions:
    """Return the options of an agent on a held node: its setup lines ran before the door, with this interpreter."""
    setup = replace(agent.plan.node_setup, lines=(), python_follows=False)
    program = replace(agent.plan.program, python=python)
    return replace(agent, plan=replace(agent.plan, program=program, node_setup=setup))


def _take_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def close_all(fds: list[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def _report(error: BaseException) -> None:
    from torchmuster.errors import MusterError
    from torchmuster.model.display.text import render_report, report_of_error

    if isinstance(error, MusterError):
        sys.stderr.write(render_report(report_of_error(error)))
        return
    import traceback

    traceback.print_exception(error)
