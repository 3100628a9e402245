"""Values of a run, of which a test gives what it is about."""

import dataclasses

from torchmuster.core.files.claims import Term
from torchmuster.core.head.membership import Member
from torchmuster.core.model.contract import AttemptFacts, WorkerRanks
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.plan import Program, RunPlan, ScriptKind
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Result
from torchmuster.core.net import messages
from torchmuster.core.proc import CommandOutput

READY = messages.SpawnerReady(python="3.11", torch="2.13", forks=True)
_OF_PROGRAM = {field.name for field in dataclasses.fields(Program)}


class Peer:
    """What a member's channel says of itself."""

    def __init__(self, address):
        self.peer_address = address


def program(target="t.py", **given):
    """Return a program, a file without words."""
    usual = {"kind": ScriptKind.FILE, "args": (), "python": ("python3",), "cwd": "/"}
    return Program(target=target, **{**usual, **given})


def run_plan(num_nodes=1, **given):
    """Return the plan of a run, with a worker for each node; `target`, `cwd` and the like are its program's."""
    own = {name: given.pop(name) for name in _OF_PROGRAM & given.keys()}
    usual = {"run_id": "r", "min_nodes": num_nodes, "max_nodes": num_nodes}
    usual |= {"program": program(**own), "workers_per_node": (1,)}
    assert not own or "program" not in given
    return RunPlan(**{**usual, **given})


def worker_end(kind=EndKind.SIGNAL, **given):
    """Return the end of rank 0 of the first attempt, after a second and of itself."""
    usual = {"attempt": 0, "rank": 0, "local_rank": 0, "node": "n1"}
    return WorkerEnd(kind=kind, **{**usual, "asked": False, "elapsed_s": 1.0, **given})


def run_result(state=RunState.SUCCEEDED, exit_code=0, **given):
    """Return the result of a run of one attempt."""
    usual = {"run_id": "r", "attempts": 1, "restarts_spent": 0, "elapsed_s": 1.0}
    return Result(state=state, exit_code=exit_code, **{**usual, **given})


def worker_ranks(rank, local_rank, counts, node_rank):
    """Return where a rank is among nodes with so many workers each."""
    size = sum(counts)
    of_node = {"local_rank": local_rank, "local_world_size": counts[node_rank]}
    of_nodes = {"node_rank": node_rank, "num_nodes": len(counts)}
    of_role = {"role_rank": rank, "role_world_size": size}
    return WorkerRanks(rank=rank, world_size=size, **of_node, **of_nodes, **of_role)


def attempt_facts(**given):
    """Return what workers are told of the first attempt of the run `job`."""
    usual = {"run_id": "job", "attempt": 0, "restarts_spent": 0, "max_restarts": 0}
    return AttemptFacts(**{**usual, "master_addr": "n1", "master_port": 29500, **given})


def term(number=0, **given):
    """Return a term of the node of place 0, before the attempt of its number."""
    usual = {"holder": "x", "place": 0, "node": "n1", "members": (0,), "next_attempt": number}
    return Term(number=number, **{**usual, "restarts_spent": 0, **given})


def hello(host="h", **given):
    """Return how the agent of a host introduces itself, the host of another kernel than the head's."""
    usual = {"incarnation": host, "version": "1", "pid": 1, "boot_id": "another", "num_workers": 1}
    return messages.Hello(host=host, **{**usual, **given})


def member_of(number, network=None, net="10.0.0"):
    """Return the node of that number, from 1 on, as the head has it: in a network of its own if none is given."""
    place, network = number - 1, f"net{number}" if network is None else network
    said = hello(f"n{number}", pid=number, place=place, wants_place_0=not place, network_id=network)
    return Member(hello=said, channel=Peer(f"{net}.{number}"), heard_at=0.0, place=place)


def command_output(stdout="", stderr="", status=0):
    """Return what a command has said, a scheduler's as a rule."""
    return CommandOutput(status=status, stdout=stdout.encode(), stderr=stderr.encode())
