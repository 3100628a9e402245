"""Constants of Slurm and PBS, apart from their dialects, so that a start need not load these."""

from torchmuster.launcher.model.scheduler import SchedulerFacts

SLURM = SchedulerFacts(
    name="slurm",
    module="torchmuster.launcher.engines.slurm",
    install="Slurm's commands (Debian: slurm-client)",
    client="sbatch",
    tools=("sbatch", "squeue", "scancel"),
    job_variables=("SLURM_JOB_ID", "SLURM_JOBID"),
    variables=("SLURM_", "SLURMD_"),
    variables_of_users=("SLURM_CONF", "SLURM_CONF_SERVER"),
    directive="#SBATCH",
    example="--reservation=NAME",
    queue_word="partition",
    keys=frozenset({"qos", "constraint"}),
    instead={
        "project": "Slurm has no project beside the account: `account`",
        "start_with": "Slurm starts agents by srun",
    },
)
PBS = SchedulerFacts(
    name="pbs",
    module="torchmuster.launcher.engines.pbs",
    install="the commands of OpenPBS or PBS Professional (openpbs-client)",
    client="qsub",
    tools=("qsub", "qstat", "qdel"),
    job_variables=("PBS_JOBID",),
    variables=("PBS_",),
    variables_of_users=("PBS_CONF_FILE", "PBS_SERVER"),
    directive="#PBS",
    example="-l place=scatter:excl",
    keys=frozenset({"project", "start_with"}),
    instead={
        "qos": "PBS has none: a queue stands for it",
        "constraint": 'PBS asks for keys of a chunk: chunk = { KEY = "VALUE" }',
    },
)
