# Identity of the run: `stop` ends the processes with this environment, and no others.
export FLAGSCALE_RUN_ID=20250102-030405-abcdef
export FLAGSCALE_STATUS_DIR=/data/runs/tiny/logs/details/host_0_localhost/20250102-030405-abcdef/status
# Defaults; overridden by `experiment.envs` and the environment of the launch.
export PYTHONUNBUFFERED=1
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='localhost:${rank}: '
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5
export OMP_NUM_THREADS=1
export TORCHDYNAMO_DISABLE=1
# experiment.envs
export PATH=/opt/x/bin"${host_PATH:+:$host_PATH}"
export CUDA_VISIBLE_DEVICES='0,1,2,3,4,5,6,7'
# experiment.envs.device_type_specific.A800
export NCCL_IB_HCA='mlx5_0,mlx5_1'
# experiment.envs.node_specific.localhost
export NCCL_DEBUG=INFO
# Secrets are not written to files: they come from the environment.
: "${WANDB_API_KEY:?is a secret: export it, then run this script}"

# The program's own packages, the adapted training backend, this project.
export PYTHONPATH=/opt/flagscale/third_party/Megatron-LM:/opt/flagscale/flagscale/rank_hooks:/opt/flagscale"${PYTHONPATH:+:$PYTHONPATH}"

# Supervisor, launcher of the ranks, training program.
agent=(
    /opt/venv/bin/python /opt/flagscale/flagscale/run_module.py flagscale.launcher.agent
    --options '{
     "max_restarts": 1,
     "on_failure": "stop",
     "lost_host_timeout": 60.0,
     "start_timeout": 600.0,
     "hang_detection_timeout": 1800.0,
     "run_name": "tiny llama",
     "run_dir": "/data/runs/tiny/logs/details/host_0_localhost/20250102-030405-abcdef",
     "name": "localhost",
     "node_rank": 0,
     "first_rank": 0,
     "nproc": 8,
     "stop_grace": 60.0
    }'
)
torchrun=(
    /opt/venv/bin/python -u /opt/flagscale/flagscale/run_module.py torch.distributed.run
    --nnodes 1
    --node_rank 0
    --nproc_per_node 8
    --rdzv_id 20250102-030405-abcdef
    --master_addr 127.0.0.1
    --master_port 29500
    --log_dir /data/runs/tiny/logs/details/host_0_localhost/20250102-030405-abcdef/ranks
    --redirects 3
    --tee 3
    --max_restarts 0
)
program=(
    /opt/program.py
    --tensor-model-parallel-size 2
    --save-interval 100
    --num-layers 32
    --bf16
    --data-path 0.3 /data/a 0.7 /data/b
    --split '99,1,0'
    --save /data/runs/tiny/checkpoints
    --load /data/runs/tiny/checkpoints
    --tensorboard-dir /data/runs/tiny/tensorboard
    --wandb-save-dir /data/runs/tiny/wandb
)

# experiment.cmds, verbatim.
IFS= read -r -d '' before_start <<'END_BEFORE_START'
source /opt/env.sh
ulimit -l unlimited
END_BEFORE_START
IFS= read -r -d '' after_stop <<'END_AFTER_STOP'
echo "it's over"
END_AFTER_STOP

