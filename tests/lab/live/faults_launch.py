"""Faults of how a job is started: who was started, with which counts, ids, endpoints, ranks."""

from lab.live.case import fault, train
from lab.netlab import Host

# torchrun then says at the start what it was told.
TELLS = {"LOGLEVEL": "INFO"}
THREE = ("10.10.0.1 n1", "10.10.0.2 n2", "10.10.0.3 n3")
TRIO = tuple(Host(name, hosts=THREE) for name in ("n1", "n2", "n3"))
TIMED_OUT = "RendezvousTimeoutError"
# What a job script for PBS prints before it starts torchrun, which PBS does on the first node only.
JOB_SCRIPT = """
echo "Job ID: 15422.login"
echo "Number of Nodes Requested: 2"
echo "Hostname of the Current Node: $(hostname)"
echo "List of Assigned Nodes:"
printf 'n1\\nn2\\n'
echo ""
echo "Launching DDP job...."
exec "$@"
"""


def words(bench, **options):
    """Return torchrun's usual words with waits of a few seconds, and a script that trains."""
    bench.script.write_text(train())
    return (*bench.usual(**{"join_s": 4, "read_s": 3, **options}), str(bench.script))


def static(bench, *more):
    """Return the words of a static start; more words count before them."""
    bench.script.write_text(train())
    waits = "--rdzv-conf=timeout=5,read_timeout=5"
    return ("--nnodes=2", "--nproc-per-node=1", waits, *more, str(bench.script))


def said(files):
    """Return all that was said."""
    return "".join(path.read_text(errors="replace") for path in files)


@fault("different-ids", quick=True)
def nodes_use_different_rdzv_ids(bench):
    files = bench.torchrun(*words(bench, rdzv_id="{place}"), env=TELLS)
    assert said(files).count(TIMED_OUT) >= 2
    return bench.explain(files)


@fault("different-ids")
def nodes_use_different_rdzv_ids_that_their_job_script_traced(bench):
    traced = ("bash", "-xc", 'torchrun "$@"', "-")
    argv = [*traced, *words(bench, rdzv_id="{place}")]
    return bench.explain(bench.together(argv))


@fault("launcher-on-too-few-nodes", quick=True)
def torchrun_runs_on_the_first_node_of_a_job_script_only(bench):
    started = ("sh", "-c", JOB_SCRIPT, "-")
    files = bench.torchrun(*words(bench, endpoint="10.10.0.1:29500"), before=started, hosts=["n1"])
    assert TIMED_OUT in said(files)
    return bench.explain(files)


@fault("launcher-on-too-few-nodes")
def torchrun_is_told_of_three_nodes_and_there_are_two(bench):
    files = bench.torchrun(*words(bench, num_nodes=3, join_s=12), env=TELLS)
    assert TIMED_OUT in said(files)
    return bench.explain(files)


@fault("launcher-on-too-few-nodes")
def static_head_waits_for_a_node_that_was_not_started(bench):
    told = static(bench, "--node-rank=0", "--master-addr=n1")
    files = bench.torchrun(*told, hosts=["n1"], env=TELLS)
    return bench.explain(files)


@fault("different-sizes")
def nodes_use_different_node_counts(bench):
    counts = {"n1": ["--nnodes=2"], "n2": ["--nnodes=3"]}
    return bench.explain(bench.torchrun(*words(bench), each=counts, env=TELLS))


@fault("wrong-node-rank")
def both_nodes_are_node_rank_0(bench):
    told = static(bench, "--node-rank=0", "--master-addr=n1")
    return bench.explain(bench.torchrun(*told, env=TELLS))


@fault("wrong-node-rank")
def both_nodes_are_node_rank_1(bench):
    told = static(bench, "--node-rank=1", "--master-addr=n1")
    return bench.explain(bench.torchrun(*told, env=TELLS))


@fault("wrong-node-rank")
def node_rank_is_beyond_the_count(bench):
    ranks = {"n1": ["--node-rank=0"], "n2": ["--node-rank=2"]}
    told = static(bench, "--master-addr=n1")
    return bench.explain(bench.torchrun(*told, each=ranks, env=TELLS))


@fault("loopback-address")
def static_start_has_no_master_address(bench):
    ranks = {"n1": ["--node-rank=0"], "n2": ["--node-rank=1"]}
    return bench.explain(bench.torchrun(*static(bench), each=ranks))


@fault("loopback-address", quick=True)
def each_node_takes_localhost_as_the_endpoint(bench):
    files = bench.torchrun(*words(bench, endpoint="localhost:29500"), env=TELLS)
    assert said(files).count(TIMED_OUT) >= 2
    return bench.explain(files)


@fault("endpoint-ignored")
def nobody_gave_an_endpoint(bench):
    bench.script.write_text(train())
    told = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=7", "--rdzv-conf=join_timeout=5")
    return bench.explain(bench.torchrun(*told, str(bench.script), env=TELLS))


@fault("endpoint-ignored")
def master_address_is_given_where_it_does_not_count(bench):
    bench.script.write_text(train())
    told = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=7", "--master-addr=n1")
    files = bench.torchrun(*told, "--rdzv-conf=join_timeout=5", str(bench.script))
    assert said(files).count(TIMED_OUT) >= 2
    return bench.explain(files)


@fault("name-not-resolved", quick=True)
def endpoint_has_a_misspelled_name(bench):
    return bench.explain(bench.torchrun(*words(bench, endpoint="nn1:29500")))


@fault("nobody-hosts-the-store", hosts=TRIO)
def endpoint_is_a_host_where_nothing_was_started(bench):
    files = bench.torchrun(*words(bench, endpoint="n3:29500"), hosts=["n1", "n2"])
    return bench.explain(files)


@fault("different-endpoints")
def each_node_takes_itself_as_the_endpoint(bench):
    files = bench.torchrun(*words(bench, endpoint="{address}:29500"), env=TELLS)
    assert said(files).count(TIMED_OUT) >= 2
    return bench.explain(files)


@fault("different-endpoints")
def one_node_calls_another_port(bench):
    ports = {"n1": ["--rdzv-endpoint=n1:29500"], "n2": ["--rdzv-endpoint=n1:29501"]}
    return bench.explain(bench.torchrun(*words(bench), each=ports, env=TELLS))


@fault("store-refused")
def second_node_comes_when_the_first_has_given_up(bench):
    told = words(bench)
    first = bench.torchrun(*told, hosts=["n1"], env=TELLS)
    assert TIMED_OUT in said(first)
    return bench.explain([*first, *bench.torchrun(*told, hosts=["n2"], env=TELLS)])


@fault("rendezvous-closed")
def node_is_started_again_alone_after_its_end(bench):
    told = words(bench, join_s=15)
    bench.script.write_text(
        "import os, time\ntime.sleep(60) if os.environ['RANK'] == '0' else os._exit(3)\n"
    )
    # As `kubectl logs` shows it: the log of a container's first life is gone.
    again = ("sh", "-c", '[ $(hostname) = n2 ] && "$@" > first 2>&1; exec "$@"', "-")
    return bench.explain(bench.torchrun(*told, before=again, until="RendezvousClosedError"))
