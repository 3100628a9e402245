"""Files, downloads and data: hubs, archives, tokenizers, network file systems, object stores, certificates.

Sources: huggingface_hub 0.10 to 0.36, datasets 2 to 4, safetensors, CPython zipfile and tarfile, h5py 3, PIL 8 to 12,
webdataset, Lustre 2.12 to 2.16, NFS of Linux, GPFS 5, BeeGFS 7, botocore, google-cloud-storage, OpenSSL.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_hub = partial(
    KnownMessage,
    source="huggingface_hub 0.10 to 0.36, transformers utils/hub.py, datasets 2 to 4",
    tells=Tells.PROVES,
    is_raised=True,
    cause="hub-refused",
)
_file = partial(
    KnownMessage,
    source="CPython 3.8 to 3.14, safetensors, torch.load, h5py, PIL, pyarrow",
    tells=Tells.PROVES,
    is_raised=True,
    cause="data-broken",
)
_mount = partial(
    KnownMessage,
    source="Lustre 2.12 to 2.16, Linux NFS client, GPFS 5, BeeGFS 7",
    tells=Tells.NAMES,
    cause="mount-lost",
)
_cloud = partial(
    KnownMessage,
    source="botocore, s3fs, google-cloud-storage, azure-storage",
    tells=Tells.PROVES,
    cause="cloud-login",
)
_AGAIN = "delete it and fetch or write it again; write to a temporary name and rename, so that nobody reads half a file"

ENTRIES: tuple[KnownMessage, ...] = (
    # Hubs.
    _hub(
        name="hub.gated",
        wordings=(
            r"You are trying to access a gated repo",
            r"GatedRepoError|Access to model (?P<name>\S+) is restricted",
            r"Cannot access gated repo for url (?P<name2>\S+)",
        ),
        error="the model is gated: this token has no access to it {name}{name2}",
        advice="accept its conditions on its page, and give the job the token: export HF_TOKEN=... (or hf auth login)",
        confirm="hf auth whoami",
    ),
    _hub(
        name="hub.not-found",
        wordings=(
            r"RepositoryNotFoundError|(?P<name>\S+) is not a local folder and is not a valid model identifier",
            r"Repository Not Found for url: (?P<name2>\S+?)\.?$",
            r"DatasetNotFoundError: (?P<why>.+)|RevisionNotFoundError",
            r"Repo id must (?:be in the form|use alphanumeric).*: '(?P<path>[^']+)'",
        ),
        tells=Tells.NAMES,
        error="the hub knows no such model or data set, or it is private, or the local folder is not there: {name}{name2}{path}{why}",
        advice="correct the name; for a local folder see that it exists on every node; for a private one set HF_TOKEN",
        confirm="ls -d PATH   on every node; hf auth whoami",
        rivals=("file-missing",),
    ),
    _hub(
        name="hub.token",
        wordings=(
            r"Invalid user token|Invalid credentials in Authorization header|Token is required \(",
            r"LocalTokenNotFoundError|(?:401|403) Client Error: (?:Unauthorized|Forbidden) for url: https?://(?:\S*\.)?(?:huggingface\.co|hf\.co)\S*",
        ),
        tells=Tells.NAMES,
        error="the hub did not accept the token of this job, or it has none",
        advice="export HF_TOKEN in the job (a token with the right to read), and unset an old one",
        confirm="hf auth whoami",
    ),
    _hub(
        name="hub.offline",
        wordings=(
            r"couldn't connect to 'https://huggingface\.co' to load (?:this|the) files?",
            r"LocalEntryNotFoundError|OfflineModeIsEnabled",
            r"outgoing traffic has been disabled",
            r"(?:Couldn't reach|Cannot reach) .* on the Hub",
            r"An error happened while trying to locate the file on the Hub and we cannot find the requested files in the local cache",
        ),
        cause="download-failed",
        error="the hub cannot be reached from this node (or HF_HUB_OFFLINE is set), and the files are not in the cache",
        advice="fetch them before the job on the login node: hf download NAME, with HF_HOME on a file system that the nodes see",
        confirm="curl -sSI https://huggingface.co   on that node; ls $HF_HOME/hub",
    ),
    _hub(
        name="hub.rate",
        wordings=(
            r"429 Client Error: Too Many Requests for url: https?://\S*(?:huggingface|hf)\S*",
            r"We had to rate limit you",
        ),
        cause="download-failed",
        error="the hub takes no more requests from this address",
        advice="let one rank per node fetch first (or fetch before the job), then HF_HUB_OFFLINE=1",
    ),
    _hub(
        name="hub.file-not-in-repo",
        wordings=(
            r"does not appear to have (?:a )?files? named (?P<name>.+?)(?:\. Checkout|$)",
            r"EntryNotFoundError|Error no file named (?P<name2>.+?) found in directory (?P<path>\S+)",
            r"Can't load (?P<name3>tokenizer|image processor|feature extractor|the model|config\w*) for '(?P<path2>[^']+)'",
        ),
        cause="file-missing",
        tells=Tells.NAMES,
        error="the model's folder or repository lacks a file: {name}{name2}{name3} {path}{path2}",
        advice="give the folder that has config.json and the weights; a download or save that was cut leaves it incomplete",
        confirm="ls -l PATH",
        rivals=("data-broken", "hub-refused"),
    ),
    _hub(
        name="hub.remote-code",
        wordings=(
            r"requires you to execute the (?:configuration|modeling|tokenizer|dataset script|custom).*trust_remote_code",
            r"contains custom code which must be executed to correctly load|Please pass the argument `trust_remote_code=True`",
            r"Dataset scripts are no longer supported, but found (?P<name>\S+)",
        ),
        cause="config-refused",
        error="the model or data set brings its own code, which is not run unless it is allowed",
        advice="trust_remote_code=True, if you trust it; datasets 4 runs no scripts any more: install datasets<4, or use a converted version",
    ),
    _hub(
        name="datasets.generation",
        wordings=(
            r"DatasetGenerationError|An error occurred while generating the dataset",
            r"NonMatchingSplitsSizesError|ExpectedMoreDownloadedFiles",
            r"(?:DataFilesNotFoundError|EmptyDatasetError): (?P<why>.+)|doesn't contain any data files",
        ),
        tells=Tells.HINTS,
        cause="file-missing",
        error="the data set could not be made: {words:.200}",
        advice="read the exception above it; prepare it once before the job, then load it on all ranks",
    ),
    _hub(
        name="tokenizers.damaged",
        wordings=(
            r"(?:data did not match any variant of untagged enum \w+|Unable to load vocabulary from file)",
            r"Couldn't instantiate the backend tokenizer",
            r"not a string.*sentencepiece|could not parse ModelProto from (?P<path>\S+)",
        ),
        cause="data-broken",
        tells=Tells.NAMES,
        error="the tokenizer's file cannot be read {path}: a newer format than the library knows, or damaged",
        advice="pip install -U tokenizers transformers sentencepiece protobuf; else fetch the file again (git lfs leaves small text files instead)",
        confirm="ls -l tokenizer.json tokenizer.model; head -c 200 tokenizer.model",
        rivals=("versions-differ", "package-missing"),
    ),
    # Damaged files.
    _file(
        name="file.safetensors",
        wordings=(
            r"Error while deserializing header: (?P<why>.+)",
            r"SafetensorError: (?P<why2>(?:invalid|incomplete|file not fully|header|Metadata).*)",
            r"MetadataIncompleteBuffer|InvalidHeader\w*|HeaderTooLarge|HeaderTooSmall",
        ),
        cause="checkpoint-broken",
        error="a .safetensors file is cut or is none: {why}{why2}",
        advice="fetch it again, or take the checkpoint before; a file of a few hundred bytes is a pointer of git lfs: git lfs pull",
        confirm="ls -l *.safetensors",
    ),
    _file(
        name="file.hdf5",
        wordings=(
            r"(?:Unable|unable) to (?:synchronously )?open file \((?:truncated file|file signature not found|bad object header).*",
            r"Can't (?:synchronously )?read data \((?:filter returned failure|wrong B-tree signature|inflate).*",
        ),
        error="an HDF5 file is cut or damaged: {words:.160}",
        advice=_AGAIN,
        confirm="h5ls FILE",
    ),
    _file(
        name="file.parquet",
        wordings=(
            r"ArrowInvalid: (?P<why>(?:Parquet (?:magic bytes|file size)|Not an Arrow file|JSON parse error|Could not open Parquet|Couldn't deserialize|Tried reading schema).*)",
            r"LmdbError|lmdb\.(?:CorruptedError|InvalidError|PageNotFoundError)|MDB_(?:CORRUPTED|INVALID|PAGE_NOTFOUND)",
        ),
        error="a file of the data set is cut or damaged: {words:.200}",
        advice=_AGAIN,
    ),
    _file(
        name="file.json-config",
        wordings=(r"It looks like the config file at '(?P<path>[^']+)' is not a valid JSON file",),
        tells=Tells.NAMES,
        error="a JSON file is empty, cut or damaged {path}",
        advice="look at it: several ranks that write the same file do this; write it on rank 0 only, under a temporary name",
        rivals=("exception",),
    ),
    # Network file systems.
    _mount(
        name="lustre.lost",
        wordings=(
            r"LustreError: .*(?:Connection to \S+ .*(?:was lost|timed out)|operation \w+ .*(?:failed|timed out)|can't connect|not available)",
            r"Lustre: .*Connection to (?P<name>\S+) \(at (?P<host>[^)]+)\) was lost",
        ),
        error="the node lost a server of Lustre {name} {host}",
        advice="start again when it is back: lfs check servers; keep checkpoints until then, and tell the site",
        confirm="lfs check servers   on that node",
        rivals=("link-down",),
    ),
    _mount(
        name="lustre.evicted",
        wordings=(r"This client was evicted by (?P<name>\S+); in progress operations",),
        tells=Tells.PROVES,
        error="the node was cast out by a server of Lustre ({name}): what it had open there failed",
        advice="exclude the node and start again; tell the site: its network or memory was stuck",
        confirm="dmesg | grep -i lustre   on that node",
    ),
    _mount(
        name="lustre.slow",
        wordings=(
            r"Lustre: .*(?:Request sent has (?:timed out|failed)|slow reply)",
            r"nfs: server (?P<host>\S+) (?:not responding, (?:still trying|timed out))",
        ),
        error="a file server did not answer for a long time {host}",
        advice="look whether ranks stood still since then; read fewer small files at once (archives, a copy on the node's own disk)",
        confirm="ps -eo pid,stat,wchan:30,cmd | awk '$2 ~ /D/'   on that node",
        rivals=("blocked-in-kernel",),
    ),
    _mount(
        name="nfs.back",
        wordings=(
            r"nfs: server \S+ OK",
            r"Lustre: .*Connection restored to",
        ),
        tells=Tells.NOISE,
        cause="",
        kind="recovered",
    ),
    _mount(
        name="gpfs.lost",
        wordings=(
            r"mmfs\w*: .*(?:[Uu]nmount|[Ss]tale|panic|expelled|Lost membership|Disk failure)",
            r"\[[EWX]\] .*(?:Lost membership in cluster|Expelling|File System \S+ unmounted|is being expelled)",
        ),
        tells=Tells.NAMES,
        error="the node was expelled from GPFS, or its file system was unmounted",
        advice="exclude the node and start again; tell the site",
        confirm="mmgetstate; mmlsmount all   on that node",
    ),
    _mount(
        name="beegfs.lost",
        wordings=(
            r"beegfs: .*(?:Communication (?:error|retry|failed)|Timeout|[Cc]onnect failed|Unable to (?:connect|reach)|offline)",
        ),
        error="the node could not reach a server of BeeGFS",
        advice="exclude the node and start again, and tell the site if it repeats",
        confirm="beegfs-check-servers; beegfs-ctl --listtargets --state",
    ),
    _mount(
        name="storage.quota-warning",
        wordings=(
            r"(?:block|inode|file) (?:quota|limit) (?:reached|exceeded)",
            r"[Qq]uota exceeded for (?:user|group|project) (?P<name>\S+)",
            r"write failed, (?:user|group|project) (?:block|file|inode)s? (?:quota|limit)",
        ),
        tells=Tells.PROVES,
        cause="quota",
        error="the quota is used up {name}: of space, or of the number of files",
        advice="delete what is not needed, or write to scratch; many small files count against the number of files",
        confirm="quota -s; lfs quota -h -u $USER PATH",
    ),
    # Object stores.
    _cloud(
        name="cloud.no-credentials",
        wordings=(
            r"NoCredentialsError|Unable to locate credentials|PartialCredentialsError",
            r"DefaultCredentialsError|Your default credentials were not found|Could not automatically determine credentials",
            r"ProfileNotFound: The config profile \((?P<name>[^)]+)\)",
        ),
        error="there are no credentials for the object storage on this node {name}",
        advice="export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS) in the job, on every node",
        advice_in={
            "kubernetes": "bind the pod's service account to a role of the cloud, or mount the credentials as a secret"
        },
        confirm="aws sts get-caller-identity",
    ),
    _cloud(
        name="cloud.refused",
        wordings=(
            r"An error occurred \((?P<why>AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|AllAccessDisabled|403|Forbidden)\) when calling the (?P<name>\w+) operation",
            r"does not have (?P<name2>storage\.\S+) access|AuthorizationPermissionMismatch|AuthenticationFailed.*Azure",
        ),
        error="the object storage refused {name}{name2}: {why}",
        advice="check the key and the rights of its role on this bucket",
        confirm="aws sts get-caller-identity; aws s3 ls s3://BUCKET/",
    ),
    _cloud(
        name="cloud.expired",
        wordings=(
            r"\((?P<why>ExpiredToken|ExpiredTokenException|RequestExpired|RequestTimeTooSkewed)\) when calling",
            r"(?:The (?:provided|security) token|Token)[^.]* (?:has|is) expired|The SSO session .*(?:has expired|is otherwise invalid)",
            r"RefreshError: .*(?:invalid_grant|expired|revoked)",
        ),
        error="the credentials of the object storage have expired, or the node's clock is wrong {why}",
        advice="use credentials that are renewed by themselves (a role), or log in again; long jobs outlive a token of one hour",
        confirm="aws sts get-caller-identity; date",
    ),
    _cloud(
        name="cloud.no-such",
        wordings=(
            r"\((?P<why>NoSuchBucket|NoSuchKey|404)\) when calling the (?P<name>\w+) operation",
            r"(?:google\.\S*)?NotFound: 404 (?:GET|POST) https://storage\.googleapis\.com/\S+",
        ),
        cause="file-missing",
        error="the bucket or object does not exist: {why} in {name}",
        advice="correct the address; look at region and endpoint (AWS_ENDPOINT_URL) for storages of the site",
        confirm="aws s3 ls s3://BUCKET/PREFIX",
    ),
    _cloud(
        name="cloud.slow-down",
        wordings=(
            r"\((?P<why>SlowDown|RequestLimitExceeded|Throttling\w*|503|ServiceUnavailable|InternalError)\) when calling",
            r"(?:rateLimitExceeded|TooManyRequests: 429)",
        ),
        cause="download-failed",
        tells=Tells.NAMES,
        error="the object storage takes no more requests at once: {why}",
        advice="retry (AWS_MAX_ATTEMPTS=10 AWS_RETRY_MODE=adaptive), with fewer readers and larger shards",
    ),
    # Certificates and proxies.
    _cloud(
        name="tls.certificate",
        wordings=(
            r"CERTIFICATE_VERIFY_FAILED\]? ?(?:certificate verify failed: )?(?P<why>[^(\n]*)",
            r"SSL certificate problem: (?P<why2>.+)",
            r"x509: certificate (?P<why3>.+)",
            r"Could not find a suitable TLS CA certificate bundle, invalid path: (?P<path>\S+)",
        ),
        cause="certificate",
        error="a certificate was not accepted {why}{why2}{why3}{path}",
        advice="SSL_CERT_FILE and REQUESTS_CA_BUNDLE to the system's bundle (/etc/ssl/certs/ca-certificates.crt, /etc/pki/tls/certs/ca-bundle.crt); behind a proxy add its certificate; check the clock",
        confirm="curl -vI URL 2>&1 | grep -iE 'issuer|expire'; date",
    ),
    _cloud(
        name="tls.proxy",
        wordings=(
            r"ProxyError\(?'?(?P<why>[^']*)",
            r"Tunnel connection failed: (?P<why2>\d+ .+)",
            r"Received HTTP code (?P<why3>\d+) from proxy after CONNECT",
        ),
        cause="download-failed",
        tells=Tells.NAMES,
        error="the proxy did not let the request through {why}{why2}{why3}",
        advice="check https_proxy on the compute node; put the nodes and 127.0.0.1 into no_proxy",
        confirm="env | grep -i proxy",
        rivals=("firewall",),
    ),
    KnownMessage(
        name="storage.numpy-pickle",
        wordings=(r"No module named 'numpy\._core",),
        source="numpy 2.0 renamed numpy.core; pickles name it",
        tells=Tells.PROVES,
        is_raised=True,
        cause="versions-differ",
        error="a file was pickled with numpy 2, and numpy 1 is installed here: {words:.120}",
        advice="pip install 'numpy>=2', or write the file anew with the numpy that reads it",
        confirm="python -c 'import numpy; print(numpy.__version__)'",
    ),
    KnownMessage(
        name="storage.image-damaged",
        wordings=(
            r"failed size validation|filesystem layer verification failed|image.{0,80}(?:unexpected EOF|digest mismatch)",
        ),
        source="containerd 1.4 to 2.0, Docker 20 to 28",
        tells=Tells.PROVES,
        cause="image-missing",
        error="the image arrived damaged or cut: {words:.200}",
        advice="pull it again; if it stays so, a proxy or mirror between keeps a broken copy: clear it, or pull past it",
    ),
)
