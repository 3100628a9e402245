"""`muster torchrun`: one command per node, with torchrun's own arguments; this process is the agent."""

import hashlib
import hmac
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

import click

from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.agent.main import AgentLaunch
    from torchmuster.spec.torchrun import TorchrunLine


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def torchrun(arguments: tuple[str, ...]) -> int:
    """Take torchrun's own command line, inside an existing job script."""
    from torchmuster.doctor.gpus import visible_gpus
    from torchmuster.errors import ManyErrors
    from torchmuster.spec.launch import Problems
    from torchmuster.spec.torchrun import parse_torchrun

    problems = Problems()
    line = parse_torchrun(arguments, os.environ, visible_gpus(), problems)
    if problems.found or line is None:
        raise ManyErrors(problems.found)
    launch = make_launch(line)
    from torchmuster.agent.main import run_agent

    code = run_agent(launch)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def make_launch(line: "TorchrunLine") -> "AgentLaunch":
    """Return the agent that a torchrun line asks for, the head if the endpoint is ours.

    Raises:
        UsageError: The port of the head is taken by something else.
    """
    from torchmuster.agent.main import AgentLaunch, job_environment
    from torchmuster.model.plan import RunPlan, Tee
    from torchmuster.run.create import new_run_id

    listening = _bind_if_head(line)
    run_id = new_run_id(line.program.target)
    sits_here = sys.stdin is not None and sys.stdin.isatty() and line.max_nodes == 1
    plan = RunPlan(
        run_id=run_id,
        program=line.program,
        min_nodes=line.min_nodes,
        max_nodes=line.max_nodes,
        workers_per_node=(line.num_workers,),
        limits=line.limits,
        tee=Tee.NONE,
        stdin_rank=0 if sits_here else None,
        role=line.role,
        rdzv_id=line.rdzv_id,
        first_cause_code=False,
        restart_hint=True,
        virtual_local_rank=line.virtual_local_rank,
    )
    secret, open_secret = _keys(line)
    addresses = ((line.host, line.port),)
    if listening is not None:
        _create_run_dir(run_id, plan)
        addresses = (("127.0.0.1", int(listening.getsockname()[1])),)
    return AgentLaunch(
        plan=plan,
        num_workers=line.num_workers,
        host=socket.gethostname(),
        addresses=addresses,
        secret=secret,
        open_secret=open_secret,
        environment=job_environment(line.num_workers),
        place=line.node_rank,
        listening=listening,
        own_address=line.local_addr or "127.0.0.1",
        local_addr=line.local_addr,
        local_show=True,
        console=line.console,
        saved=_saved(line),
        signals=line.signals,
        notes=line.notes,
    )


def _bind_if_head(line: "TorchrunLine") -> socket.socket | None:
    from torchmuster.net import listener
    from torchmuster.net.address import is_own_address

    is_head = line.standalone or (line.node_rank == 0 if line.static else line.is_host is not False)
    if not is_head:
        return None
    loopback = line.host in ("localhost", "127.0.0.1", "::1")
    if not (line.static or line.is_host or loopback or is_own_address(line.host)):
        return None
    # Every address of the host: /etc/hosts may name it 127.0.1.1 here and otherwise elsewhere.
    address = "127.0.0.1" if loopback else "0.0.0.0"
    try:
        return listener.bind(address, line.port)
    except OSError as error:
        if not line.static and line.is_host is None:
            return None  # another agent of this job on this machine was first, and is the head
        raise UsageError(
            f"the head can't listen on port {line.port}",
            where=f"{line.host}:{line.port}",
            why=error.strerror,
            fix="choose another port on all nodes",
        ) from error


def _keys(line: "TorchrunLine") -> tuple[bytes, bytes | None]:
    """Return the key of this job, and the public one for nodes that have no key in common.

    The name of the job is part of both, so that two jobs at one endpoint don't mix.
    """
    from torchmuster.files.layout import muster_home
    from torchmuster.net.secret import new_secret, read_secret, write_secret

    label = f"torchrun {line.rdzv_id}".encode()
    if line.standalone:
        return new_secret(), None
    if line.secret_file is not None:
        return hmac.digest(read_secret(line.secret_file), label, "sha256"), None
    public = hashlib.sha256(b"muster, not authenticated: " + label).digest()
    path = os.path.join(muster_home(), "key")
    try:
        os.makedirs(muster_home(), mode=0o700, exist_ok=True)
        write_secret(path, new_secret())
    except FileExistsError:
        pass
    except OSError:
        return public, public
    return hmac.digest(read_secret(path), label, "sha256"), public


def _create_run_dir(run_id: str, plan: Any) -> None:
    from torchmuster.files import atomic
    from torchmuster.files.layout import RunDir, runs_dir
    from torchmuster.model import codec
    from torchmuster.run.create import unusable, write_owner

    run_dir = RunDir(os.path.join(runs_dir(), run_id))
    try:
        os.makedirs(run_dir.logs, mode=0o700)
        atomic.write_json(run_dir.plan, codec.to_plain(plan))
        write_owner(run_dir)
    except OSError as error:
        raise unusable(run_dir.path, error.strerror or str(error)) from error


def _saved(line: "TorchrunLine") -> Any:
    """Return where --log-dir keeps a stream, in torchrun's own layout."""
    if line.log_dir is None:
        return None
    import secrets

    folder = os.path.join(line.log_dir, f"{line.rdzv_id}_{secrets.token_hex(4)}")

    def path_of(attempt: int, local_rank: int, stream: int) -> str | None:
        if stream not in line.saved(local_rank):
            return None
        name = "stdout.log" if stream == 1 else "stderr.log"
        return os.path.join(folder, f"attempt_{attempt}", str(local_rank), name)

    return path_of
