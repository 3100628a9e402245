"""A converted workflow trains: two nodes with one worker each, through Gloo."""

from torchmuster.diagnose.convert.convert import convert_workflow
from torchmuster.spec.source import Source

FIT = """
import argparse, os, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--out")
options = parser.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
weight = torch.zeros(2)
for _ in range(options.steps):
    gradient = weight - torch.tensor([1.0, float(dist.get_rank())])
    dist.all_reduce(gradient)
    weight -= 0.25 * gradient
if dist.get_rank() == 0:
    torch.save(weight, options.out)
    size, group_rank = dist.get_world_size(), os.environ["GROUP_WORLD_SIZE"]
    print(f"{size} workers on {group_rank} nodes, {os.environ['KIND']}")
dist.barrier()
dist.destroy_process_group()
"""

TORCHRUN = """
workflow:
  name: fit
  groups:
  - name: training
    tasks:
    {% for item in range(n_nodes) %}
    {% if item == 0 %}
    - name: first
      lead: true
    {% else %}
    - name: more_{{item}}
    {% endif %}
      command: [bash]
      args: [/tmp/run.sh]
      files:
      - path: /tmp/run.sh
        contents: |
          set -ex
          mkdir -p {{output}}/models
          export KIND=torchrun
          torchrun --nnodes {{n_nodes}} --nproc_per_node 1 --node_rank {{item}} \\
                   --master_addr {{host:first}} --master_port {{master_port}} \\
                   /tmp/fit.py --steps {{n_steps}} --out {{output}}/models/weight.pt
      - path: /tmp/fit.py
        localpath: fit.py
    {% endfor %}

default-values:
  n_nodes: 2
  n_steps: 30
  master_port: 29400
"""


def test_the_short_form_trains_on_two_nodes_and_writes_where_the_long_one_did(
    run_workflow, tmp_path
):
    (tmp_path / "fit.py").write_text(FIT)
    done = convert_workflow(Source(path="w.yaml", text=TORCHRUN), {}, {})
    assert done.refusals == ()

    run = run_workflow(done.text)

    assert run.code == 0, run.out
    assert "2 workers on 2 nodes, torchrun" in run.out
    assert (run.output("first") / "models" / "weight.pt").stat().st_size > 0
