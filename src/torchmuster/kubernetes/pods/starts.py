"""Failed starts: pods that exit before reporting, or that do not come within the user's limit."""

import contextlib
import time
from dataclasses import dataclass, field, replace

from torchmuster.core.model.text import few_of
from torchmuster.core.model.verdict import Report, Result
from torchmuster.errors import JoinTimeoutError, MusterError
from torchmuster.kubernetes.engine.answers import (
    RUN_LABEL,
    Pod,
    policies_on,
    read_objects,
)
from torchmuster.kubernetes.engine.dialect import DIALECT, kubectl_for, place_of
from torchmuster.kubernetes.node.order import AGAIN_CODE, FINAL_CODE, PodOrder
from torchmuster.kubernetes.pods.losses import early_out_of_memory
from torchmuster.kubernetes.pods.reach import NotAllowedError, ask, find_pod, find_pods, log_of
from torchmuster.launcher.model.job import JobState, JobView

# Evidence from the cluster about running pods that can't reach each other; it proves nothing.


MESH = (
    "ask for a namespace or pods without it: `kubectl label namespace NAME istio-injection-` and linkerd.io/inject=disabled;"
    " other webhooks have words of their own, which `directives` of the site can set"
)
KEPT_APART = (
    "their network may keep them apart: names come from the headless Service of the run and the cluster's DNS, and"
    " a NetworkPolicy or the proxy of a mesh has to let all TCP ports between pods of one run pass"
)
_NO_NETWORK = "no network connects all nodes"
_SILENCE = ("no answer", "no agent has connected", _NO_NETWORK)  # from pods whose names resolve
_MOST = 4


def is_kept_apart(result: Result) -> bool:
    """Say whether a run ended because its nodes reach their head but not each other."""
    return result.report is not None and result.report.error.startswith(_NO_NETWORK)


def evidence(job_id: str, whys: str) -> tuple[str, ...]:
    """Return sentences on what may keep a run's pods apart, depending on what they reported."""
    looks = [_of_containers]
    looks += [_of_service] if "name is not known" in whys else []
    looks += [_of_policies] if any(words in whys for words in _SILENCE) else []
    found: list[str] = []
    for look in looks:
        with contextlib.suppress(MusterError):
            found.append(look(job_id))
    return tuple(filter(None, found))


def of_containers(pod: Pod) -> str:
    """Return a sentence on the containers that the cluster added to a pod; empty for none."""
    if not pod.others:
        return ""
    names = few_of([f"`{name}`" for name in pod.others], _MOST)
    return f"the cluster has put {names} into the pods beside muster's container"


def _of_containers(job_id: str) -> str:
    pod = next((pod for pod in find_pods(job_id) if pod.others), None)
    if pod is None:
        return ""
    return (
        f"kubernetes says: {of_containers(pod)}: the proxy of a mesh refuses connections that are not its own,"
        " and keeps the pods from ending"
    )


def _of_service(job_id: str) -> str:
    name = place_of(job_id)[2]
    words = ("get", "services", name, "--ignore-not-found", "-o", "name")
    if ask(kubectl_for(job_id, *words)).strip():
        return f"kubernetes says: the Service {name} is there, which gives the pods their names"
    return f"kubernetes says: the Service {name} is gone, which gives the pods their names"


def _of_policies(job_id: str) -> str:
    _, namespace, name = place_of(job_id)
    asked = ("get", "networkpolicies.networking.k8s.io", "-o", "json")
    try:
        policies = read_objects(ask(kubectl_for(job_id, *asked)))
    except NotAllowedError:
        return "whether NetworkPolicies select these pods is not known: you may not list them"
    words = ("get", "pods", "-l", f"{RUN_LABEL}={name}", "-o", "json")
    pods = read_objects(ask(kubectl_for(job_id, *words)))
    on = dict.fromkeys(
        policy
        for pod in pods
        for policy in policies_on(policies, pod["metadata"].get("labels", {}))
    )
    if on:
        names = ", ".join([*on][:_MOST])
        which, verb = (
            ("the NetworkPolicy", "selects") if len(on) == 1 else ("the NetworkPolicies", "select")
        )
        return f"kubernetes says: {which} {names} of the namespace {verb} these pods"
    return (
        f"kubernetes says: no NetworkPolicy of the namespace {namespace} selects these pods;"
        " those of the network itself, as of Cilium or Calico, are not seen here"
    )


_TWICE = 2  # a start that fails twice in the same way is no accident
_SHOWN_LINES = 5
_WAIT_LONGER = "a longer --join-timeout waits on, and none for as long as it takes; or ask for less"
_VOICE = "muster: "
_WAITS = f"{_VOICE}waiting for "
_NO_ROOM = ("Unschedulable", "SchedulingGated", "FailedCreate")
_NOTE_S = 5.0  # the first pod believes a note for 30 s
_LOG_S, _LAST_LOG_S, _GROWTH = 4.0, 30.0, 1.5  # the first pod reports it every `_LOG_S`
_OWN_CODES = (0, AGAIN_CODE, FINAL_CODE)


@dataclass(slots=True)
class PodStarts:
    """Watches the start of a run's pods, and the cluster's reasons for missing ones."""

    order: PodOrder
    job_id: str
    _since: float = field(default_factory=time.monotonic)
    _last: JobView | None = None
    _all_run: bool = False
    _last_said: str = ""
    _ask_log_at: float = 0.0
    _log_pause_s: float = _LOG_S
    _log_view: JobView | None = None
    _note_at: float = 0.0

    def judge(
        self, view: JobView | None, *, has_begun: bool, has_trained: bool = False
    ) -> Report | None:
        """Return why the run must end; None while it may still begin.

        Args:
            view: The run's Job.
            has_begun: There is a record.
            has_trained: The record has an attempt.
        """
        if view is None:
            return None
        self._all_run = view.state is JobState.RUNNING and view.reason is None
        if view.reason is not None:
            self._last = view
        if not has_begun and (refused := _may_not_look(view)) is not None:
            return refused
        if not has_trained and (view.reason or "").startswith("OOMKilled"):
            with contextlib.suppress(MusterError):
                if report := early_out_of_memory(find_pods(self.job_id)):
                    return report
        if has_begun or view.state not in (JobState.PENDING, JobState.RUNNING):
            return None
        return self._died(view) or self._is_late(view)

    def joined(self, result: Result) -> Result:
        """Add to the result the cluster's reason for missing pods, which the pods can't know."""
        last, report = self._last, result.report
        if report is not None and is_kept_apart(result):
            return self._kept_apart(result, report)
        is_join = result.exit_code == JoinTimeoutError.exit_code
        if report is None or not is_join:
            return result
        if self._all_run or last is None:
            return self._kept_apart(result, report) if not result.attempts else result
        if _is_joined(report):
            return result
        hint = last.wait.hint if last.wait is not None else None
        sentence = f"{last.wait.sentence}: " if last.wait is not None else ""
        because = (f"kubernetes says: {sentence}{last.reason}", *report.because)
        return replace(result, report=replace(report, because=because, hint=hint or report.hint))

    def _kept_apart(self, result: Result, report: Report) -> Result:
        if _is_joined(report):
            return result
        said = evidence(self.job_id, "\n".join((report.error, *report.because)))
        all_run = self._all_run or is_kept_apart(result)
        run = ("kubernetes says: all pods run",) if all_run else ()
        because = (*run, *said, *report.because)
        hint = MESH if any("beside muster's container" in line for line in said) else KEPT_APART
        return replace(result, report=replace(report, because=because, hint=hint))

    def no_room(self, view: JobView | None) -> str:
        """Return why the cluster has no room, if the waiting first pod must be told now."""
        now = time.monotonic()
        if self.order.start_limit_s is not None:  # the user has set a limit
            return ""
        if not lacks_room(view) or now < self._note_at or view is None:
            return ""
        self._note_at = now + _NOTE_S
        return f"{view.wait.sentence if view.wait is not None else view.reason} (as in a queue, this is waited for)"

    def waits_for(self, view: JobView | None) -> str | None:
        """Return what the first pod waits for, if that is new; at first only its log says so.

        Raises:
            EngineError: The cluster can't be queried.
        """
        if view is None or view.state is not JobState.RUNNING:
            return None
        now = time.monotonic()
        if now < self._ask_log_at:
            return None
        is_same, self._log_view = view == self._log_view, view
        self._log_pause_s = min(self._log_pause_s * _GROWTH, _LAST_LOG_S) if is_same else _LOG_S
        self._ask_log_at = now + self._log_pause_s
        first = find_pod(self.job_id, 0)
        if first is None or not first.is_up:
            return None
        said = log_of(self.job_id, first, "--tail=1").strip()
        if not said.startswith(_WAITS) or said == self._last_said:
            return None
        self._last_said = said
        sidecars = of_containers(first)
        return said.removeprefix(_VOICE) + (f"; {sidecars}" if sidecars else "")

    def _is_late(self, view: JobView) -> Report | None:
        limit_s = self.order.start_limit_s
        if view.state is not JobState.PENDING or limit_s is None:
            return None
        if time.monotonic() - self._since < limit_s:
            return None
        said = (f"kubernetes says: {view.reason}",) if view.reason is not None else ()
        sentence = f": {view.wait.sentence}" if view.wait is not None else ""
        return Report(
            error=f"no pod came within {limit_s:.0f} s (--join-timeout){sentence}",
            at=f"job {self.job_id}",
            because=said,
            hint=(view.wait.hint if view.wait is not None else None) or _WAIT_LONGER,
        )

    def _died(self, view: JobView) -> Report | None:
        """Report that two pods ended before anything of ours could run in them."""
        if view.reason is None or not view.reason.startswith("Error"):
            return None
        with contextlib.suppress(MusterError):
            dead = [pod for pod in find_pods(self.job_id) if _died_early(pod)]
            if len(dead) >= _TWICE:
                return self._report(dead[-1])
        return None

    def _report(self, pod: Pod) -> Report:
        text = log_of(self.job_id, pod, "--tail=20")
        lines = [line for line in text.splitlines() if line.strip()][-_SHOWN_LINES:]
        code = pod.end.exit_code if pod.end is not None else None
        error = f"its pods end as soon as they start, with exit code {code}"
        hint = "the image's own Python has to run /muster/start.py: `python` and `run_as` of the site choose it and its user"
        if any("exec format error" in line for line in lines):
            # The runtime has started the container by then, so this is not a StartError.
            error = "the image is made for another processor than that of the node"
            hint = "build it for that too (docker buildx build --platform), or choose nodes by `node_selector`"
        return Report(
            error=error,
            at=f"pod {pod.name} on {pod.node}",
            because=tuple(lines) or ("the pod wrote nothing",),
            hint=hint,
        )


def _may_not_look(view: JobView) -> Report | None:
    """Report that the user may create Jobs but not see them: the run's end would stay unknown."""
    if view.state is not JobState.UNKNOWN or "(Forbidden)" not in (view.reason or ""):
        return None
    report = DIALECT.explain_refusal(view.reason or "")
    error = "the run can't be followed: the cluster does not let you look at its Job and pods"
    return replace(report, error=error, at=f"job {view.job_id}")


def lacks_room(view: JobView | None) -> bool:
    """Say whether a Job waits for room: in a queue, at the scheduler, or for a quota."""
    if view is None or view.state.is_final:
        return False
    return view.state is JobState.HELD or (view.reason or "").startswith(_NO_ROOM)


def _is_joined(report: Report) -> bool:
    return any(line.startswith("kubernetes says") for line in report.because)


def _died_early(pod: Pod) -> bool:
    return (
        pod.end is not None
        and pod.end.exit_code is not None
        and pod.end.exit_code not in _OWN_CODES
    )
