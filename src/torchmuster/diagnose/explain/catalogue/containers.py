"""Containers on a node: containerd and runc, Docker, NVIDIA's hook and CDI, Apptainer, enroot and pyxis, podman.

Sources: runc 1.0 to 1.3, Docker 20 to 28, libnvidia-container 1.10 to 1.17, nvidia-container-toolkit 1.13 to 1.17,
Apptainer 1.1 to 1.4 and Singularity 3, enroot 3.4 to 4.0, pyxis 0.15 to 0.21, podman 4 and 5.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_runc = partial(
    KnownMessage,
    source="runc 1.0 to 1.3, Docker 20 to 28, podman 4 and 5",
    tells=Tells.PROVES,
    cause="container-runtime",
)
_nvidia = partial(
    KnownMessage,
    source="libnvidia-container 1.10 to 1.17, nvidia-container-toolkit 1.13 to 1.17",
    tells=Tells.PROVES,
    cause="gpu-runtime",
    confirm="nvidia-smi; nvidia-container-cli info   on the node itself",
)
_apptainer = partial(
    KnownMessage,
    source="Apptainer 1.1 to 1.4, Singularity 3",
    tells=Tells.PROVES,
    cause="container-runtime",
)
_enroot = partial(
    KnownMessage,
    source="enroot 3.4 to 4.0, pyxis 0.15 to 0.21",
    tells=Tells.PROVES,
    cause="container-runtime",
)

ENTRIES: tuple[KnownMessage, ...] = (
    # runc, Docker, podman.
    _runc(
        name="docker.no-program",
        wordings=(
            r"exec: \"?(?P<command>[^\" :]+)\"?: (?:executable file not found in \$?PATH|stat \S+: no such file)",
            r"exec: \"(?P<command2>[^\"]+)\": stat \S+: no such file or directory",
            r"container create failed:.*executable file [`'\"](?P<command3>[^`'\"]+)[`'\"] not found",
        ),
        cause="command-missing",
        error="the image has no program {command}{command2}{command3}",
        advice="give a program that is in the image, with its full path; the entrypoint of the image may replace PATH",
        confirm="docker run --rm --entrypoint sh IMAGE -c 'command -v python'",
    ),
    _runc(
        name="docker.exec-format",
        wordings=(
            r"exec (?P<command>/\S+): exec format error",
            r"standard_init_linux\.go:\d+: exec user process caused:? \"?exec format error",
        ),
        kind="not_executable",
        cause="",
    ),
    _runc(
        name="docker.platform",
        wordings=(
            r"requested image's platform \((?P<other>[^)]+)\) does not match the detected host platform \((?P<name>[^)]+)\)",
            r"no match(?:ing manifest)? for (?:platform|linux/\w+)",
        ),
        cause="wrong-processor",
        tells=Tells.NAMES,
        error="the image is for another processor {other}, the node is {name}",
        advice="build or pull it for this one: docker pull --platform linux/arm64 (or amd64)",
        confirm="docker image inspect IMAGE --format '{{{{.Architecture}}}}'; uname -m",
    ),
    _runc(
        name="docker.daemon",
        wordings=(
            r"Cannot connect to the Docker daemon at (?P<path>\S+?)\. Is the docker daemon running",
            r"permission denied while trying to connect to the Docker (?:daemon|API)",
            r"Got permission denied while trying to connect to the Docker",
        ),
        tells=Tells.NAMES,
        error="the Docker daemon does not run on this node, or this user may not use it {path}",
        advice="start it, or have the user put into the group docker; clusters mostly have apptainer, enroot or podman instead",
        confirm="systemctl status docker; id -nG",
    ),
    _runc(
        name="docker.mount-source",
        wordings=(
            r"invalid mount config for type \"bind\": bind source path does not exist: (?P<path>\S+)",
            r"error mounting \"(?P<path2>[^\"]+)\" to rootfs",
            r"statfs (?P<path3>/\S+?): no such file or directory",
        ),
        cause="volume",
        error="a folder that should be mounted into the container is not there on {here}: {path}{path2}{path3}",
        advice="make it on every node, or mount another",
    ),
    _runc(
        name="docker.shm-and-ulimits",
        wordings=(
            r"error setting rlimit(?:s for ready process| type \d+)?: .*(?:operation not permitted|invalid)",
            r"invalid value .* for flag --(?:ulimit|shm-size)",
        ),
        error="the container's limits could not be set: {words:.160}",
        advice="lower --ulimit to what the daemon or your own login has; rootless containers cannot raise limits",
        confirm="ulimit -H -a",
    ),
    _runc(
        name="docker.name-taken",
        wordings=(
            r"Conflict\. The container name \"(?P<name>[^\"]+)\" is already in use",
            r"the container name \"(?P<name2>[^\"]+)\" is already in use",
        ),
        error="a container named {name}{name2} is there already",
        advice="docker rm -f NAME, or start it with --rm",
    ),
    _runc(
        name="docker.port",
        wordings=(
            r"driver failed programming external connectivity .*port is already allocated",
            r"Bind for (?P<host>[\d.]+):(?P<port>\d+) failed: port is already allocated",
        ),
        kind="port_taken",
        cause="",
    ),
    _runc(
        name="docker.cgroup",
        wordings=(
            r"runc create failed: .*(?:cgroup|cgroups).*",
            r"unable to (?:apply|start unit).*cgroup",
        ),
        tells=Tells.NAMES,
        error="the container's cgroup could not be made: {words:.200}",
        advice="start it on another node; the cgroup driver of runtime and kubelet have to be the same",
        rivals=("node-setup",),
    ),
    _runc(
        name="docker.runtime",
        wordings=(
            r"unknown or invalid runtime name: (?P<name>\S+)",
            r"[Uu]nknown runtime specified:? (?P<name2>\S+)",
            r"no runtime for \"(?P<name3>nvidia)\" is configured",
            r"RuntimeClass(?:\.node\.k8s\.io)? \"?(?P<name4>[^\" ]+)\"? not found",
        ),
        cause="gpu-runtime",
        error="the container engine has no runtime {name}{name2}{name3}{name4}",
        advice="install the NVIDIA Container Toolkit there: nvidia-ctk runtime configure --runtime=docker (or containerd), then restart the engine",
    ),
    _runc(
        name="podman.subuid",
        wordings=(
            r"potentially insufficient UIDs or GIDs available in user namespace",
            r"no subuid ranges found for user \"?(?P<name>[^\" ]+)",
            r"cannot find UID/GID for user (?P<name2>\S+): .*subuid",
            r"newuidmap: (?:write to uid_map failed|uid range)",
        ),
        error="this user has no, or too few, sub-ids, which rootless containers need {name}{name2}",
        advice="the site has to add the user to /etc/subuid and /etc/subgid; or --ignore-chown-errors in storage.conf",
        confirm="grep $USER /etc/subuid /etc/subgid",
    ),
    _runc(
        name="podman.storage-nfs",
        wordings=(
            r"(?:overlay|graphroot|graph).*(?:not supported|is not a supported).*(?:nfs|lustre|over)",
            r"lchown .*: (?:operation not permitted|invalid argument)",
            r"kernel does not support overlay fs: .*",
        ),
        tells=Tells.NAMES,
        error="the engine cannot keep its images on this file system (a network one): {words:.160}",
        advice="put its storage on a local disk: graphroot = /tmp/$USER/containers in ~/.config/containers/storage.conf",
    ),
    # NVIDIA's hook.
    _nvidia(
        name="nvcontainer.driver-not-loaded",
        wordings=(
            r"nvml error: driver not loaded",
            r"driver rpc error: (?:timed out|failed)",
        ),
        error="the NVIDIA driver of the node is not loaded, or does not answer",
        advice="use another node; this one needs its driver loaded, or a reboot after an update of the driver",
    ),
    _nvidia(
        name="nvcontainer.no-library",
        wordings=(
            r"load library failed: (?P<library>libnvidia-ml\.so\S*|libcuda\S*): (?P<why>.+)",
            r"libnvidia-container\S*: cannot open shared object",
        ),
        error="the node has no NVIDIA driver: {library} is not there",
        advice="run it on a node with GPUs, or leave out --gpus, --nv and the nvidia runtime",
    ),
    _nvidia(
        name="nvcontainer.unknown-device",
        wordings=(
            r"device error: (?P<name>\S+): unknown device",
            r"nvidia-container-cli: .*unknown device",
            r"unresolvable CDI devices (?P<name2>\S+)",
            r"CDI device injection failed: (?P<why>.+)",
            r"failed to inject CDI devices",
        ),
        error="the container runtime does not know the GPU that is asked for: it is not on this node, or the description of GPUs (CDI) lacks it {name}{name2} {why}",
        advice="correct --gpus or NVIDIA_VISIBLE_DEVICES; with CDI make its description anew: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
    ),
    _nvidia(
        name="nvcontainer.requirement",
        wordings=(
            r"requirement error: unsatisfied condition: (?P<name>cuda[^,;]*)",
            r"unsatisfied condition: (?P<name2>cuda ?>=? ?[\d.]+)",
        ),
        cause="driver-too-old",
        error="the image needs a newer NVIDIA driver than the node has ({name}{name2})",
        advice="take an image of an older CUDA, or a node with a newer driver; NVIDIA_DISABLE_REQUIRE=1 skips the check where forward compatibility is known to work",
        confirm="nvidia-smi | head -4",
    ),
    _nvidia(
        name="nvcontainer.select-driver",
        wordings=(
            r"could not select device driver \"(?P<name>[^\"]*)\" with capabilities: \[\[gpu",
            r"exec: \"nvidia-container-runtime(?:-hook)?\": executable file not found",
        ),
        error="this node's Docker has no NVIDIA Container Toolkit",
        advice="install nvidia-container-toolkit, then: nvidia-ctk runtime configure --runtime=docker; systemctl restart docker",
    ),
    _nvidia(
        name="nvcontainer.other",
        wordings=(
            r"nvidia-container-cli: (?P<why>(?:initialization|mount|detection|ldcache|container|permission|device|input) error: .+)",
            r"auto-detected mode as ['\"](?:legacy|csv|cdi)['\"]",
        ),
        tells=Tells.NAMES,
        error="NVIDIA's container hook failed: {why}",
        advice="see whether nvidia-smi works on the node itself; in rootless engines set no-cgroups = true in /etc/nvidia-container-runtime/config.toml",
        rivals=("no-gpu", "node-setup"),
    ),
    _nvidia(
        name="nvcontainer.lost-in-container",
        wordings=(r"Failed to initialize NVML: (?P<why>Unknown Error|Insufficient Permissions)",),
        tells=Tells.NAMES,
        error="the container has lost its GPUs, or may not use them: {why}",
        advice="start the container anew with --device=/dev/nvidia0 ... or CDI; with the systemd cgroup driver a daemon-reload on the host takes them away",
        rivals=("no-gpu",),
    ),
    # Apptainer.
    _apptainer(
        name="apptainer.architecture",
        wordings=(
            r"image's architecture \((?P<other>\w+)\) could not run on the host's \((?P<name>\w+)\)",
            r"image targets '(?P<other2>\w+)', cannot run on '(?P<name2>\w+)'",
        ),
        cause="wrong-processor",
        error="the image is built for {other}{other2}, and this node is {name}{name2}",
        advice="build the image on a node of the kind that runs it",
        confirm="uname -m",
    ),
    _apptainer(
        name="apptainer.no-image",
        wordings=(
            r"could not open image (?P<path>\S+?): (?P<why>.+)",
            r"image path \S+ doesn't exist: |stat (?P<path2>\S+\.sif): no such file",
        ),
        cause="image-missing",
        error="the image file could not be opened on {here}: {path}{path2} {why}",
        advice="put it on a file system that all nodes see, and give its full path",
        confirm="ls -l IMAGE   on every node",
    ),
    _apptainer(
        name="apptainer.damaged-image",
        wordings=(
            r"image format not recognized",
            r"not a valid squashfs image|corrupted image",
            r"image partition contains a bad superblock",
            r"while loading SIF.*(?:magic|EOF|invalid)",
        ),
        cause="image-missing",
        error="the image file is no image, or was cut while it was copied or built",
        advice="build or copy it again and compare sizes; a quota may have cut it",
        confirm="apptainer inspect IMAGE; ls -l IMAGE",
    ),
    _apptainer(
        name="apptainer.user-namespace",
        wordings=(
            r"[Ff]ailed to create user namespace: (?P<why>.+)",
            r"user namespaces? (?:is|are) (?:disabled|not (?:available|supported|enabled))",
            r"maximum user namespaces exceeded",
        ),
        error="this node does not let users make their own namespaces, which unprivileged containers need {why}",
        advice="use the site's own apptainer (module load apptainer); it has to be installed with setuid, or the site has to allow user namespaces",
        confirm="sysctl user.max_user_namespaces; unshare -r true",
    ),
    _apptainer(
        name="apptainer.mount",
        wordings=(
            r"mount (?:of )?(?:hook function failure: )?.*mount source (?P<path>\S+) doesn't exist",
            r"while mounting (?P<path2>\S+).*(?P<why>no such file or directory|permission denied|destination .* doesn't exist)",
            r"container creation failed: .*(?P<why2>mount .*)",
        ),
        cause="volume",
        error="a folder could not be bound into the container {path}{path2}: {why}{why2}",
        advice="bind only what exists on every node: --bind SOURCE:TARGET; without underlay the target has to exist in the image",
    ),
    _apptainer(
        name="apptainer.build-rights",
        wordings=(
            r"(?:--fakeroot|fakeroot).*(?:requires|could not use|not allowed).*(?:subuid|mapping|root|setuid)",
            r"You must be the root user, however you can use --remote or --fakeroot",
            r"could not use fakeroot: no mapping entry found in /etc/subuid",
        ),
        error="building the image needs rights of root, or a fakeroot mapping, that this user does not have",
        advice="build it elsewhere and copy the .sif, or ask the site for an entry in /etc/subuid",
    ),
    _apptainer(
        name="apptainer.cache-space",
        wordings=(
            r"while (?:building|making|extracting|unpacking|creating) (?:image|SIF|squashfs).*no space left on device",
            r"(?:packer|bundle|layers?|tmp).*(?:no space left on device).*(?:squashfs|rootfs|layer)",
        ),
        cause="disk-full",
        error="there is no room to unpack the image",
        advice="APPTAINER_TMPDIR and APPTAINER_CACHEDIR to a scratch folder with 50 GB",
        confirm="df -h /tmp $HOME",
    ),
    _apptainer(
        name="apptainer.glibc",
        wordings=(
            r"a shared library is likely missing in the image",
            r"GLIBC_[\d.]+' not found \(required by /\.singularity\.d/libs",
        ),
        tells=Tells.NAMES,
        cause="wrong-library",
        error="libraries that --nv brings from the node do not fit the image, or the image lacks one",
        advice="take an image of a system at least as new as the node's, or bind only the driver's own libraries",
    ),
    _apptainer(
        name="apptainer.no-nv",
        wordings=(
            r"[Cc]ould not find any (?:nv|rocm|nvidia) (?:files|libraries|binaries) on this host",
        ),
        tells=Tells.HINTS,
        cause="no-gpu",
        error="apptainer found no NVIDIA driver on this node, so --nv brought nothing in",
        advice="run it on a node with GPUs",
        confirm="nvidia-smi   on the node itself",
    ),
    # enroot and pyxis.
    _enroot(
        name="pyxis.import",
        wordings=(
            r"pyxis: (?:failed to import docker image|importer \S+ failed)",
            r"URL (?P<path>\S+) returned error code: (?P<why>\d+ ?.*)",
            r"Could not (?:parse|process|retrieve) (?:authentication realm|digest information|digest|JSON)",
        ),
        cause="image-missing",
        error="enroot could not fetch the image {path} {why}",
        advice="write it as REGISTRY#NAME:TAG, put the login into ~/.config/enroot/.credentials, or import it once to a .sqsh file and give its path",
        confirm="enroot import docker://IMAGE",
    ),
    _enroot(
        name="pyxis.image-file",
        wordings=(
            r"\[ERROR\] No such file or directory: (?P<path>\S+)",
            r"\[ERROR\] Invalid image (?:format|reference): (?P<path2>\S+)",
        ),
        tells=Tells.NAMES,
        cause="image-missing",
        error="enroot did not find the image, or does not know its form: {path}{path2}",
        advice="give the path of a .sqsh file that all nodes see, or REGISTRY#NAME:TAG",
    ),
    _enroot(
        name="pyxis.mount",
        wordings=(
            r"pyxis: --container-mounts: source path does not exist: (?P<path>\S+)",
            r"enroot-mount: failed to mount: (?P<path2>\S+) at (?P<name>\S+): (?P<why>.+)",
        ),
        cause="volume",
        error="a folder could not be mounted into the container {path}{path2}: {why}",
        advice="mount only what exists on every node of the job",
        confirm="srun --ntasks-per-node=1 ls -d FOLDER",
    ),
    _enroot(
        name="pyxis.space",
        wordings=(
            r"Not enough space left in (?P<path>\S+) \((?P<need>\d+) KB needed\)",
            r"enroot.*No space left on device",
        ),
        cause="disk-full",
        error="enroot has no room to unpack the image in {path} ({need} KB needed)",
        advice="set ENROOT_CACHE_PATH, ENROOT_DATA_PATH and ENROOT_TEMP_PATH to a larger disk; in memory the image counts against --mem",
        confirm="df -h PATH   on that node",
    ),
    _enroot(
        name="pyxis.nvidia-hook",
        wordings=(
            r"\[ERROR\] (?P<path>\S*hooks\.d/\S+) exited with return code (?P<code>\d+)",
            r"\[ERROR\] Command not found: (?P<name>nvidia-container-cli|nvidia-smi)",
        ),
        cause="gpu-runtime",
        error="a hook of enroot failed: {path}{name}",
        advice="the GPU hook needs nvidia-container-cli on the node; unset NVIDIA_VISIBLE_DEVICES where there are no GPUs",
        tells=Tells.NAMES,
        rivals=("no-gpu",),
    ),
    _enroot(
        name="pyxis.start",
        wordings=(
            r"pyxis: (?:failed to start container|container start failed|container exited too soon|child \d+ (?:failed|terminated))",
            r"pyxis: (?:couldn't start container|failed to create container filesystem)",
        ),
        tells=Tells.NAMES,
        error="pyxis could not start the container: {words:.160}",
        advice="read the lines of enroot below it; --no-container-entrypoint helps with unusual images",
        rivals=("disk-full", "image-missing"),
    ),
    _enroot(
        name="pyxis.another-task",
        wordings=(
            r"pyxis: (?:container was not started successfully by another task|a previous task terminated unexpectedly)",
        ),
        tells=Tells.ECHO,
        cause="",
    ),
    _enroot(
        name="pyxis.progress",
        wordings=(
            r"pyxis: (?:importing|imported|starting container|creating|reusing|removing|ignoring) ",
            r"\[INFO\] (?:Querying registry|Fetching image|Downloading|Extracting image|Converting)",
        ),
        tells=Tells.NOISE,
        cause="",
    ),
    KnownMessage(
        name="container.container-driver-error",
        wordings=(r"nvidia-container-cli: initialization error: (?P<why>.+?)(?:: unknown)?$",),
        source="libnvidia-container 1.4 to 1.17",
        tells=Tells.NAMES,
        cause="gpu-runtime",
        error="the NVIDIA container runtime could not talk to the driver of this node: {why:.160}",
        advice="check the driver on the node itself first (nvidia-smi outside of a container); without one, start without --gpus",
        confirm="nvidia-smi; nvidia-container-cli -k -d /dev/stderr info   on that node",
    ),
    KnownMessage(
        name="container.container-shell",
        wordings=(
            r"enroot-switchroot: failed to execute: (?P<program>\S+)",
            r"(?:exec|OCI runtime exec).{0,60}(?P<program>/bin/(?:ba)?sh).{0,60}no such file",
        ),
        source="enroot 3.4 enroot-switchroot.c; runc",
        tells=Tells.PROVES,
        cause="command-missing",
        error="the container image has no {program}, so nothing could be started in it",
        advice="use an image with a shell, or give the program with its full path as it is in the image",
    ),
)
