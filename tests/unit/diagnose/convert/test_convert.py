import re

import pytest
import yaml

from torchmuster.diagnose.convert.convert import convert_workflow
from torchmuster.errors import ManyErrors
from torchmuster.spec.problems import Problems
from torchmuster.spec.source import Source
from torchmuster.spec.workflow.template import render_file

LITERAL = """\
workflow:
  name: digits
  groups:
  # Two machines.
  - name: fit
    tasks:
    - name: head  # It keeps the model
      lead: true
      image: torch:2
      command: [bash]
      args: [/tmp/go.sh]
      resource: default
      files:
      - path: /tmp/go.sh
        contents: |
          set -ex
          mkdir -p {{output}}/models

          torchrun --nnodes 2 --nproc_per_node 1 --node_rank 0 \\
                   --master_addr {{host:head}} --master_port 29400 \\
                   /tmp/fit.py --epochs 3 --out {{output}}/models/w.pt
      - path: /tmp/fit.py
        localpath: fit.py
      outputs:
      - url: s3://bucket/digits

    - name: other
      image: torch:2
      command: [bash]
      args: [/tmp/go.sh]
      resource: default
      files:
      - path: /tmp/go.sh
        contents: |
          set -ex
          mkdir -p {{output}}/models

          torchrun --nnodes 2 --nproc_per_node 1 --node_rank 1 \\
                   --master_addr {{host:head}} --master_port 29400 \\
                   /tmp/fit.py --epochs 3 --out {{output}}/models/w.pt
      - path: /tmp/fit.py
        localpath: fit.py

  resources:
    default: {cpu: 1}  # small
"""

LITERAL_SHORT = """\
workflow:
  name: digits
  groups:
  # Two machines.
  - name: fit
    tasks:
    - name: head  # It keeps the model
      image: torch:2
      nodes: 2
      nproc_per_node: 1
      script: fit.py
      args: [--epochs, "3", --out, "{{output}}/models/w.pt"]
      resource: default
      outputs:
      - url: s3://bucket/digits

  resources:
    default: {cpu: 1}  # small
"""

TEMPLATE = """\
workflow:
  name: digits
  groups:
  - name: fit
    tasks:
    {% for item in range(n_nodes) %}
    {% if item == 0 %}
    - name: head  # It keeps the model
      lead: true
      outputs:
      - dataset:
          name: {{ dataset }}
          path: models
    {% else %}
    - name: worker_{{item}}
    {% endif %}
      image: torch:2  # the same everywhere
      command: [bash]
      args: [/tmp/run.sh]
      environment:
        OMP_NUM_THREADS: 1
      credentials:
        wandb:
          WANDB_API_KEY: key
      files:
      - path: /tmp/run.sh
        contents: |
          set -ex
          mkdir -p {{output}}/models
          python3 /tmp/osmo_barrier.py --num_nodes {{n_nodes}} --connect {{host:head}} --rank {{item}}
          # Go.
          NCCL_DEBUG=WARN torchrun --nnodes {{n_nodes}} --nproc_per_node {{n_gpus}} --node_rank {{item}} \\
              --master_addr {{host:head}} --master_port {{port_number}} --max_restarts 2 \\
              /tmp/fit.py --epochs {{n_epochs}} --lr 0.10 --out {{output}}/models/w.pt
      - path: /tmp/fit.py
        localpath: fit.py
      - path: /tmp/osmo_barrier.py
        localpath: osmo_barrier.py
    {% endfor %}

default-values:
  n_nodes: 2
  # Where the head listens.
  port_number: 29400
  n_gpus: 4  # for each node
  n_epochs: 10
  dataset: digits-model
"""

TEMPLATE_SHORT = """\
workflow:
  name: digits
  groups:
  - name: fit
    tasks:
    - name: head  # It keeps the model
      outputs:
      - dataset:
          name: {{ dataset }}
          path: models
      image: torch:2  # the same everywhere
      nodes: {{ n_nodes }}
      nproc_per_node: {{ n_gpus }}
      script: fit.py
      args: [--epochs, "{{n_epochs}}", --lr, "0.10", --out, "{{output}}/models/w.pt"]
      max_restarts: 2
      environment:
        OMP_NUM_THREADS: 1
        NCCL_DEBUG: WARN
      credentials:
        wandb:
          WANDB_API_KEY: key

default-values:
  n_nodes: 2
  n_gpus: 4  # for each node
  n_epochs: 10
  dataset: digits-model
"""

ONE = """\
workflow:
  name: digits
  tasks:
  - name: fit
    command: [bash, -c]
    args:
    - |
      set -e
      LINES
    files:
    - path: /tmp/fit.py
      contents: print()
"""


def convert(text, **values):
    return convert_workflow(Source(path="w.yaml", text=text), values, {})


def rendered(text, **values):
    problems = Problems()
    found = render_file(Source(path="w.yaml", text=text), values, {}, problems)
    assert problems.found == []
    return yaml.safe_load(found.text)["workflow"]


def one(lines):
    return ONE.replace("LINES", lines.replace("\n", "\n      "))


def task_of(text):
    return rendered(convert(text).text)["tasks"][0]


def test_two_written_out_tasks_become_one_and_comments_stay():
    assert convert(LITERAL).text == LITERAL_SHORT


def test_a_loop_with_branches_becomes_one_task_and_its_port_leaves_the_default_values():
    done = convert(TEMPLATE)

    assert done.text == TEMPLATE_SHORT
    assert done.converted == ("fit",)
    assert done.refusals == ()
    assert any("`port_number` is removed" in note for note in done.notes)
    assert any("the barrier is removed" in note for note in done.notes)
    assert any("{{output}}/models: muster makes it" in note for note in done.notes)


@pytest.mark.parametrize("n_nodes", [2, 3])
def test_the_short_form_asks_for_as_many_nodes_and_workers(n_nodes):
    before = rendered(TEMPLATE, n_nodes=n_nodes)["groups"][0]["tasks"]
    after = rendered(convert(TEMPLATE).text, n_nodes=n_nodes)["groups"][0]["tasks"]

    (task,) = after
    script = before[0]["files"][0]["contents"]
    assert task["nodes"] == len(before) == n_nodes
    assert f"--nproc_per_node {task['nproc_per_node']} " in script


def test_what_is_converted_is_not_converted_again():
    again = convert(TEMPLATE_SHORT)

    assert again.text == TEMPLATE_SHORT
    assert [e.what for e in again.refusals] == ["no task of this file starts torchrun"]


def test_a_head_beside_a_loop_of_workers_becomes_one_task():
    head, worker = re.findall(r"    - name: .*?localpath: fit.py\n", LITERAL, re.DOTALL)
    loop = "    {% for i in range(1, n) %}\n" + worker.replace("other", "w{{i}}")
    loop = loop.replace("--node_rank 1", "--node_rank {{i}}") + "    {% endfor %}\n"
    text = "workflow:\n  name: digits\n  groups:\n  - name: fit\n    tasks:\n" + head + loop
    text = text.replace("--nnodes 2", "--nnodes {{ n }}").replace("resource: default", "")
    text += "default-values:\n  n: 2\n"

    short = convert(text).text

    assert rendered(short, n=3)["groups"][0]["tasks"][0]["nodes"] == 3
    assert len(rendered(short, n=3)["groups"][0]["tasks"]) == 1


def test_branches_around_a_name_in_one_line_are_decided():
    branches = (
        "- name: {% if item == 0 %}head{% else %}w{{item}}{% endif %}\n      lead: {{ item == 0 }}"
    )
    text = re.sub(r"\{% if item == 0 %\}\n.*?\{% endif %\}", branches, TEMPLATE, flags=re.DOTALL)

    (task,) = rendered(convert(text).text)["groups"][0]["tasks"]

    assert task["name"] == "head"
    assert "lead" not in task


def test_a_name_that_jinja_computes_is_written_out():
    branches = (
        "- name: {{ 'head' if item == 0 else 'w' ~ item }}  # who\n      lead: {{ item == 0 }}"
    )
    text = re.sub(r"\{% if item == 0 %\}\n.*?\{% endif %\}", branches, TEMPLATE, flags=re.DOTALL)

    assert "- name: head  # who\n" in convert(text).text


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nnodes=1 --nproc-per-node=2 /tmp/fit.py --a 1",
        "torchrun --standalone --nproc_per_node 2 /tmp/fit.py --a 1",
        "exec torchrun --nproc_per_node=2 /tmp/fit.py --a 1",
        "python -m torch.distributed.run --nproc-per-node 2 /tmp/fit.py --a 1",
        "python3 -u -m torch.distributed.run --nproc-per-node 2 /tmp/fit.py --a 1",
        "python -m torch.distributed.launch --use_env --nproc_per_node 2 /tmp/fit.py --a 1",
        "torchrun --nproc_per_node 2 \\\n  --rdzv_backend c10d --rdzv-endpoint localhost:0 \\\n  /tmp/fit.py --a 1",
        "mkdir -p {{output}} && torchrun --nproc_per_node 2 /tmp/fit.py --a 1; echo done",
        "IP=$(getent hosts {{host:fit}} | head -n1)\ntorchrun --nproc_per_node 2 --master_addr $IP /tmp/fit.py --a 1",
        "cd /tmp\ntorchrun --nproc_per_node 2 fit.py --a 1",
    ],
)
def test_every_spelling_of_the_launcher_gives_the_same_task(line):
    task = task_of(one(line))

    assert (task["nodes"], task["nproc_per_node"]) == (1, 2)
    assert (task["script"], task["args"]) == ("/tmp/fit.py", ["--a", "1"])
    assert "command" not in task


def test_a_command_without_a_shell_is_converted():
    text = one("X").replace("[bash, -c]", "[torchrun, --nproc_per_node, 2]")
    text = text.replace("    - |\n      set -e\n      X\n", "    - /tmp/fit.py\n    - $HOME\n")

    assert task_of(text)["args"] == ["$HOME"]


def test_variables_of_the_shell_become_the_environment():
    task = task_of(one("export A=1\nexport MASTER_PORT=29500\nB='x y' torchrun /tmp/fit.py"))

    assert task["environment"] == {"A": "1", "B": "x y"}


def test_words_keep_their_text_in_the_list():
    words = ["1e-3", "0.10", "yes", "a b", 'q"q', "{{output}}/x", "-1", "null", "a: b", "#c", ""]
    line = "torchrun /tmp/fit.py " + " ".join(f"'{word}'" for word in words)

    assert task_of(one(line))["args"] == words


def test_a_range_of_nodes_stays_a_text():
    text = LITERAL.replace("--nnodes 2", "--nnodes 1:2")

    assert '      nodes: "1:2"\n' in convert(text).text


@pytest.mark.parametrize(
    ("lines", "what", "line"),
    [
        ("pip install einops\ntorchrun /tmp/fit.py", "`pip install einops` can't be part", 9),
        ("torchrun /tmp/fit.py\ncp a b", "`cp a b` can't be part", 10),
        ("torchrun /tmp/fit.py | tee log", "`torchrun /tmp/fit.py | tee log` can't", 9),
        ("torchrun /tmp/fit.py --at $N", "can't be part", 9),
        ("torchrun /tmp/fit.py\ntorchrun /tmp/fit.py", "can't be part", 10),
        ("torchrun -m pkg.fit", "`--module` can't be kept", 9),
        ("torchrun --role x /tmp/fit.py", "`--role` can't be kept", 9),
        ("torchrun --nope 1 /tmp/fit.py", "torchrun has no option `--nope`", 9),
        ("python -m torch.distributed.launch /tmp/fit.py", "used without --use-env", 9),
        (
            "mkdir -p {{output}}/logs\ntorchrun /tmp/fit.py",
            "create the folder `{{output}}/logs`",
            9,
        ),
        ("mkdir -p /data\ntorchrun /tmp/fit.py", "nothing would create the folder `/data`", 9),
        ("torchrun --nnodes 2 /tmp/fit.py", "asks for 2 nodes, and the group `fit` has 1 task", 9),
        ("torchrun fit.py", "does not say where the script `fit.py` is", 4),
        ("torchrun /tmp/fit.py --at {{host:fit}}", "`{{host:fit}}` has another meaning", 9),
        ("if true; then torchrun /tmp/fit.py; fi", "can't be part", 9),
    ],
)
def test_what_a_training_task_would_not_do_is_refused_at_its_line(lines, what, line):
    done = convert(one(lines))

    assert done.text == one(lines)
    assert done.converted == ()
    assert what in done.refusals[0].what
    assert done.refusals[0].where == f"w.yaml:{line}"


def edited(old, new):
    assert old in TEMPLATE
    return TEMPLATE.replace(old, new)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            edited("range(n_nodes)", "range(n_nodes + 1)"),
            "asks for 2 nodes, and the group `fit` has 3",
        ),
        (edited("--nnodes {{n_nodes}}", "--nnodes 2"), "would not always be its number"),
        (edited("--node_rank {{item}}", "--node_rank 0"), "the node ranks of the group are 0, 0"),
        (edited("--lr 0.10", "--lr 0.1{{item}}"), "differ in the script's arguments"),
        (edited("OMP_NUM_THREADS: 1", "SEED: '{{item}}'"), "differ in `environment`"),
        (edited("{% if item == 0 %}", "{% if loop.first and item == 0 %}"), "can't be decided"),
        (edited("command: [bash]", "command: [bash, --login]"), "not a simple call of a script"),
        (edited("    {% else %}\n", "    {% else %}\n# {{ item }}\n"), None),
        (
            edited("          # Go.\n", "          {% if n_nodes > 9 %}\n          {% endif %}\n"),
            "by a template statement",
        ),
        (edited("in range(n_nodes)", "in [0, 1]"), "does not count with `range`"),
    ],
)
def test_a_group_whose_tasks_differ_by_more_than_their_rank_is_refused(text, what):
    done = convert(text)

    if what is None:
        assert done.text == TEMPLATE_SHORT
        return
    assert done.text == text
    assert what in done.refusals[0].what
    assert re.fullmatch(r"w\.yaml:\d+", done.refusals[0].where)


def test_every_line_that_speaks_against_it_is_named():
    text = LITERAL.replace("set -ex", "pip install einops")

    assert [e.where for e in convert(text).refusals] == ["w.yaml:16", "w.yaml:35"]


def test_one_group_is_converted_beside_another_that_is_not():
    bad = (
        LITERAL.split("  groups:\n")[1]
        .partition("  resources")[0]
        .replace("set -ex", "pip install x")
    )
    bad = bad.replace("name: fit", "name: bad").replace("head", "h2").replace("other", "o2")
    text = LITERAL.replace("  resources:", bad + "  resources:")
    done = convert(text)

    assert done.converted == ("fit",)
    assert "pip install x" in done.text
    lines = text.split("\n")
    for error in done.refusals:
        assert "pip install x" in lines[int(error.where.partition(":")[2]) - 1]
    assert len(done.refusals) == 2


def test_a_file_that_is_not_valid_is_reported_as_such():
    with pytest.raises(ManyErrors) as caught:
        convert(LITERAL.replace("lead: true", "lead: 7"))

    assert caught.value.errors


def test_a_worker_that_another_group_reads_keeps_the_group():
    text = LITERAL.replace(
        "  resources:",
        "  - name: look\n    tasks:\n    - name: see\n      command: [ls]\n"
        "      inputs:\n      - task: other\n  resources:",
    )
    done = convert(text)

    assert done.text == text
    assert "would not be valid" in done.refusals[0].what


def test_lines_of_a_file_from_windows_keep_their_ends():
    short = convert(LITERAL.replace("\n", "\r\n")).text

    assert short == LITERAL_SHORT.replace("\n", "\r\n")


def test_other_files_stay_and_the_script_keeps_its_place_beside_them():
    extra = "      - path: /tmp/fit.py\n        localpath: fit.py\n"
    text = LITERAL.replace(extra, extra + "      - path: /tmp/net.py\n        localpath: net.py\n")

    (task,) = rendered(convert(text).text)["groups"][0]["tasks"]

    assert task["script"] == "/tmp/fit.py"
    assert [entry["path"] for entry in task["files"]] == ["/tmp/fit.py", "/tmp/net.py"]


def test_a_file_in_the_working_directory_of_its_task_is_refused():
    extra = "      - path: /tmp/fit.py\n        localpath: fit.py\n"
    text = LITERAL.replace(extra, extra + "      - path: net.py\n        localpath: net.py\n")

    (error,) = convert(text).refusals

    assert error.what == "the file `net.py` is in the working directory of its task"
