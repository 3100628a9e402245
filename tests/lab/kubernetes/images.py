"""The images of a cluster without a registry: empty folders, into which the runtime binds this machine's programs.

So a pod runs the Python and the torch of these tests, and nothing is copied.
"""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

POD_IMAGE = "localhost/muster/pod:1"
TUTORIAL_IMAGE = "nvcr.io/nvidia/pytorch:24.03-py3"  # that of the tutorial's workflow files
PAUSE_IMAGE = "localhost/muster/pause:1"
PAUSE = ("/bin/sleep", "infinity")
FOLDERS = ("dev", "etc", "home", "mnt", "opt", "proc", "run", "sys", "usr", "var/log")
OPEN_FOLDERS = ("tmp", "var/tmp")
LINKS = ("bin", "sbin", "lib", "lib64")
FILES = ("passwd", "group", "nsswitch.conf", "ld.so.cache")


def bound():
    """Return the folders that pods see, read-only: those of the system's programs and of this Python."""
    wanted = {"/usr", "/opt", sys.base_prefix, sys.prefix, os.path.realpath(sys.base_prefix)}
    found = []
    for path in sorted(filter(os.path.isdir, wanted)):
        if not any(path.startswith(f"{other}/") for other in found):
            found.append(path)
    return found


def write_images(path):
    """Write both images, the first under two names, as one archive for `ctr images import`."""
    manifest = []
    with tarfile.open(path, "w") as archive:
        for names, layer, command in (
            ((POD_IMAGE, TUTORIAL_IMAGE), _empty_layer(), ("/bin/sh",)),
            ((PAUSE_IMAGE,), _layer_of(PAUSE[0]), PAUSE),
        ):
            digest = hashlib.sha256(layer).hexdigest()
            _add(archive, f"{digest}/layer.tar", layer)
            text = json.dumps(_config(command, digest)).encode()
            config = f"{hashlib.sha256(text).hexdigest()}.json"
            _add(archive, config, text)
            layers = [f"{digest}/layer.tar"]
            manifest.append({"Config": config, "RepoTags": names, "Layers": layers})
        _add(archive, "manifest.json", json.dumps(manifest).encode())


def write_spec(ctr, path):
    """Write the runtime's own specification of a container, with the folders of this machine bound into it."""
    said = subprocess.run([ctr, "oci", "spec"], capture_output=True, check=True).stdout
    spec = json.loads(said)
    options = ["rbind", "ro", "rprivate", "nosuid"]
    mounts = [one for one in spec["mounts"] if one["destination"] != "/run"]
    mounts += [
        {"destination": one, "type": "bind", "source": one, "options": options} for one in bound()
    ]
    Path(path).write_text(json.dumps({**spec, "mounts": mounts}))


def _config(command, digest):
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {
        "architecture": {"aarch64": "arm64"}.get(os.uname().machine, "amd64"),
        "os": "linux",
        "config": {
            "Cmd": list(command),
            "Env": [f"PATH={path}", "LANG=C.UTF-8"],
            "WorkingDir": "/tmp",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }


def _layer_of(program):
    """Return a program with its libraries: nothing is bound into the container that holds a pod's network."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in (program, *re.findall(r"(/\S+) \(0x", said)):
            _add(archive, path.lstrip("/"), Path(path).read_bytes(), mode=0o755)
    return buffer.getvalue()


def _empty_layer():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in (*FOLDERS, *OPEN_FOLDERS):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name in OPEN_FOLDERS else 0o755
            archive.addfile(folder)
        for name in LINKS:
            if os.path.islink(f"/{name}"):
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, os.readlink(f"/{name}")
                archive.addfile(link)
        for name in FILES:
            if (path := Path("/etc") / name).is_file():
                _add(archive, f"etc/{name}", path.read_bytes())
    return buffer.getvalue()


def _add(archive, name, data, mode=0o644):
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), mode
    archive.addfile(info, io.BytesIO(data))
