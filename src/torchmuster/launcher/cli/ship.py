"""`--ship-env`: the environment that is packed here, for hosts of ssh and for jobs."""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.launcher.files.environment import PackedEnvironment

_ARCHIVE = "environment.parcel"


def pack_named(named: str) -> "PackedEnvironment":
    """Return the archive of the environment that the user means, saying how it goes.

    Raises:
        UsageError: There is none, or it can't travel.
    """
    from torchmuster.core.files.layout import muster_home
    from torchmuster.launcher.files.environment import find_prefix, pack

    prefix = find_prefix(named, os.environ)
    cache = os.path.join(muster_home(), "cache")
    return pack(prefix, cache, lambda text: click.echo(f"muster: {text}", err=True))


def begin_to_pack(named: str) -> "Callable[[], PackedEnvironment]":
    """Begin to pack beside the way to the hosts; return what waits for the archive, and raises what has kept it from being made.

    Who sends an environment again would wait for half a second of questions and of 20,000 files otherwise.

    Raises:
        UsageError: There is no such environment.
    """
    from torchmuster.launcher.files.environment import find_prefix

    find_prefix(named, os.environ)  # a misspelled path is said before anything is made
    packed: list[PackedEnvironment] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            packed.append(pack_named(named))
        except BaseException as error:  # noqa: BLE001  # it is raised where it is waited for
            failed.append(error)

    # A run that ends before does not wait for it.
    thread = threading.Thread(target=work, name="environment", daemon=True)
    thread.start()

    def wait() -> "PackedEnvironment":
        thread.join()
        if failed:
            raise failed[0]
        return packed[0]

    return wait


def with_shipped(plan: "RunPlan", named: str | None) -> "tuple[RunPlan, PackedEnvironment | None]":
    """Return the plan of a job whose nodes unpack an environment from the run directory, and its archive; both as before without one.

    Raises:
        UsageError: There is none, or it can't travel.
    """
    from torchmuster.core.files.layout import runs_dir
    from torchmuster.core.model.plan import ShippedEnvironment

    if named is None:
        return plan, None
    packed = pack_named(named)
    archive = os.path.join(runs_dir(), plan.run_id, _ARCHIVE)
    shipped = ShippedEnvironment(archive=archive, needs=packed.needs)
    setup = replace(plan.node_setup, shipped=shipped, python_follows=False)
    return replace(plan, node_setup=setup), packed


def place_archive(plan: "RunPlan", packed: "PackedEnvironment | None") -> None:
    """Put the archive into the run directory: a second name of the one in the cache, so nothing takes it away from a job that waits.

    Raises:
        UsageError: It can't be written.
    """
    shipped = plan.node_setup.shipped
    if packed is None or shipped is None:
        return
    with contextlib.suppress(OSError):
        os.link(packed.path, shipped.archive)
        return
    try:
        shutil.copyfile(packed.path, shipped.archive)
    except OSError as error:
        raise UsageError(
            "the environment can't be put into the run directory",
            where=shipped.archive,
            why=str(error),
        ) from error
