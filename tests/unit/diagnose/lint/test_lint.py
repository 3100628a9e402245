import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.tables import rows
from torchmuster.diagnose.lint.job import parse
from torchmuster.diagnose.lint.lint import lint
from torchmuster.diagnose.lint.starts import TEXTS

SLURM = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=01:00:00
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
"""
PBS = """\
#!/bin/bash
#PBS -N ddp -q gpu
#PBS -l select=2:ncpus=32:mpiprocs=1:ngpus=4,walltime=01:00:00
#PBS -l place=scatter
cd $PBS_O_WORKDIR
HEAD=$(head -n 1 $PBS_NODEFILE)
"""
MEET = "--nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29500"
COUNTED = "--nnodes {nodes} --nproc_per_node {workers} --rdzv_backend c10d --rdzv_endpoint $HEAD:29500 train.py"
ACCELERATE = "--num_machines 2 --num_processes 8 --main_process_ip n1"
RUN = f"torchrun {MEET} --rdzv_id=$SLURM_JOB_ID train.py"
PBS_RUN = f"torchrun {MEET} --rdzv_id=$PBS_JOBID train.py"
SRUN, MPIEXEC = f"srun {RUN}", f"mpiexec -n 2 --ppn 1 {PBS_RUN}"
FOUR_TASKS, FOUR_SLOTS = SLURM.replace("node=1", "node=4"), PBS.replace("procs=1", "procs=4")
NOT_IN_ITS_FOLDER = PBS.replace("cd $PBS_O_WORKDIR\n", "")


def slurm_with(option):
    """Return the head of a job of Slurm with one more option, in line 5."""
    return SLURM.replace("#SBATCH --time", f"#SBATCH {option} --time")


def found(text):
    return [(f.line, f.word, f.cause) for f in lint(parse(text, "job.sh"))]


def rules(text):
    return {f.cause for f in lint(parse(text, "job.sh"))}


def one(text, rule):
    """Return the only finding of a script, which is of this rule."""
    (finding,) = lint(parse(text, "job.sh"))
    assert finding.cause == rule
    return finding


GOOD = {
    "srun torchrun with c10d": SLURM + f"{SRUN}\n",
    "srun torchrun over several lines": SLURM
    + "export NCCL_DEBUG=WARN\nexport OMP_NUM_THREADS=8\n"
    + "srun --kill-on-bad-exit=1 \\\n  torchrun \\\n    --nnodes=$SLURM_NNODES \\\n    --nproc_per_node=$SLURM_GPUS_PER_NODE \\\n"
    + "    --rdzv_id=$RANDOM \\\n    --rdzv_backend=c10d \\\n    --rdzv_endpoint=$HEAD:29500 \\\n    train.py --lr 0.1\n",
    "options in an array": SLURM
    + "ARGS=(\n  --nnodes $SLURM_NNODES # all of them\n  --nproc_per_node 4\n  --rdzv_backend c10d\n  --rdzv_endpoint $HEAD:29500\n)\n"
    + 'srun torchrun "${ARGS[@]}" train.py\nsrun torchrun ${ARGS[@]} train.py\n',
    "node rank in a shell on the node": SLURM
    + "export MASTER_ADDR=$HEAD MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))\n"
    + 'LAUNCHER="torchrun --nnodes $SLURM_NNODES --nproc_per_node 4 --master_addr $MASTER_ADDR --master_port $MASTER_PORT"\n'
    + 'srun bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID train.py"\n',
    "srun once for each GPU": FOUR_TASKS
    + "#comment\nexport SRUN_CPUS_PER_TASK=8\nexport MASTER_ADDR=$HEAD\nexport WORLD_SIZE=$SLURM_NTASKS\nsrun uv run python -u train.py\n",
    "muster torchrun with srun": SLURM + f"srun --cpus-per-task=8 muster {RUN}\n",
    "PBS with mpiexec": PBS
    + f"export NCCL_DEBUG=WARN\nmpiexec -n 2 --ppn 1 --cpu-bind none {PBS_RUN}\n",
    "PBS with nodes counted": FOUR_SLOTS
    + "NNODES=$(sort -u $PBS_NODEFILE | wc -l)\n"
    + f"mpiexec -n $NNODES --ppn 1 {PBS_RUN.replace('nnodes=2', 'nnodes=$NNODES')}\n",
    "PBS with pbsdsh": PBS + f"pbsdsh -- /opt/venv/bin/{PBS_RUN}\n",
    "PBS with pbsdsh and a script": PBS + "pbsdsh -- $PBS_O_WORKDIR/on_node.sh\n",
    "PBS with ssh to each node": PBS
    + f'for node in $(sort -u $PBS_NODEFILE); do\n  ssh $node "cd $PBS_O_WORKDIR && {PBS_RUN}" &\ndone\nwait\n',
    "PBS with the one word": PBS + f"muster {PBS_RUN}\n",
    "Slurm with the one word": SLURM + f"muster {RUN}\n",
    "PBS with muster": PBS + f"mpiexec -n 2 --ppn 1 muster {PBS_RUN}\n",
    "one node, alone": "#!/bin/bash\n#SBATCH -N1 -G 4 -t 60\ntorchrun --standalone --nproc_per_node=4 train.py\n",
    "one node or many": SLURM
    + f'if [ "$SLURM_NNODES" -gt 1 ]; then\n  {SRUN}\nelse\n  torchrun --standalone --nproc_per_node 4 train.py\nfi\n',
    "a script is written first": SLURM
    + f"cat > node.sh <<'END'\ntorchrun --standalone train.py\n{RUN}\nEND\nsrun bash node.sh\n",
    "talk of torchrun": SLURM
    + 'echo "torchrun --standalone x.py"\nwhich torchrun\nsrun hostname\n',
    "by hand": "torchrun --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 train.py\n",
    "part of the nodes": SLURM
    + f'srun -N1 -n1 -w "$HEAD" redis-server &\n{SRUN} 2>&1 | tee log.txt\n',
    "torchrun of a function": SLURM + f"go() {{\n  {RUN}\n}}\nsrun bash -c go\n",
    "accelerate that each node tells its rank": SLURM
    + f"srun bash -c 'accelerate launch {ACCELERATE} --machine_rank $SLURM_NODEID t.py --num_machines 9'\n",
    "accelerate by c10d": SLURM
    + f'N=$SLURM_NNODES\nLAUNCH="accelerate launch {ACCELERATE} --rdzv_backend c10d"\nsrun $LAUNCH t.py\n'.replace(
        "num_processes 8", "num_processes $((N * 4))"
    ),
    "accelerate with a file": SLURM
    + "srun bash -c 'accelerate launch --config_file a.yaml --machine_rank $SLURM_NODEID t.py'\n",
    "accelerate in quoted pieces": SLURM
    + 'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
    + 'LAUNCHER="accelerate launch --num_processes 8 --num_machines 2 --main_process_ip $HEAD --machine_rank \\$SLURM_PROCID"\n'
    + 'CMD="$LAUNCHER t.py"\nsrun bash -c "$CMD"\n',
    "deepspeed that starts the nodes by Slurm": SLURM
    + "for n in $(scontrol show hostnames); do echo $n slots=4 >> hosts; done\ndeepspeed --hostfile hosts --launcher slurm t.py\n",
    "deepspeed on one node": "#SBATCH -N1 --gpus-per-node=2 -t 9\ndeepspeed --num_gpus 2 t.py\npip install deepspeed\n",
    "Lightning": FOUR_TASKS + "srun python fit.py --trainer.devices=4 --trainer.num_nodes=2\n",
    "MPI, a rank for each GPU": FOUR_SLOTS
    + "mpirun -np 8 python train.py\nmpirun -np 1 python look.py\n",
    "Ray": SLURM
    + "srun -N1 -n1 -w $HEAD ray start --head --port=6379 --block &\n"
    + "srun -N1 -n1 -x $HEAD ray start --address=$HEAD:6379 --block &\npython tune.py\n",
    "python between other lines": SLURM + f"python prepare.py\n{SRUN}\n",
    "a loop over settings": SLURM
    + f"for lr in 1 2; do {SRUN}; done\n".replace("$SLURM_JOB_ID", "$RANDOM"),
    "options in a case": SLURM
    + f"case $1 in\n  -q|--quick) Q=1;;\n  --full) Q=0;;\nesac\n{SRUN}\n",
    "variables that a line sets in any way": SLURM
    + "read -r A B <<< hosts\nmapfile -t HOSTS < hosts\nfor ((i = 0; i < 2; i++)); do echo $i $A ${B} ${HOSTS[0]}; done\n"
    + 'while getopts "x:" opt; do echo $opt; done\nprintf -v C "%s" x\n(( n = 2 ))\nlet "m=3"\necho $C $n $m ${LR:-0.1} ${STEPS:?}\n'
    + "awk '{ print $NF }' hosts\nif [ -z \"$FOLD\" ]; then FOLD=1; fi\nsrun "
    + RUN
    + " --fold $FOLD\n",
    "variables of a site": SLURM
    + f"export OUT=$SCRATCH/out HF_HOME=$WORK/hf TMP=$SLURM_TMPDIR\nsource env.sh\n{SRUN} --lr $LR\n",
    "conda with its hook": SLURM + f'eval "$(conda shell.bash hook)"\nconda activate x\n{SRUN}\n',
    "conda of a login shell": f"#!/bin/bash -l\n#SBATCH -N2 -t 9\nconda activate x\nmuster {RUN}\n",
    "conda of a module": SLURM + f"module load anaconda3\nconda activate x\n{SRUN}\n",
    "srun that exports all": SLURM + f"srun --export=ALL,A=1 {RUN}\n",
    "GPUs that lines divide": "#SBATCH -N1 --gpus-per-node=2 -t 9\n"
    "CUDA_VISIBLE_DEVICES=0 torchrun --master-port=1 a.py &\nCUDA_VISIBLE_DEVICES=1 torchrun --master-port=2 b.py &\nwait\n",
    "PBS with a full path": NOT_IN_ITS_FOLDER
    + f"{MPIEXEC}\n".replace("train.py", "$PBS_O_WORKDIR/train.py"),
    "own arguments": SLURM + "srun torchrun $DISTRIBUTED_ARGS train.py\n",
    "numbers that commands print": SLURM
    + 'N=$(scontrol show hostnames $SLURM_JOB_NODELIST | wc -l)\nA=`wc -l < hosts`\nB="`nvidia-smi -L | wc -l`"\n'
    + f"srun torchrun {COUNTED.format(nodes='$N', workers='$B')}\n"
    + f"srun torchrun {COUNTED.format(nodes='$A', workers='$(jq .gpus site.json)')}\n"
    + f'OPTIONS="{COUNTED.format(nodes="$N", workers="$(jq .gpus site.json)")}"\nsrun torchrun $OPTIONS\n',
    "options that a command prints": SLURM
    + f"srun torchrun $(cat options.txt) {MEET.replace('=', ' ')} train.py\n",
    "a job in a here-document": f"N=2\nsbatch <<EOT\n{SLURM}{SRUN}\nEOT\n".replace(
        "$", "\\$"
    ).replace("nnodes=2", "nnodes=$N"),
    "a job in a quoted here-document": f"mkdir -p logs\ncat <<'EOT' | sbatch\n{SLURM}{SRUN}\nEOT\n",
    "a job that submits another": SLURM
    + f"{SRUN}\nsbatch <<EOT\n#!/bin/sh\n#SBATCH -N1\ntrue\nEOT\n",
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_script_has_no_finding(name):
    assert found(GOOD[name]) == []


# rule: (script, line of the finding, level); first those of a job of Slurm
BAD = {
    rule: (SLURM + script, int(line), level)
    for rule, level, line, script in rows(
        rf"""
        head-only          error    7  {RUN}
        standalone         error    7  srun torchrun --standalone --nproc_per_node 4 t.py
        nnodes             error    7  srun {RUN.replace("nnodes=2", "nnodes=4")}
        run-by-wrapper     error    7  srun muster run t.py
        late-directive     error    7  #SBATCH --mem=4G\n{SRUN}
        misspelt-variable  error    7  echo $SLURM_NNODE\n{SRUN}
        unset-variable     note     7  {SRUN} --lr $LR
        launch-address     error    7  export MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR\n{SRUN}
        srun-export        warning  7  srun --export=NCCL_DEBUG=INFO {RUN}
        visible-devices    warning  7  export CUDA_VISIBLE_DEVICES=0,1\n{SRUN}
        conda-activate     warning  7  conda activate x\n{SRUN}
        launcher-nodes     error    7  srun accelerate launch --multi_gpu t.py
        deepspeed-hosts    error    7  deepspeed --num_gpus=4 t.py
        deepspeed-ssh      note     7  deepspeed --hostfile hosts t.py
        lightning          error    7  srun python fit.py --trainer.devices=4
        ray-nodes          error    7  ray start --head\npython tune.py
        idle-nodes         warning  7  python train.py --epochs 3
        rdzv-id            error    7  srun bash -c 'torchrun {MEET.replace("$HEAD", "n1")} --rdzv_id=$RANDOM t.py'
        own-endpoint       error    7  srun bash -c 'torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=$(hostname):1 t.py'
        loopback           error    7  srun {RUN.replace("$HEAD", "localhost")}
        first-address      warning  7  HEAD=$(hostname -I | awk '{{print $1}}')\n{SRUN}
        own-address        warning  7  HEAD=`hostname -i`\n{SRUN}
        falls-back         warning  7  HEAD=$(scontrol show hostnames | head -1 || echo localhost)\n{SRUN}
        node-rank          error    7  srun torchrun --nnodes=2 --nproc_per_node=4 --master_addr=$HEAD --node_rank=0 t.py
        not-exported       warning  7  NCCL_DEBUG=INFO\n{SRUN}
        own-nccl           warning  8  N=/opt/nccl-2.26\nexport LD_LIBRARY_PATH=$N/lib:$LD_LIBRARY_PATH\n{SRUN}
        efa-provider       error    7  export FI_PROVIDER=efa\nexport NCCL_SOCKET_IFNAME=hsn\n{SRUN}
        ping-to-itself     note     7  ping -c 1 $HEAD\n{SRUN}
        """,
        4,
    )
} | {
    "several-per-node": (FOUR_TASKS + SRUN, 7, "error"),
    "workers-without-gpu": (SLURM.replace("gpus-per-node=4", "gpus-per-node=2") + SRUN, 7, "error"),
    "idle-gpus": ("#SBATCH -N1 --gres=gpu:a100:4 -t 9\ntorchrun --standalone t.py", 2, "warning"),
    "no-gpus-requested": (PBS.replace(":ngpus=4", "") + f"nvidia-smi\n{MPIEXEC}", 3, "warning"),
    "cpus-not-inherited": (slurm_with("-c 8") + SRUN, 7, "warning"),
    "gres-beside-gpus": (slurm_with("--gres=gpu:4") + SRUN, 5, "warning"),
    "no-time-limit": (SLURM.replace("#SBATCH --time", "##SBATCH --time") + SRUN, 7, "note"),
    "deprecated-launch": (
        "python -m torch.distributed.launch --nproc_per_node=2 t.py",
        1,
        "warning",
    ),
    "refused-line": ("torchrun --nproc_per_nodes=2 --nnode=x --rdzv-thing t.py", 1, "error"),
    "pbs-home": (NOT_IN_ITS_FOLDER + MPIEXEC, 6, "warning"),
    "world-size-of-nodes": (
        FOUR_TASKS + "export WORLD_SIZE=$SLURM_NNODES\nsrun python t.py",
        7,
        "error",
    ),
    "fixed-port": (slurm_with("--array=0-9") + SRUN, 7, "warning"),
    "glued-continuation": (SLURM + SRUN.replace(" --", "\\\n--"), 7, "error"),
    "blanks-behind-backslash": (SLURM + SRUN.replace(" train", " \\  \n  train"), 7, "error"),
    "lost-continuation": (SLURM + SRUN.replace(" --rdzv_id", " \n  --rdzv_id"), 8, "error"),
    "comment-inside": (SLURM + SRUN.replace(" --rdzv_id", " \\\n  # x\n  --rdzv_id"), 8, "error"),
    "windows-lines": ("torchrun t.py\r\n", 1, "error"),
    "windows-path": ("source my\\bin\\activate\ntorchrun t.py", 1, "error"),
    "not-carried": (PBS + f"export NCCL_DEBUG=INFO\npbsdsh -- /opt/{PBS_RUN}", 8, "warning"),
    "pbsdsh-dashes": (PBS + f"pbsdsh /opt/{PBS_RUN}", 7, "error"),
    "bare-pbsdsh": (PBS + f"pbsdsh -- {PBS_RUN}", 7, "error"),
    "gpus-variable": (
        SLURM.replace("gpus-per-node=", "gres=gpu:")
        + SRUN.replace("node=4", "node=$SLURM_GPUS_PER_NODE"),
        7,
        "error",
    ),
}


@pytest.mark.parametrize("rule", BAD)
def test_a_bad_script_has_the_one_finding_of_its_rule(rule):
    text, line, level = BAD[rule]

    assert found(text) == [(line, level, rule)]


def test_the_job_in_a_here_document_is_the_one_that_is_judged():
    text = f"N=4\nsbatch <<EOT\n{SLURM}{SRUN}\nEOT\n".replace("$", "\\$")

    assert found(text.replace("nnodes=2", "nnodes=$N")) == [(9, "error", "nnodes")]


def test_every_rule_has_a_bad_script():
    assert {text.cause for text in TEXTS.values()} == set(BAD)


NOT_SPREAD = PBS + f"muster {PBS_RUN}".replace("torchrun", "torchrun --no-spread")
WITH_CPUS = BAD["cpus-not-inherited"][0]


@pytest.mark.parametrize(
    ("text", "rule", "words"),
    [
        (SLURM + RUN, "head-only", "write `muster torchrun ...`"),
        (PBS + PBS_RUN, "head-only", "write `muster torchrun ...`"),
        (NOT_SPREAD, "head-only", "leave --no-spread out"),
        (FOUR_TASKS + SRUN, "several-per-node", "srun --ntasks-per-node=1 muster torchrun"),
        (FOUR_SLOTS + f"pbsdsh -- /x/{PBS_RUN}", "several-per-node", "mpiprocs=1"),
        (PBS + MPIEXEC.replace("$HEAD", "127.0.0.1"), "loopback", "$(head -n 1 $PBS_NODEFILE)"),
        (WITH_CPUS, "cpus-not-inherited", "--cpus-per-task=$SLURM_CPUS_PER_TASK"),
    ],
)
def test_the_hint_is_the_line_that_works(text, rule, words):
    assert words in one(text, rule).hint


@pytest.mark.parametrize(
    ("line", "times"),
    [
        ("muster run t.py", None),
        ("srun -n 1 muster run t.py", None),
        ("mpiexec -n 1 muster run t.py", None),
        ("srun muster run t.py", 2),
        ("srun --ntasks-per-node=4 muster run t.py", 8),
        ("mpiexec -n 3 /opt/bin/muster run t.py", 3),
    ],
)
def test_muster_run_is_started_once(line, times):
    said = [f.error for f in lint(parse(SLURM + line, "j")) if f.cause == "run-by-wrapper"]
    wrapper = line.split()[0]
    assert said == ([] if times is None else [f"{wrapper} starts muster run {times} times"])


@pytest.mark.parametrize(
    ("rule", "words", "line"),
    rows(
        rf"""
        head-only            accelerate launch starts on                   accelerate launch --num_processes 8 t.py
        head-only            fabric run starts on                          fabric run --devices=4 t.py
        launcher-nodes       --num_nodes is missing                        srun fabric run --devices=4 t.py
        node-rank            no node is told its --machine                 srun accelerate launch {ACCELERATE} t.py
        node-rank            every node gets --machine_rank=$SLURM_NODEID  srun accelerate launch {ACCELERATE} --machine_rank $SLURM_NODEID t.py
        loopback             at localhost                                  srun accelerate launch {ACCELERATE.replace("n1", "localhost")} --rdzv_backend c10d t.py
        launcher-nodes       --num_machines is 4, and the job has 2 nodes  srun accelerate launch {ACCELERATE.replace("machines 2", "machines 4")} --rdzv_backend c10d t.py
        idle-gpus            2 workers on each node                        srun accelerate launch {ACCELERATE.replace(" 8", " 4")} --rdzv_backend c10d t.py
        idle-gpus            4 workers on all 2 nodes                      srun accelerate launch --num_machines 2 --main_process_ip n1 --rdzv_backend c10d t.py
        workers-without-gpu  8 workers on each node                        srun accelerate launch {ACCELERATE.replace(" 8", " 16")} --rdzv_backend c10d t.py
        deepspeed-hosts      --hostfile is missing                         srun deepspeed t.py
        deepspeed-hosts      each one starts all nodes                     srun deepspeed --hostfile h t.py
        deepspeed-hosts      --num_nodes is 3                              deepspeed --hostfile h --num_nodes 3 t.py
        ray-nodes            a head of Ray on every node                   srun ray start --head --block &
        ray-nodes            without --block                               srun -N1 -w n1 ray start --head\nray start --address=n1:1
        loopback             at localhost                                  ray start --head\nsrun -w n2 ray start --address=localhost:1 --block
        idle-gpus            starts 2 workers                              srun torchrun {MEET.replace("node=4", "node=2")} t.py
        idle-gpus            starts 4 ranks, and the job has 8 GPUs        mpirun -np 4 python t.py
        lightning            num_nodes is 4                                srun python fit.py --trainer.num_nodes=4
        """,
        3,
    ),
)
def test_a_launcher_is_held_to_the_numbers_of_the_job(line, rule, words):
    assert words in one(SLURM + line, rule).error


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        ("SLURM_NNODE", "SLURM_NNODES"),
        ("SLURM_NODE_ID", "SLURM_NODEID"),
        ("SLURM_GPU_PER_NODE", "SLURM_GPUS_PER_NODE"),
        ("SLURM_NUM_NODES", "SLURM_NNODES"),
        ("PBS_NODE_FILE", "PBS_NODEFILE"),
        ("PBS_O_WORK_DIR", "PBS_O_WORKDIR"),
    ],
)
def test_a_misspelt_variable_of_a_scheduler_is_named_with_its_likely_name(name, likely):
    for use in (
        f"echo ${name}",
        f"srun bash -c 'echo ${{{name}}}'",
        f"export N=${name}",
        f"srun --export=ALL echo ${name}",
    ):
        finding = one(f"{use}\n", "misspelt-variable")
        assert (finding.hint, finding.word) == (f"${likely}", "error")


@pytest.mark.parametrize(
    "line", ["SLURM_NNODE=2; echo $SLURM_NNODE", "echo $SLURM_SITE_THING $PBS_X"]
)
def test_a_variable_that_is_set_or_like_none_is_left_alone(line):
    assert found(line) == []


def test_a_slip_in_a_name_of_the_script_is_a_warning():
    text = "export MASTER_ADDR=n1\ntorchrun --nproc_per_node=2 --master_addr=$MASTER_ADR t.py\n"
    finding = one(text, "unset-variable")

    assert (finding.line, finding.word, finding.hint) == (2, "warning", "$MASTER_ADDR")


def test_the_address_of_srun_is_another_under_salloc():
    line = "srun bash -c 'torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=$SLURM_LAUNCH_NODE_IPADDR:1 t.py'"
    finding = one(SLURM + line, "launch-address")

    assert "login node" in finding.because[0]


def test_a_directive_that_exports_nothing_is_said_once():
    text = SLURM.replace("#SBATCH --time", "#SBATCH --export=NONE\n#SBATCH --time")
    line = f"{SRUN}\n"

    assert "(line 5)" in one(text + line * 2, "srun-export").because[0]
    assert found(text + "export SLURM_EXPORT_ENV=ALL\n" + line) == []


def test_a_job_of_slurm_that_asks_for_no_gpus_and_shows_them():
    text = SLURM.replace("#SBATCH --gpus-per-node=4\n", "") + f"nvidia-smi\n{SRUN}"

    assert one(text, "no-gpus-requested").hint == "#SBATCH --gpus-per-node=4"
    assert found(text.replace("--nodes=2", "--nodes=2 --exclusive")) == []


def test_conda_init_and_activate_are_one_finding():
    finding = one(SLURM + f"conda init bash\nconda activate x\n{SRUN}", "conda-activate")

    assert "`conda init`" in finding.error


def test_what_holds_for_several_lines_is_said_once():
    finding = one(SLURM + f"{SRUN}\n" + "#SBATCH --mem=4G\n" * 3, "late-directive")

    assert (finding.line, finding.because[-1]) == (8, "so it is in lines 9, 10")


def test_lightning_refuses_tasks_that_are_not_counted_by_node():
    text = SLURM.replace("ntasks-per-node=1", "ntasks=8") + "srun python fit.py --trainer.devices=4"

    assert "--ntasks-per-node=4" in (one(text, "lightning").hint or "")


def test_the_file_of_pbs_is_no_host_file_of_deepspeed():
    text = PBS + "deepspeed --hostfile=$PBS_NODEFILE t.py"

    assert "PBS_NODEFILE" in one(text, "deepspeed-hosts").error


@pytest.mark.parametrize(
    "line",
    [
        "srun torchrun --nnodes=2 --nproc_per_node=4 --master_addr=$HEAD --node_rank=$SLURM_NODEID t.py",
        'srun bash -c "torchrun --nnodes=2 --nproc_per_node=4 --master_addr=$HEAD --node_rank=$SLURM_NODEID t.py"',
        "R=$SLURM_PROCID; srun torchrun --nnodes=2 --nproc_per_node=4 --master_addr=$HEAD --node_rank $R t.py",
        "srun torchrun --nnodes=2 --nproc_per_node=4 --master_addr=$HEAD t.py",
    ],
)
def test_a_rank_that_is_filled_in_too_early_is_the_same_for_all(line):
    assert rules(SLURM + line) == {"node-rank"}


def test_a_rank_has_no_effect_with_c10d():
    text = SLURM + SRUN.replace("--rdzv_id", "--node_rank=$SLURM_NODEID --rdzv_id")

    assert found(text) == [(7, "note", "node-rank")]


@pytest.mark.parametrize(
    "text",
    [
        f"{SLURM}for n in a b; do ssh $n torchrun {MEET} --rdzv_id=$RANDOM t.py & done",
        f"{SLURM}for i in 0 1; do srun -N1 -w n$i torchrun {MEET} --rdzv_id=$RANDOM t.py & done",
        f"{SLURM}srun bash -c 'torchrun {MEET.replace('$HEAD', 'n1')} --rdzv_id=$(date +%s) t.py'",
        "torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=n1:29500 --rdzv_id=$RANDOM t.py",
    ],
    ids=["by ssh", "a loop with a node for each turn", "in a shell on each node", "by hand"],
)
def test_an_id_that_each_node_makes_is_an_error(text):
    assert rules(text) == {"rdzv-id"}


def test_master_addr_without_effect_is_named():
    line = (
        "srun torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --master_addr=$HEAD t.py"
    )

    assert "no effect" in one(SLURM + line, "loopback").error


def test_the_lines_of_the_node_file_are_no_nodes():
    text = FOUR_SLOTS + "N=`cat $PBS_NODEFILE | wc -l`\n"
    text += f"mpiexec -n 2 --ppn 1 {PBS_RUN.replace('nnodes=2', 'nnodes=$N')}"

    assert "slot" in one(text, "nnodes").because[0]


def test_two_torchruns_of_one_node_take_the_same_port():
    text = "torchrun --nproc_per_node=2 a.py &\ntorchrun --nproc_per_node=2 b.py &\nwait\n"

    assert found(text) == [(2, "error", "fixed-port")]


@pytest.mark.parametrize("options", ["", "--rdzv-backend=c10d ", "--nnodes=1:1 "])
def test_muster_torchrun_that_names_no_meeting_takes_no_fixed_port(options):
    line = f"torchrun {options}--nproc_per_node=2 a.py &\n"
    shared = "#!/bin/bash\n#SBATCH --nodes=1 --time=1:00 --array=0-9\n"

    for words in (line * 2 + "wait\n", shared + line):
        assert "fixed-port" in {rule for _, _, rule in found(words)}
        assert found(words.replace("torchrun", "muster torchrun")) == []


@pytest.mark.parametrize("options", ["--master-port=29501", "--rdzv-endpoint=localhost:29501"])
def test_muster_torchrun_that_names_a_port_keeps_it(options):
    text = f"muster torchrun {options} --nproc_per_node=2 a.py &\n" * 2

    assert (2, "error", "fixed-port") in found(text)


def test_a_type_of_gpu_is_no_number_of_workers():
    text = SLURM.replace("node=4", "node=a100:4") + SRUN.replace(
        "node=4", "node=$SLURM_GPUS_PER_NODE"
    )

    assert "a100:4" in one(text, "gpus-variable").error


def test_efa_is_right_on_ec2():
    text = SLURM + f"export FI_PROVIDER=efa\nexport FI_EFA_USE_DEVICE_RDMA=1\n{SRUN}"

    assert found(text) == []


def test_a_glued_line_is_shown_as_bash_reads_it():
    finding = one(BAD["glued-continuation"][0], "glued-continuation")

    assert "torchrun--nnodes=2" in finding.because[0]
    assert "lines 7 to 11" in finding.error


def test_set_a_exports_everything():
    assert found(SLURM + f"set -a\nNCCL_DEBUG=INFO\nset +a\n{SRUN}") == []


def test_findings_come_by_line():
    lines = [f.line for f in lint(parse(SLURM + f"NCCL_DEBUG=INFO\nping $HEAD\n{RUN}", "j"))]

    assert lines == sorted(lines)
    assert len(lines) == 3


PIECES = st.sampled_from(
    [
        *"'\")`}(&=# \n\x00\ue002\ue003",
        *(
            "$(",
            "${",
            "$X",
            "X=",
            "X=$X",
            "<<E",
            ";;",
            "if ",
            "fi",
            "for ",
            "export ",
            "[@]",
            "\r\n",
        ),
        *("#SBATCH --nodes=2", "#PBS -l select=2:ncpus=", "#SBATCH -N", "\\\n", "\\ \n", "t.py"),
        *("srun ", "torchrun ", "bash -c ", "ssh h ", "pbsdsh -- ", "-m torch.distributed.launch"),
        *("--nnodes=$X", "--rdzv_id=$RANDOM", "--node_rank", "-h", "--help", "99999999999999"),
        *("python", "FI_PROVIDER=efa"),
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)))
def test_no_text_crashes_it(text):
    for finding in lint(parse(text, "job.sh")):
        assert 1 <= finding.line <= text.count("\n") + 1
        assert finding.error
        assert "\ue002" not in finding.error or "\ue002" in text


@pytest.mark.parametrize(
    "text",
    [
        "$(" * 50_000,
        "'" * 50_001,
        "X=$X" * 20_000,
        "".join(f"echo $SLURM_X{i}NODES\n" for i in range(8_000)),
        "#SBATCH -N2\n" + "".join(f"A{i}BCDEFG=1; torchrun $A{i}BCDEF\n" for i in range(5_000)),
        "a=(" * 20_000,
        'bash -c "torchrun ' * 5_000,
        "\\\n" * 50_000,
    ],
)
@pytest.mark.timeout(20)
def test_a_hostile_text_takes_no_time_and_no_stack(text):
    lint(parse(text, "job.sh"))
