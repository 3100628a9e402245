"""Set-ups in which nothing is wrong: `doctor` finds nothing above a warning, `explain` says healthy."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kit.command import SOURCE
from lab.live.case import CAREFUL, NAMES, Bench, chosen, train
from lab.netlab import HSN, Host, Network
from lab.parts import USUAL

pytestmark = pytest.mark.netns
SETUPS: list["Setup"] = []


@dataclass(frozen=True)
class Setup:
    """A healthy set-up.

    Attributes:
        use: Uses it and returns what was said.
        quick: Whether `make test-all` does it too.
        hosts: The hosts of a lab of its own; None for the two careful ones that all share.
        networks: Of that lab.
    """

    name: str
    use: Callable
    quick: bool = False
    hosts: tuple[Host, ...] | None = None
    networks: tuple[Network, ...] = USUAL


def healthy(*, quick=False, hosts=None, networks=USUAL):
    """Enter a function in the list of set-ups; its name is the set-up's."""

    def enter(use):
        SETUPS.append(Setup(use.__name__, use, quick, hosts, networks))
        return use

    return enter


def look(name, hosts, *words, networks=USUAL, prepare=lambda bench: None, quick=False):
    """Enter a set-up in which `muster doctor` looks at hosts before any job."""

    def use(bench):
        prepare(bench)
        return bench.doctor(*words)

    SETUPS.append(Setup(name, use, quick, hosts, networks))


# Hosts as they may be: doctor has nothing against them.

LARGE = Network(name="hsn0", subnet="10.10.0", mtu=9000)
FAST = Network(name="hsn0", subnet="10.10.0", rate="1gbit")
SECOND = Network(name="ib0", subnet="10.20.0")
LONG = ("compute-node-0001-rack-17-chassis-3-slot-2", "compute-node-0002-rack-17-chassis-3-slot-2")
TRIO = (*NAMES, "10.10.0.3 n3")


def give_ipv6(bench):
    """Give each host an address of IPv6 beside the other."""
    for number, host in enumerate(bench.lab.hosts, 1):
        words = ["ip", "-6", "addr", "add", f"fd00:10::{number}/64", "dev", "hsn0", "nodad"]
        assert bench.lab.run(host, words).returncode == 0


def widen_bridge(bench):
    """Let the bridge's ends of the interfaces take large frames too."""
    ports = "ip -o link show master hsn0 | cut -d' ' -f2 | cut -d@ -f1 | xargs -I@ ip link set @ mtu 9000"
    enter = ["nsenter", "-t", str(bench.lab.house.pid), "-n", "sh", "-c", ports]
    subprocess.run(enter, check=True)


def put_script(bench):
    """Write a script into a folder with spaces in its name."""
    folder = bench.lab.shared / "my first project"
    folder.mkdir(exist_ok=True)
    (folder / "train me.py").write_text(train())


look("careful_hosts", None, quick=True)
look("careless_hosts", (Host("n1"), Host("n2")), quick=True)
look("one_host", (Host("n1", hosts=NAMES[:1]),))
look("three_hosts", tuple(Host(name, hosts=TRIO) for name in ("n1", "n2", "n3")))
look("one_network", tuple(Host(h.name, hosts=NAMES, networks=("hsn0", "mgmt0")) for h in CAREFUL))
look("two_fast_networks", CAREFUL, networks=(HSN, SECOND, *USUAL[1:]))
look("both_families_of_addresses", CAREFUL, prepare=give_ipv6)
look("large_frames", CAREFUL, networks=(LARGE, *USUAL[1:]), prepare=widen_bridge)
look("a_network_of_1_gbit", CAREFUL, networks=(FAST, *USUAL[1:]))
look("no_shared_folder", tuple(Host(h.name, hosts=NAMES, shared=False) for h in CAREFUL))
look(
    "hosts_without_torchmuster",
    tuple(Host(h.name, hosts=NAMES, python="venv", hide=(SOURCE,)) for h in CAREFUL),
)
look(
    "long_names",
    tuple(Host(n, hosts=(f"10.10.0.1 {LONG[0]}", f"10.10.0.2 {LONG[1]}")) for n in LONG),
)


@healthy()
def script_in_a_folder_with_spaces(bench):
    put_script(bench)
    return bench.doctor("--script", "my first project/train me.py")


# Runs of torchrun that end well.


def trained(bench, *words, **parts):
    """Train with torchrun, look that it ended well, and return what explain says of it."""
    bench.script.write_text(train(**parts))
    files = bench.torchrun(*bench.usual(), *words, str(bench.script))
    last = files[0].read_text(errors="replace")
    assert "step 7 " in last, last
    return bench.explain(files)


@healthy(quick=True)
def torchrun_that_says_nothing_bad(bench):
    return trained(bench)


@healthy()
def metric_is_called_error(bench):
    return trained(
        bench,
        at_step="print(f'val_error: {0.31 - step / 50:.3f} failed_batches=0 killed: 0', flush=True)",
    )


@healthy()
def warnings_of_many_kinds(bench):
    frightening = """
import warnings, logging
warnings.warn('NCCL error handling is deprecated; the fatal error flag will be removed', stacklevel=2)
logging.error('retrying: connection to tracking server failed, will try again')
logging.warning('CUDA initialization: no CUDA device found, the CPU is used')
"""
    return trained(bench, before=frightening)


@healthy(quick=True)
def exception_that_is_caught_and_shown(bench):
    skipping = """
try:
    1 / (step - 3)
except ZeroDivisionError:
    import traceback
    traceback.print_exc()
    print('skipping a bad batch', flush=True)
"""
    return trained(bench, at_step=skipping.strip())


@healthy()
def torchrun_restart_that_recovers(bench):
    failing = "if step == 3 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise RuntimeError('flaky storage')"
    told = trained(bench, "--max-restarts=2", at_step=failing)
    assert "RuntimeError: flaky storage" in told.text
    return told


@healthy()
def loss_that_is_not_a_number_for_a_step(bench):
    return trained(
        bench,
        at_step="print('grad norm inf, loss nan: step skipped, scale halved', flush=True) if step == 2 else 0",
    )


@healthy()
def evaluation_that_takes_long(bench):
    return trained(
        bench, at_step="print('evaluating', flush=True); time.sleep(3) if step == 4 else 0"
    )


@healthy()
def uneven_batches_that_are_joined(bench):
    joining = """
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
with net.join():
    for _ in range(4 + 3 * RANK):
        net(torch.ones(1, 2)).sum().backward()
print('training finished', flush=True)
"""
    return trained(bench, after=joining.strip())


@healthy()
def torchrun_on_one_node(bench):
    bench.script.write_text(train())
    words = ("--standalone", "--nproc-per-node=2", str(bench.script))
    return bench.explain([bench.torchrun(*words)[0]])


# Runs of muster that end well.


@healthy(quick=True)
def muster_run(bench):
    bench.script.write_text(train())
    return bench.muster(str(bench.script))


@healthy()
def muster_restart_that_recovers(bench):
    failing = "if RANK == 1 and step == 3 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), 9)"
    bench.script.write_text(train(at_step=failing))
    told = bench.muster("--max-restarts", "2", str(bench.script))
    assert "the run made 2 attempts" in told.notes
    return told


@healthy()
def muster_with_a_script_that_handles_sigterm(bench):
    handling = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('SIGTERM: saving', flush=True))"
    asking = "if step == 3: os.kill(os.getpid(), signal.SIGTERM)"
    bench.script.write_text(
        train(before=handling, at_step=asking, after="print('all done', flush=True)")
    )
    told = bench.muster(str(bench.script))
    assert "SIGTERM: saving" in told.text
    return told


@healthy()
def muster_with_a_long_evaluation_of_one_rank(bench):
    bench.script.write_text(
        train(at_step="if step == 4 and RANK == 0: time.sleep(5)", timeout_s=60)
    )
    return bench.muster("--hang-timeout", "30s", str(bench.script))


def check(told):
    found = json.JSONDecoder().raw_decode(told.text)[0] if told.text.startswith("{") else {}
    if found.get("findings"):
        assert not [one for one in found["findings"] if one["level"] == "failure"], told.text
    else:
        assert told.first == "healthy", told.text


@pytest.mark.parametrize("setup", chosen([one for one in SETUPS if one.hosts is None]))
def test_nothing_is_found_wrong(setup, bench):
    check(setup.use(bench))


@pytest.mark.parametrize("setup", chosen([one for one in SETUPS if one.hosts is not None]))
def test_nothing_is_found_wrong_with_other_hosts(setup, make_lab, tmp_path):
    check(setup.use(Bench(make_lab([*setup.hosts], networks=setup.networks), tmp_path)))


def test_there_are_enough_set_ups_and_some_of_them_in_every_run():
    assert len(SETUPS) >= 20
    assert sum(setup.quick for setup in SETUPS) >= 4
    assert len({setup.name for setup in SETUPS}) == len(SETUPS)
