"""What the error book says of a cause where no message of the catalogue says it: how to confirm it, what it means, what helps.

A command that proves the cause, behind three blanks where it is typed; or `nothing to confirm: ...` where the message is the proof.
"""

CONFIRM: dict[str, str] = {
    "preempted": "sacct -j JOB -X -o JobID,State,Restarts   (PBS: `tracejob JOB`)",
    "ssh-login": "ssh -v HOST true   from the machine that starts the job",
    "no-launcher": "env | grep -E '^(RANK|WORLD_SIZE|MASTER_ADDR)='   in the job: nothing is printed",
    "import-path": "python -c 'import MODULE; print(MODULE.__file__)'   in the folder of the script",
    "local-rank-argument": "python train.py --help   shows no --local-rank",
    "config-refused": "nothing to confirm: the message names the key and what the framework expects of it",
    "different-ids": "grep -n rdzv JOBSCRIPT   and compare `--rdzv-id` in the output of all nodes",
    "different-endpoints": "grep -n rdzv JOBSCRIPT   and compare `--rdzv-endpoint` in the output of all nodes",
    "endpoint-ignored": "grep -nE 'master_addr|rdzv' JOBSCRIPT   shows --master_addr and no --rdzv-endpoint",
    "rendezvous-closed": "nothing to confirm: the message is the rendezvous's own word; its log shows when the first node left",
    "wrong-rank": "echo $RANK $WORLD_SIZE $NODE_RANK $LOCAL_RANK   in every process",
    "mixed-ip-families": "getent ahosts NODE   on each node: one prints IPv4 addresses, the other IPv6",
    "nccl-loopback": "NCCL_DEBUG=INFO   prints `NET/Socket : Using [0]lo` on a node",
    "rdma-fork": "grep -n num_workers train.py   and look for subprocess and os.fork: what starts processes after the group is made",
    "duplicate-gpu": "nvidia-smi --query-compute-apps=pid,gpu_uuid --format=csv   on the node: one GPU has several ranks",
    "nccl-versions-differ": "python -c 'import torch; print(torch.cuda.nccl.version())'   on every node",
    "cuda-launch": "CUDA_LAUNCH_BLOCKING=1   makes the traceback name the line whose kernel was refused",
    "cuda-graph": "TORCH_LOGS=cudagraphs   and a run without mode='reduce-overhead', which does not fail",
    "cuda-after-fork": "python -X importtime train.py   and look for `.cuda()` at the top of a module that workers import",
    "node-crashed": "journalctl -k -b -1   on the node, or its console log: ask the site",
    "node-hardware": "journalctl -k | grep -iE 'mce|edac|aer|xid'   on the node",
    "file-locked": "lslocks; fuser -v FILE   on the node; `mount` says whether the file system has locks",
    "checkpoint-differs": "python -c 'import torch; print({k: tuple(v.shape) for k, v in torch.load(FILE, map_location=\"cpu\").items()})'   beside model.state_dict()",
    "connection-refused": "ss -ltnp   on the node of the server: nothing listens at the port",
    "no-process-group": "python -X faulthandler train.py   with a print of torch.distributed.is_initialized() before the line",
    "models-differ": "print(sum(p.numel() for p in model.parameters()))   on every rank",
    "reported": "nothing to confirm: it is the program's own word; the lines before it say more",
    "devices-differ": "print(tensor.device)   for each tensor of the line that the traceback names",
    "shapes-differ": "print(tensor.shape)   for each tensor of the line that the traceback names",
    "dtypes-differ": "print(tensor.dtype)   for each tensor of the line that the traceback names",
    "autograd": "torch.autograd.set_detect_anomaly(True)   names the forward line of the operation",
    "sharding": "print([n for n, p in model.named_parameters() if p.device.type == 'meta'])   before the first forward",
    "batches-differ": "print([item.shape for item in batch])   in the collate_fn",
    "not-picklable": "pickle.dumps(OBJECT)   with what is handed over: it fails in the same way, without processes",
    "weights-only": "python -c 'import torch; torch.load(FILE, weights_only=True)'   names the class that is refused",
    "compile-failed": "TORCHDYNAMO_DISABLE=1   runs the script without compiling: it does not fail",
    "main-guard": "grep -n \"__name__ == '__main__'\" train.py   finds nothing around what starts processes",
    "wrapped-model": "print(type(model))   is the wrapper; print(type(model.module)) the model",
    "slow-data": "py-spy dump --pid WORKER   of a loader's process, and `iostat -x 1` on the node",
    "recursion": "nothing to confirm: the line that repeats in the traceback calls itself",
    "wrong-encoding": "python -c 'import sys, locale; print(sys.flags.utf8_mode, locale.getpreferredencoding())'   in the job",
    "value-out-of-range": "print(x.min(), x.max(), x.isnan().any())   before the line",
    "invalid-collective": "nothing to confirm: the backend's message names the argument; print(tensor.device, tensor.dtype, op) shows yours",
    "bus-error": "df -h /dev/shm   on the node while the job runs, and the size of mapped files before and after",
    "hangup": "ps -o pid,tty,args -p PID   of the next start: it has the terminal that was closed",
    "aborted": "gdb -batch -ex bt python core   if a core file is kept: the frame below `abort` is the one",
    "signal": "strace -f -e trace=signal -p PID   shows who sends it (si_pid) at the next time",
    "ranks-missing-at-barrier": "muster stacks RUN   while it hangs: the named ranks stand elsewhere",
    "rank-ended-early": "print(len(loader))   on every rank: they differ",
    "nccl-warning": "NCCL_DEBUG=INFO   at the next run: the lines before the warning name the call that failed",
}
MEANING: dict[str, str] = {
    "ssh-login": "ssh reached the host, and one of the two refused the other: the key is not in `authorized_keys`, its file is readable by"
    " others, the agent has no key, or the host's key is unknown or has changed. Launchers print it as a node that could not be started",
    "different-ids": "each node looks for a rendezvous of its own: all `--rdzv-id` of one job must be equal, and those of two jobs on one"
    " endpoint different. An id made from `$RANDOM`, the time, or the name of the node is another one on each node",
    "different-endpoints": "nodes wait at different addresses, so each waits for nodes that wait elsewhere. `$(hostname)` in a line that"
    " every node runs is each node's own name",
}
CURE: dict[str, str] = {
    "ssh-login": "`ssh HOST true` has to work without a question: `ssh-copy-id HOST`, `ssh-keyscan HOST >> ~/.ssh/known_hosts` after you have"
    " compared the key with the site's, `chmod 600 ~/.ssh/id_*`. `muster doctor --hosts HOST` checks it for all hosts",
    "different-ids": "take the job's number, `--rdzv-id=$SLURM_JOB_ID` or `$PBS_JOBID`, or a fixed word; `muster torchrun` needs none",
    "different-endpoints": "compute the address once, before the nodes are started: `HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST |"
    " head -n 1)`, then `--rdzv-endpoint=$HEAD:29500` on all nodes; `muster torchrun` finds the nodes itself",
}
