#!/bin/bash
# A recipe on several hosts under SLURM: one torchrun per host, which starts a process per GPU.
#
#   sbatch --nodes 4 --gpus-per-node 8 recipes/slurm.sh recipes/gpt2_xl_zero3.yaml --data.path FOLDER
#
# Submit it from the repository's folder, on a file system that all hosts share. A job that was
# stopped goes on from its last checkpoint when it is submitted again: keep ModelCheckpoint's
# dirpath and save_last, as in recipes/gpt2_xl_zero3.yaml.
#SBATCH --job-name=recipe
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --output=runs/slurm-%j.log

set -euo pipefail
config=${1:?usage: sbatch [OPTIONS] recipes/slurm.sh CONFIG.yaml [OPTIONS of recipes.train]}
shift

python=${PYTHON:-.venv/bin/python}
num_processes=${SLURM_GPUS_ON_NODE:-1} # per host
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs on a host get two ports
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Or restarted ranks may look for a store of those that were killed (pytorch issue 135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

srun "$python" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$num_processes" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "${hosts[0]}:$port" \
    -m recipes.train fit --config "$config" \
    --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$num_processes" --ckpt_path last "$@"
