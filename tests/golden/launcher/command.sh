# Identity of the run: `stop` ends the processes with this environment, and no others.
export FLAGSCALE_RUN_ID=20250102-030405-abcdef
export FLAGSCALE_STATUS_DIR=/data/runs/tiny/logs/details/host_0_localhost/20250102-030405-abcdef/status
# Defaults; overridden by `experiment.envs` and the environment of the launch.
export PYTHONUNBUFFERED=1
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='localhost:${rank}: '
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5
export OMP_NUM_THREADS=8
export TORCHDYNAMO_DISABLE=1

# The program's own packages, the adapted training backend, this project.
export PYTHONPATH=/opt/flagscale/third_party/Megatron-LM:/opt/flagscale/flagscale/rank_hooks:/opt/flagscale"${PYTHONPATH:+:$PYTHONPATH}"

# Supervisor, launcher of the ranks, command.
agent=(
    /opt/venv/bin/python /opt/flagscale/flagscale/run_module.py flagscale.launcher.agent
    --options '{
     "max_restarts": 0,
     "on_failure": "stop",
     "lost_host_timeout": 60.0,
     "start_timeout": 600.0,
     "hang_detection_timeout": 1800.0,
     "run_name": "tiny llama",
     "run_dir": "/data/runs/tiny/logs/details/host_0_localhost/20250102-030405-abcdef",
     "name": "localhost",
     "node_rank": 0,
     "first_rank": 0,
     "nproc": 1,
     "stop_grace": 30,
     "reports_status": false
    }'
)
starter=(
    /opt/venv/bin/python /opt/flagscale/flagscale/run_module.py flagscale.launcher.rank_processes
    --nnodes 1
    --node_rank 0
    --nproc_per_node 1
    --rdzv_id 20250102-030405-abcdef
    --master_addr 127.0.0.1
    --master_port 29500
    --log_dir /data/runs/tiny/logs/details/host_0_localhost/20250102-030405-abcdef/ranks
    --redirects 3
    --tee 3
    --first_rank 0
    --world_size 1
    --stop_grace 30
    --
)
program=(
    '/opt/x y'
    -- 'a '"'"'b'"'"' "c" $HOME `id` $(id) \ , ; & | > * ? ~ ! {x,y} [z] # ü 🦙 -- 	 end
line 2
' ''
)

# experiment.cmds, verbatim.
before_start=
after_stop=

