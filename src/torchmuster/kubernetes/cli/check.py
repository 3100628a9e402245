"""`muster engines check NAME` for a cluster, and the cluster's section of a first `muster.toml`."""

import json
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import click

from torchmuster.core.cli.place import row

if TYPE_CHECKING:
    from torchmuster.core.files.layout import RunDir
    from torchmuster.launcher.spec.site import Site

_NODES = 2


def cluster_rows(site: "Site") -> list[dict[str, Any]]:
    """Return what kubectl reports about a site, as rows."""
    from torchmuster.kubernetes.pods.check import check_cluster

    found = check_cluster(dict(site.own_keys), site.queue_name)
    return [row(one.check, ok=one.ok, found=one.words) for one in found]


def try_pods(site: "Site", timeout_s: float) -> list[dict[str, Any]]:
    """Run a probe in two pods as `muster run` does, and return what they found, as rows."""
    from torchmuster.core import proc
    from torchmuster.core.files.layout import RunDir, runs_dir
    from torchmuster.core.owner.create import new_run_id
    from torchmuster.core.owner.record import read_result
    from torchmuster.errors import MissingRecordError
    from torchmuster.kubernetes.pods import probe
    from torchmuster.kubernetes.pods.bring import REACH_RULE, may_reach, place_of_keys

    run_dir = RunDir(os.path.join(runs_dir(), new_run_id("check")))
    own = dict(site.own_keys)
    folders = [line.split(":")[1] for line in own.get("claims", "").split("\n") if ":" in line]
    with tempfile.TemporaryDirectory(prefix="muster-check-") as folder:
        shutil.copy(probe.__file__, os.path.join(folder, "probe.py"))
        for path in _settings(site):
            shutil.copy(path, os.path.join(folder, "muster.toml"))
        words = ["run", "--on", site.name, "--nodes", str(_NODES), "--nproc-per-node", "1"]
        words += ["--max-restarts", "0", "--start", "fresh", "--tee", "none"]
        # The check needs no files, and a user without access to pods can't fetch them.
        can_reach = may_reach(dict(zip(("context", "namespace"), place_of_keys(own), strict=True)))
        words += [] if can_reach else ["--take-within", "0s"]
        words += ["--run-id", os.path.basename(run_dir.path), "probe.py", *folders]
        argv = [sys.executable, "-m", "torchmuster", *words]
        click.echo(f"muster: {_NODES} pods are tried, files in {run_dir.path}", err=True)
        said = proc.ask(["env", "-C", folder, *argv], b"", timeout_s)
        if said.status is None:
            name = os.path.basename(run_dir.path)
            proc.ask([sys.executable, "-m", "torchmuster", "cancel", name], b"", 60.0)
            said_last = f"not done after {timeout_s:g} s: cancelled{_last_of(said.stderr)}"
            return [row("test pods", ok=False, found=said_last)]
    result = read_result(run_dir)
    if result is not None and result.exit_code == MissingRecordError.exit_code and not can_reach:
        words_of = f"both ran to their end; what they found is not told without {REACH_RULE}"
        return [row("test pods", ok=None, found=words_of)]
    found = _findings(run_dir)
    if result is None or result.exit_code or len(found) < _NODES:
        return [row("test pods", ok=False, found=_why_not(run_dir, said.stderr))]
    return pod_rows(found)


def _last_of(stderr: bytes) -> str:
    """Return the last line of output: what the pods or their queue wait for."""
    lines = stderr.decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return f"; {last.removeprefix('muster: ')}" if last else ""


def _settings(site: "Site") -> list[str]:
    """Return the file of the site's section, unless it is the user's own, which is always found."""
    path = site.origin.partition(":")[0]
    return [path] if path.endswith("muster.toml") and os.path.isfile(path) else []


def _findings(run_dir: "RunDir") -> list[dict[str, Any]]:
    found = []
    for rank in range(_NODES):
        try:
            with open(run_dir.rank_log(0, rank)) as log:
                lines = [line for line in log if line.startswith("{")]
            found.append(json.loads(lines[-1]))
        except (OSError, ValueError, IndexError):
            continue
    return found


def _why_not(run_dir: "RunDir", stderr: bytes) -> str:
    from torchmuster.core.owner.record import read_result

    result = read_result(run_dir)
    if result is not None and result.report is not None:
        hint = (result.report.hint,) if result.report.hint else ()
        return ". ".join([result.report.error, *result.report.because[:3], *hint])
    lines = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return ". ".join(lines[-4:]) or "the run left no result"


def pod_rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the probes of all pods found, as rows."""
    first = found[0]
    nodes = ", ".join(f"{one['host']} on {one['node'] or 'a node'}" for one in found)
    rows = [row("test pods", ok=True, found=nodes)]
    python = f"{first['python']}: {first['python_version']}, {first['cpus']} CPUs"
    rows.append(row("python", ok=True, found=f"{python}, {first['processor']}"))
    if "torch" in first:
        rows.append(row("torch", ok=True, found=f"{first['torch']}, {first['gpus']} GPUs"))
    else:
        rows.append(row("torch", ok=False, found=str(first.get("torch_error"))))
    for one in found:
        for other, how in one["reached"].items():
            rows.append(row(f"{one['host']} to {other}", ok=how["ok"], found=how["words"]))
        for path, how in one["folders"].items():
            rows.append(row(f"{path} in {one['host']}", ok=how["ok"], found=how["words"]))
    return rows


def first_section() -> str:
    """Return the section of a first `muster.toml` for the clusters of kubectl's configuration."""
    from torchmuster.errors import MusterError
    from torchmuster.kubernetes.pods.bring import place_of_keys
    from torchmuster.kubernetes.pods.check import contexts, nodes_of, offers_of, queues_of

    lines = ["", "[engines.kube]", 'kind = "kubernetes"']
    try:
        names, current = contexts()
        context, namespace = place_of_keys({})
    except MusterError as error:
        return "\n".join([*lines, f"# no context could be read: {error.what}", ""])
    lines.append(f"context = {json.dumps(context)}")
    lines += [f"#   {name}" for name in names if name != current]
    lines.append(f"namespace = {json.dumps(namespace)}")
    lines.append('# image = "REGISTRY/NAME:TAG"   # with Python 3.11 or later, and your torch')
    try:
        queues = queues_of(context, namespace)
        lines.append(f"queue = {json.dumps(queues[0])}" if len(queues) == 1 else '# queue = "NAME"')
        lines += [f"#   {name}" for name in queues]
    except MusterError:
        lines.append("# queue: no LocalQueue of Kueue could be listed")
    try:
        nodes = nodes_of(context)
        for name, count in sorted(offers_of(nodes).items()):
            lines.append(f"# gpu_resource = {json.dumps(name)}   # {count} on {len(nodes)} nodes")
    except MusterError:
        lines.append('# gpu_resource = "nvidia.com/gpu"   # nodes could not be listed')
    lines += ["# gpus_per_node = 8", '# memory = "64Gi"', '# shm = "16Gi"']
    lines.append(
        '# claims = ["NAME:/home"]   # kubectl get pvc; with home = "/home/muster" runs outlive their pods'
    )
    return "\n".join(lines) + "\n"
