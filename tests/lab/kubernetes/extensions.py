"""Kueue and JobSet on the cluster of the tests: their managers as processes beside the control plane, with real webhooks.

KUBE_BIN may hold, beside the programs of the cluster, `kueue-manager` and `kueue.yaml`, `jobset-manager` and `jobset.yaml`:
each project's program, and the manifests of the same release as it publishes them. All of these are made but the Deployment.
"""

import base64
import json

import yaml

from kit.waiting import wait_until
from lab.kubernetes import programs
from lab.kubernetes.house import ADDRESS

PORTS = {"jobset": 9444, "kueue": 9443}
# In a mount namespace of its own: both look for their certificates at this path.
CERTIFICATES = "/tmp/k8s-webhook-server/serving-certs"
INSIDE = f'mount -t tmpfs lab /tmp; mkdir -p {CERTIFICATES}; mount --bind "$1" {CERTIFICATES}; shift; exec "$@"'
LIMIT_S = 90.0


def why_not(name):
    """Return why an extension can't be there; None where it can."""
    files = (f"{name}-manager", f"{name}.yaml")
    lacks = [file for file in files if not (programs.folder() / file).exists()]
    return f"KUBE_BIN lacks {' and '.join(lacks)}" if lacks else None


def start(cluster, name):
    """Start an extension and wait until it admits what is made."""
    objects = list(yaml.safe_load_all((programs.folder() / f"{name}.yaml").read_text()))
    folder = cluster.folder / name
    (folder / "certificates").mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(_config(name, objects)))
    # Before its webhooks: they would keep it from what it makes itself.
    late = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    early = [thing for one in objects if one["kind"] not in late for thing in _fitted(name, one)]
    cluster.create(*early)
    cluster.create(*(one for one in objects if one["kind"] in late))
    # It would offer an API of its own at a port and in a folder of the machine.
    gates = ["--feature-gates=VisibilityOnDemand=false"] if name == "kueue" else []
    program = [programs.folder() / f"{name}-manager", f"--config={folder}/config.yaml", *gates]
    inside = ["unshare", "--mount", "sh", "-ec", INSIDE, "-", folder / "certificates"]
    words = ["env", f"KUBECONFIG={cluster.admin}", *inside, *program]
    cluster.start_words(f"{name}-manager", words)
    secret = next(one for one in objects if one["kind"] == "Secret")["metadata"]
    wait_until(lambda: _mount(cluster, secret, folder / "certificates"), "certificates", LIMIT_S)
    wait_until(lambda: _admits(cluster, name), f"the webhooks of {name}", LIMIT_S)


def _config(name, objects):
    """Return the configuration of a release, for a process that is alone on this machine."""
    (kept,) = [one for one in objects if one["kind"] == "ConfigMap"]
    config = yaml.safe_load(next(iter(kept["data"].values())))
    config["leaderElection"] = {"leaderElect": False}
    config["health"] = {"healthProbeBindAddress": f"127.0.0.1:{PORTS[name] + 10}"}
    config["metrics"] = {"bindAddress": "0"}
    config["webhook"] = {"port": PORTS[name]}
    if name == "kueue":
        config["namespace"] = kept["metadata"]["namespace"]
        config["integrations"] = {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]}
        names = {"webhookServiceName": "kueue-webhook-service"}
        names["webhookSecretName"] = "kueue-webhook-server-cert"
        config["internalCertManagement"] = {"enable": True, **names}
    return config


def _fitted(name, one):
    """Yield an object as it fits a manager that is no pod: its Service leads to the control plane's address."""
    if one["kind"] in ("Deployment", "APIService"):
        return
    if one["kind"] == "Service":
        del one["spec"]["selector"]
        place = {key: one["metadata"][key] for key in ("name", "namespace")}
        ports = [{**port, "port": PORTS[name]} for port in one["spec"]["ports"]]
        for port in ports:
            port.pop("targetPort", None)
        yield {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**place, "labels": {"kubernetes.io/service-name": place["name"]}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [ADDRESS]}],
            "ports": ports,
        }
    yield one


def _mount(cluster, secret, folder):
    """Do what a kubelet would: write the Secret's files; say whether there are some."""
    found = cluster.get("secret", secret["name"], "-n", secret["namespace"]).get("data", {})
    for name, text in found.items():
        (folder / name).write_bytes(base64.b64decode(text))
    return "tls.crt" in found


def _admits(cluster, name):
    text = json.dumps(_ADMITTED[name])
    done = cluster.try_kubectl("create", "--dry-run=server", "-f", "-", text=text)
    return done.returncode == 0


_CONTAINER = {"name": "c", "image": "x"}
_JOB = {"template": {"spec": {"restartPolicy": "Never", "containers": [_CONTAINER]}}}
_ADMITTED = {
    "kueue": {
        "apiVersion": "kueue.x-k8s.io/v1beta1",
        "kind": "ResourceFlavor",
        "metadata": {"name": "tried"},
    },
    "jobset": {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "tried", "namespace": "default"},
        "spec": {"replicatedJobs": [{"name": "a", "template": {"spec": _JOB}}]},
    },
}
