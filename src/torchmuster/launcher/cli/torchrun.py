"""`muster torchrun`: one command per node, with torchrun's arguments; this process is the agent."""

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core import plugs, proc
from torchmuster.core.cli.options import complete_files
from torchmuster.core.cli.spelling import misplaced_options, warn_of_misplaced
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, muster_home, runs_dir, short_id
from torchmuster.core.files.terminal import every_line_streams
from torchmuster.core.head.options import TrainingHeadOptions
from torchmuster.core.model import codec
from torchmuster.core.model.contract import ATTEMPT_VARIABLE, SIGNALS_VARIABLE
from torchmuster.core.model.plan import RunPlan, Tee
from torchmuster.core.model.text import few_of
from torchmuster.core.net.address import bind, new_secret, read_secret, write_secret
from torchmuster.core.node.kernel import visible_gpus
from torchmuster.core.node.options import AgentOptions, HeadPlace
from torchmuster.core.owner.create import new_run_id, unusable, write_owner
from torchmuster.core.owner.session import own_terminal
from torchmuster.core.programs.main import AgentLaunch, job_environment, run_agent
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import JoinTimeoutError, MusterError, UsageError
from torchmuster.launcher.engines.schedulers import may_be_in_job, own_jobs
from torchmuster.launcher.net.interfaces import is_own_address, port_owner
from torchmuster.launcher.node.launcher_ranks import (
    are_one_step,
    is_one_of_many,
    num_tasks,
    task_here,
)
from torchmuster.launcher.spec.rendezvous import NO_ID
from torchmuster.launcher.spec.torchrun import TorchrunLine, make_parser, parse_torchrun

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from torchmuster.launcher.engines.allocation import OwnJob
    from torchmuster.launcher.jobs.spread import SpreadHosts, SpreadOrder

_TOGETHER_S = 3.0  # the tasks of a step start within this time
_LOOK_S = 0.2


class _TorchrunCommand(click.Command):
    """A command whose options only torchrun's parser knows; completes them for the shell."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        """Complete options; after the script they are the script's own."""
        from click.shell_completion import CompletionItem

        given = ctx.params.get("arguments") or ()
        if not incomplete.startswith("-") or any(word.endswith(".py") for word in given):
            return super().shell_complete(ctx, incomplete)
        actions = make_parser({})._actions
        options = ((name, action.help) for action in actions for name in action.option_strings)
        return [
            CompletionItem(name, help=help_text)
            for name, help_text in options
            if name.startswith(incomplete)
        ]


@click.command(
    cls=_TorchrunCommand,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", shell_complete=complete_files, nargs=-1, type=click.UNPROCESSED)
def torchrun(arguments: tuple[str, ...]) -> int:
    """Take torchrun's own command line, inside an existing job script."""
    _find_home()
    problems = Problems()
    gpus, hosts = visible_gpus(), _hosts_of_pod()
    is_ordered = "MUSTER_TORCHRUN_ORDER" in os.environ  # started by a head on another host
    knows = is_ordered or (may_be_in_job(os.environ) and not is_one_of_many(os.environ))
    line = problems.checked(
        parse_torchrun(arguments, os.environ, gpus, problems, hosts, knows_head=knows)
    )
    _warn_of_late_option(line)
    if line.max_nodes > 1:
        _leave_to_first(line.max_nodes)
    launch = make_launch(line)

    if not launch.agent.is_alone:
        _warn_before_it_stops()
    code = run_agent(launch)
    _say_end(launch)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _find_home() -> None:
    """Use the temporary folder if the home can't be written, e.g. on compute nodes."""
    home = muster_home()
    if os.environ.get("MUSTER_HOME"):
        return
    with contextlib.suppress(OSError):
        os.makedirs(home, exist_ok=True)
        if os.access(home, os.W_OK | os.X_OK):
            return
    folder = os.path.join(os.environ.get("TMPDIR") or "/tmp", f"muster-{os.getuid()}")
    with contextlib.suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
        if found.st_uid == os.getuid() and not found.st_mode & 0o077:
            os.environ["MUSTER_HOME"] = folder
            _say(f"{home} can't be written: the files of the run are below MUSTER_HOME={folder}")


def _leave_to_first(max_nodes: int) -> None:
    """Wait for the first task of this node and exit, if srun or mpiexec started several here.

    Several agents on one node are legal. But these are more than the run has room for, and run the
    same command, so they would take each other's places.
    """
    task = task_here(os.environ)
    if task == 0 or num_tasks(os.environ) <= max_nodes or ATTEMPT_VARIABLE in os.environ:
        return
    never, until = threading.Event(), time.monotonic() + _TOGETHER_S
    while (first := _first_task()) is None:
        if time.monotonic() > until:
            return
        never.wait(_LOOK_S)
    text = f"this is task {task} of the launcher on {os.uname().nodename}, and task 0 has started the same agent: it does the work of both"
    _say(f"{text}; start one task on each node")
    # A launcher may end the other tasks some time after the first has ended.
    while proc.is_running(first):
        never.wait(_LOOK_S)
    sys.exit(0)


def _first_task() -> int | None:
    """Return the process of this command that is task 0 of this node; None if none is."""
    own = _words_of(os.getpid(), "cmdline")
    for facts in proc.all_processes():
        if facts.pid == os.getpid() or _words_of(facts.pid, "cmdline") != own:
            continue
        words = _words_of(facts.pid, "environ")
        around = dict(word.split("=", 1) for word in words if "=" in word)
        if are_one_step(around, os.environ) and task_here(around) == 0:
            return facts.pid
    return None


def _words_of(pid: int, what: str) -> list[str]:
    try:
        with open(f"/proc/{pid}/{what}", "rb") as file:
            return [os.fsdecode(word) for word in file.read().split(b"\0")]
    except OSError:  # it has ended, or belongs to another user
        return []


def _warn_before_it_stops() -> None:
    """At Ctrl-Z, print the consequence for a run on several nodes, then stop."""

    def stop(signum: int, frame: object) -> None:
        text = "Ctrl-Z: without `fg` or `bg` within 10 s the workers of this node are ended, and it counts as lost"
        with contextlib.suppress(OSError):
            os.write(2, f"\nmuster: {text}\n".encode())
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)
        signal.signal(signum, stop)  # here after `fg` or `bg`

    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, stop)


def _hosts_of_pod() -> str:
    """Return the text of /etc/hosts in a pod; empty elsewhere."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return ""
    try:
        with open("/etc/hosts", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _warn_of_late_option(line: "TorchrunLine") -> None:
    """Warn about an option of ours after the script, which gets it, if that seems wrong."""
    ours = {name for action in make_parser({})._actions for name in action.option_strings}
    if late := misplaced_options(line.program.target, line.program.args, ours):
        click.echo(f"muster: {warn_of_misplaced(line.program.target, late)}", err=True)


def _say_end(launch: "AgentLaunch") -> None:
    """Print a line about the run's end, on the head: standard output belongs to the script."""
    if launch.head is None:
        return
    from torchmuster.core.cli.ending import last_line
    from torchmuster.core.owner.record import read_result

    result = read_result(launch.head.run_dir)
    if result is not None:
        click.echo(f"muster: {last_line(result, launch.head.run_dir)}", err=True)


def make_launch(line: "TorchrunLine") -> "AgentLaunch":
    """Return the agent that a torchrun line asks for, with the head if the endpoint is ours.

    Raises:
        MusterError: Another program uses the head's port.
    """
    order = None
    if "MUSTER_TORCHRUN_ORDER" in os.environ:  # from a head on another host; else without an import
        from torchmuster.launcher.jobs.spread import take_order

        order = take_order()
    party = find_spread_hosts(line) if order is None else None
    listening = _bind_if_head(line, party) if order is None else None
    if listening is None:
        party = None
    line = _fitted(line, party, order)
    plan = _make_plan(line, new_run_id(line.program.target), party)
    secret, open_secret = _keys(line)
    addresses = order.heads if order is not None else ((line.meeting.host, line.meeting.port),)
    notes = line.notes + (party.notes if party is not None else ())
    jobs = own_jobs(os.environ) if line.meeting.rdzv_id == NO_ID else ()
    head = None
    if listening is not None:
        port = int(listening.getsockname()[1])
        addresses = (("127.0.0.1", port),)
        run_dir = RunDir(os.path.join(runs_dir(), plan.run_id))
        notes = (_create_run_dir(run_dir, plan), *notes)
        write_secret(run_dir.secret, secret)
        named, node = [line.meeting.host], socket.gethostname()
        where = {"host": "127.0.0.1", "port": port, "addresses": named, "node": node}
        atomic.write_json(run_dir.head, where, mode=0o600)  # for other commands
        spread = None
        if party is not None and party.spreads:
            from torchmuster.launcher.jobs.spread import Spreader, head_addresses

            program = os.path.abspath(sys.argv[0])
            by_module = os.path.basename(program) == "__main__.py"
            words = ["-m", "torchmuster"] if by_module else [program]
            spread = Spreader(
                party=party,
                heads=head_addresses(line.meeting.host, port),
                command=[sys.executable, *words, *sys.argv[1:]],
                environment=run_dir.environment,
            )
        head = TrainingHeadOptions(
            plan=plan,
            run_dir=run_dir,
            own_address=line.local_addr or "127.0.0.1",
            hint=party.hint if party is not None else "",
            jobs=jobs,
            relay_port=0 if line.meeting.alone else port,
            spread=spread,
        )
    agent = AgentOptions(
        plan=plan,
        num_workers=line.num_workers,
        host=order.host if order is not None else socket.gethostname(),
        head=HeadPlace(
            addresses=addresses,
            secret=secret,
            open_secret=open_secret,
            join_timeout_s=plan.limits.join_timeout_s,
        ),
        environment={
            **job_environment(line.num_workers),
            SIGNALS_VARIABLE: line.signals_to_handle,
        },
        place=order.place if order is not None else line.node_rank,
        is_head=head is not None,
        local_addr=line.local_addr,
        local_show=True,
        terminal=own_terminal(),
        console=line.console,
        saved=_saved(line),
        signals=line.signals,
        jobs=jobs,
    )
    return AgentLaunch(
        agent=agent,
        head=head,
        listening=listening,
        notes=notes,
        error_file=os.environ.get("TORCHELASTIC_ERROR_FILE"),
    )


def _make_plan(line: "TorchrunLine", run_id: str, party: "SpreadHosts | None") -> "RunPlan":

    sits_here = sys.stdin is not None and sys.stdin.isatty() and line.max_nodes == 1
    return RunPlan(
        run_id=run_id,
        program=line.program,
        min_nodes=line.min_nodes,
        max_nodes=line.max_nodes,
        workers_per_node=(line.num_workers,),
        limits=line.limits,
        tee=Tee.NONE,
        stdin_rank=0 if sits_here else None,
        every_line=every_line_streams(),
        role=line.role,
        rdzv_id=line.meeting.rdzv_id,
        first_cause_code=False,
        restart_hint=True,
        virtual_local_rank=line.virtual_local_rank,
        restart_policy=line.restart_policy,
        node_names=party.job.node_names if party is not None else (),
        engine="torchrun",
        job_id=_own_job_id(),
        head_parts=plugs.carried("head_parts"),
    )


def _own_job_id() -> str | None:

    if not may_be_in_job(os.environ):
        return None  # without an import
    from torchmuster.launcher.engines.registry import find_job_id

    job = find_job_id(os.environ)
    return job[1] if job is not None else None


def _fitted(
    line: "TorchrunLine", party: "SpreadHosts | None", order: "SpreadOrder | None"
) -> "TorchrunLine":
    """Adjust the line to the hosts or the order."""
    limits = line.limits
    if order is not None:  # the head listens already, so a node that can't reach it gives up early
        limits = replace(limits, join_timeout_s=min(limits.join_timeout_s, 60.0))
        return replace(line, limits=limits)
    if party is not None and party.spreads and line.max_nodes > len(party.job.nodes):
        return replace(line, max_nodes=len(party.job.nodes))
    return line


def _bind_if_head(line: "TorchrunLine", party: "SpreadHosts | None") -> socket.socket | None:
    """Return a socket at the head's address; None if the head is, or will be, another agent."""
    meeting = line.meeting
    places_tell = line.node_rank == 0 if meeting.static else line.is_host is not False
    if not meeting.alone and not places_tell:
        return None
    loopback = meeting.host in ("localhost", "127.0.0.1", "::1")
    spreads = party is not None and party.spreads
    is_own = loopback or is_own_address(meeting.host)
    if meeting.static and not is_own and not meeting.alone:
        _say(
            f"{meeting.host} is no address of this machine, and the others look for node 0 there: --master-addr takes one of its own"
        )
    is_named = meeting.static or line.is_host or is_own
    # A job's script runs on the first host, whatever endpoint its lines name.
    is_first = party is not None and spreads and party.is_first
    if not is_named and (not is_first or _is_answered(meeting.host, meeting.port)):
        return None
    # All addresses of the host: its name may mean 127.0.1.1 here and another address elsewhere.
    address = "127.0.0.1" if loopback and not spreads else "0.0.0.0"
    if meeting.static or line.is_host or line.max_nodes == 1:
        return claim(meeting.host, meeting.port, address)
    # Another agent of this job on this machine may be first and become the head.
    limit_s = line.limits.join_timeout_s
    return claim_or_find_head(meeting.host, meeting.port, address, limit_s, _say)


def _say(text: str) -> None:
    click.echo(f"muster: {text}", err=True)


def _is_answered(host: str, port: int) -> bool:
    """Return whether a head listens there; one that starts at the same time gets 1.5 s."""
    deadline = time.monotonic() + 1.5
    pause = threading.Event()
    while True:
        try:
            socket.create_connection((host, port), timeout=0.5).close()
        except OSError:
            if time.monotonic() >= deadline:
                return False
            pause.wait(0.1)
        else:
            return True


def _keys(line: "TorchrunLine") -> tuple[bytes, bytes | None]:
    """Return the key of this job, and the public key for nodes without a common key.

    Both depend on the job's name, so that two jobs at one endpoint don't mix.
    """
    label = f"torchrun {line.meeting.rdzv_id}".encode()
    if line.secret_file is not None:
        return hmac.digest(read_secret(line.secret_file), label, "sha256"), None
    if line.meeting.alone:
        return new_secret(), None
    public = hashlib.sha256(b"muster, not authenticated: " + label).digest()
    path = os.path.join(muster_home(), "key")
    try:
        os.makedirs(muster_home(), mode=0o700, exist_ok=True)
        write_secret(path, new_secret())
    except FileExistsError:
        pass
    except OSError:
        return new_secret(), public  # can't authenticate: gets the rights of any such node
    return hmac.digest(read_secret(path), label, "sha256"), public


def _create_run_dir(run_dir: "RunDir", plan: "RunPlan") -> str:
    """Create the run directory; return a sentence that names it."""
    from torchmuster.launcher.owner.origin import note_origin

    try:
        os.makedirs(run_dir.logs, mode=0o700)
        atomic.write_json(run_dir.plan, codec.to_plain(plan))
        write_owner(run_dir)
    except OSError as error:
        raise unusable(run_dir.path, error.strerror or str(error)) from error
    note_origin(run_dir, plan.program)
    return f"run {short_id(plan.run_id)}; its files are in {run_dir.path}"


def _saved(line: "TorchrunLine") -> Any:
    """Return a function for the paths of streams below --log-dir, in torchrun's layout."""
    if line.log_dir is None:
        return None

    folder = os.path.join(line.log_dir, f"{line.meeting.rdzv_id}_{secrets.token_hex(4)}")

    def path_of(attempt: int, local_rank: int, stream: int) -> str | None:
        if stream and stream not in line.saved(local_rank):
            return None
        name = ("error.json", "stdout.log", "stderr.log")[stream]
        return os.path.join(folder, f"attempt_{attempt}", str(local_rank), name)

    return path_of


# The hosts of the job around this command, and whether its head starts the others.


def find_spread_hosts(line: "TorchrunLine") -> "SpreadHosts | None":
    """Return the hosts of the job around us, this one first; None if the run has only one.

    Raises:
        UsageError: The line needs more hosts than the job has, and nothing else starts agents.
    """
    # A node rank on the command line means that every node gets its own command.
    is_other = line.meeting.static and line.node_rank != 0
    if line.meeting.alone or line.max_nodes == 1 or is_other or not may_be_in_job(os.environ):
        return None
    from torchmuster.core.cli.find import Where, find_place
    from torchmuster.launcher.jobs.spread import SpreadHosts

    try:
        found = find_place(Where(engine="local", is_one_of_many=True), Problems()).job
    except MusterError:
        return None  # another host of a PBS job, which has no node file
    if found is None:
        return None
    job = found.from_here()
    if job is None or len(job.nodes) < 2:
        return None
    is_first = job.nodes[0] == found.nodes[0]
    # Only if the run uses all hosts is it certain that it runs on these.
    named = job if len(job.nodes) == line.max_nodes else job.with_nodes(())
    hint = None
    if is_one_of_many(os.environ):
        hint = ""
    elif not job.can_start_others:
        hint = "muster starts nothing on the hosts of a Torque job: start torchrun on each of them"
    elif line.no_spread:
        only = f"torchrun was started on {job.node_names[0]} only?"
        hint = f"{only} Without --no-spread it starts the others itself"
    if hint is not None:
        return SpreadHosts(job=named, spreads=False, hint=hint)
    return SpreadHosts(
        job=job.with_launcher().with_nodes(job.nodes[: line.max_nodes]),
        # With `localhost` every host is a head; only the first may then start the others.
        spreads=is_first or line.meeting.host not in ("localhost", "127.0.0.1", "::1"),
        is_first=is_first,
        notes=_compare(line, job),
    )


def _compare(line: "TorchrunLine", own: "OwnJob") -> tuple[str, ...]:
    """Compare `--nnodes` with the job; return a note if they differ."""
    nodes, job = own.nodes, f"job {own.allocation.job_id} of {own.dialect.name}"
    names = few_of(own.node_names, 8)
    if line.min_nodes > len(nodes):
        raise UsageError(
            f"--nnodes asks for {line.min_nodes} nodes, the job has {len(nodes)}",
            where=job,
            why=f"its hosts are {names}",
            fix=f"--nnodes {len(nodes)}, or --no-spread if you start the others yourself",
        )
    if line.max_nodes > len(nodes):
        return (f"--nnodes allows {line.max_nodes} nodes, {job} has {len(nodes)}: {names}",)
    if line.max_nodes < len(nodes):
        rest = few_of(own.node_names[line.max_nodes :], 8)
        return (f"--nnodes is {line.max_nodes}, {job} has {len(nodes)} hosts: unused: {rest}",)
    return ()


# The head's port, which this run's head, or an unrelated process, may already use. This machine
# owns the address: whatever listens there is on this machine.

_FIRST_SAY_S = 4.0
_SAY_EVERY_S = 5.0
_TRY_EVERY_S = 0.2
_ANSWERS_WITHIN_S = 1.0


def claim(host: str, port: int, address: str) -> socket.socket:
    """Return a socket that listens on the head's port, for the only possible head.

    Raises:
        UsageError: The port can't be bound, for instance since another process listens there.
    """
    try:
        return bind(address, port)
    except OSError as error:
        raise UsageError(
            f"the head can't listen on port {port}",
            where=f"{host}:{port}",
            why=_because(error, port),
            fix="choose another port on all nodes",
        ) from error


def claim_or_find_head(
    host: str, port: int, address: str, limit_s: float, say: Callable[[str], None]
) -> socket.socket | None:
    """Return a socket that listens on the head's port; None when a head already answers there.

    Wait for a port that another process uses.

    Raises:
        JoinTimeoutError: The port was not free within `limit_s`.
    """
    begun = time.monotonic()
    say_at, pause = begun + _FIRST_SAY_S, threading.Event()
    while True:
        try:
            return bind(address, port)
        except OSError as error:
            why = _because(error, port)
        if is_muster(host, port):
            return None
        now = time.monotonic()
        if now - begun > limit_s:
            raise JoinTimeoutError(
                f"port {port} of this machine was not free within {limit_s:.0f} s",
                where=f"{host}:{port}",
                why=why,
                fix="choose another port on all nodes",
            )
        if now >= say_at:
            say_at = now + _SAY_EVERY_S
            left_s = limit_s - (now - begun)
            say(
                f"waiting for port {port} of this machine, where the head is to listen ({why});"
                f" {left_s:.0f} s left"
            )
        pause.wait(_TRY_EVERY_S)


def is_muster(host: str, port: int) -> bool:
    """Return whether a head of muster answers there."""
    from torchmuster.core.net import channel

    with contextlib.suppress(OSError):
        limit_s = _ANSWERS_WITHIN_S
        with socket.create_connection((host, port), timeout=limit_s) as connection:
            connection.settimeout(limit_s)
            connection.sendall(channel.greeting())
            wanted = len(channel.MAGIC)
            return connection.recv(wanted, socket.MSG_WAITALL) == channel.MAGIC
    return False


def _because(error: OSError, port: int) -> str:
    if error.errno != errno.EADDRINUSE:
        return os.strerror(error.errno) if error.errno else str(error)
    owner = port_owner(port)
    if owner is not None:
        return f"{owner} listens there"
    return "the port is in use, though nothing listens there: an outgoing connection may hold it"
