#!/bin/bash

#PBS -N ddp
#PBS -l select=2:ncpus=288:mpiprocs=2:sales_op=blanca,walltime=3:00:00,place=scatter
#PBS -q blanca

# Print job information
echo "Job ID: $PBS_JOBID"
echo "Job Name: $PBS_JOBNAME"
echo "Queue: $PBS_QUEUE"
echo "Number of Nodes Requested: $(sort $PBS_NODEFILE | uniq | wc -l)"
echo "Hostname of the Current Node: $(hostname)"
echo "List of Assigned Nodes:"
sort $PBS_NODEFILE | uniq
echo ""

# load modules
module load cray-python/3.11.7
module load cuda/12.6
module list

# Activate 
source /home/users/<your-username>/ddpTest/myenv/bin/activate
echo "Python Version: $(python --version)"
echo "Python Path: $(which python)"
echo ""

# Get node information
nodes=($(sort $PBS_NODEFILE | uniq))
head_node=${nodes[0]}
worker_node=${nodes[1]}
echo "Head node: $head_node"
echo "Worker node:$worker_node"

# Get the IP adress of the head node
head_node_ip=$(ssh "$head_node" "hostname -I | awk '{print \$1}'")
echo "Head Node IP: $head_node_ip"

# Test connectivity to the head node
echo "Testing connectivity to head node..."
ping -c 1 "$head_node_ip"

# Set environment variables

export NCCL_DEBUG=INFO
#NCCL_SOCKET_IFNAME=hsn0

# Launch ddp job
echo "Launching DDP job...."
torchrun --nnodes=2 --nproc_per_node=2 --rdzv_id=$RANDOM --rdzv_backend=c10d --rdzv_endpoint=$head_node_ip:29500 /home/users/<your-username>/ddpTest/multi_node.py 50 10
deactivate
