# Identity of the run: `stop` ends the processes with this environment, and no others.
export FLAGSCALE_RUN_ID=20250102-030405-abcdef
export FLAGSCALE_STATUS_DIR='/data/a '"'"'b'"'"' "c" $HOME `id`
ü/logs/details/host_0_localhost/20250102-030405-abcdef/status'
# Defaults; overridden by `experiment.envs` and the environment of the launch.
export PYTHONUNBUFFERED=1
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='localhost:${rank}: '
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=5
export OMP_NUM_THREADS=4
export TORCHDYNAMO_DISABLE=1
# experiment.envs
export EVIL='a '"'"'b'"'"' "c" $HOME `id` $(id) \ , ; & | > * ? ~ ! {x,y} [z] # ü 🦙 -- 	 end
line 2
'
export EMPTY=''
export COMMA='0,1'
export TYPED='${host:EVIL}'
export AROUND='a '"'"'b'"'"' "c" $HOME `id` $(id) \ , ; & | > * ? ~ ! {x,y} [z] # ü 🦙 -- 	 end
line 2
'"$host__EVIL"'a '"'"'b'"'"' "c" $HOME `id` $(id) \ , ; & | > * ? ~ ! {x,y} [z] # ü 🦙 -- 	 end
line 2
'"$host__host_x"
export host_x='none of the script'"'"'s'

# The program's own packages, the adapted training backend, this project.
export PYTHONPATH=/opt/flagscale/third_party/Megatron-LM:/opt/flagscale/flagscale/rank_hooks:/opt/flagscale:/own"${host__PYTHONPATH:+:$host__PYTHONPATH}":/last

# Supervisor, launcher of the ranks, training program.
agent=(
    /opt/venv/bin/python /opt/flagscale/flagscale/run_module.py flagscale.launcher.agent
    --options '{
     "max_restarts": 0,
     "on_failure": "stop",
     "lost_host_timeout": 60.0,
     "start_timeout": 600.0,
     "hang_detection_timeout": 1800.0,
     "run_name": "evil\nname; rm -rf $HOME",
     "run_dir": "/data/a '"'"'b'"'"' \"c\" $HOME `id`\nü/logs/details/host_0_localhost/20250102-030405-abcdef",
     "name": "localhost",
     "node_rank": 0,
     "first_rank": 0,
     "nproc": 2,
     "stop_grace": 60.0
    }'
)
torchrun=(
    /opt/venv/bin/python -u /opt/flagscale/flagscale/run_module.py torch.distributed.run
    --nnodes 1
    --node_rank 0
    --nproc_per_node 2
    --rdzv_id 20250102-030405-abcdef
    --master_addr 127.0.0.1
    --master_port 29500
    --log_dir '/data/a '"'"'b'"'"' "c" $HOME `id`
ü/logs/details/host_0_localhost/20250102-030405-abcdef/ranks'
    --redirects 3
    --tee 3
    --max_restarts 0
)
program=(
    '/x y/$(id)/program'"'"'s.py'
    --label 'a '"'"'b'"'"' "c" $HOME `id` $(id) \ , ; & | > * ? ~ ! {x,y} [z] # ü 🦙 -- 	 end
line 2
'
    --many 'x y' '$z'
    --save '/data/a '"'"'b'"'"' "c" $HOME `id`
ü/checkpoints'
    --load '/data/a '"'"'b'"'"' "c" $HOME `id`
ü/checkpoints'
    --tensorboard-dir '/data/a '"'"'b'"'"' "c" $HOME `id`
ü/tensorboard'
    --wandb-save-dir '/data/a '"'"'b'"'"' "c" $HOME `id`
ü/wandb'
)

# experiment.cmds, verbatim.
IFS= read -r -d '' before_start <<'END_BEFORE_START_'
echo "END_BEFORE_START"
echo 'it''s $HOME'
END_BEFORE_START_
IFS= read -r -d '' after_stop <<'END_AFTER_STOP_'
END_AFTER_STOP
END_AFTER_STOP_

