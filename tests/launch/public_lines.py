"""More lines from public scripts and threads, as `typed_lines` has them: tried together in one test."""

MORE = [
    (8, "CUDA_VISIBLE_DEVICES=0,1 ACCELERATE_LOG_LEVEL=info accelerate launch --num_processes 8 "
        "--main_process_port 25001 src/open_r1/grpo_value.py --config y.yaml",
     "tasks, once on each host: accelerate launch src/open_r1/grpo_value.py --config y.yaml"),
    (8, "srun composer train.py --config-path configs/yamls/dose-response "
        "\"dataset@dataset.train_dataset=train_dose_low\"",
     "tasks, once on each host: composer train.py --config-path configs/yamls/dose-response "
     "dataset@dataset.train_dataset=train_dose_low"),
    (16, "composer --nproc 8 --world_size 16 --node_rank 0 --master_addr 1.2.3.4 --master_port 7501 train.py "
        "x.yaml",
     "tasks, once on each host: composer train.py x.yaml"),
    (8, "nsys profile --sample=none -o p/node_0 composer train/train.py train/yamls/pretrain/m.yaml",
     "refused: gpurun cannot read the flags of composer in this command, so each of 8"),
    (8, "composer -n -d . require laravel/installer",
     "horovod: composer -n -d . require laravel/installer"),
    (8, "mpirun --allow-run-as-root --bind-to none --map-by :OVERSUBSCRIBE -np 8 --host "
        "10.31.154.11:4,10.31.154.12:4 -x LD_LIBRARY_PATH -x UK_CCL_UNBIND=1 ./all_reduce_perf -b 1M",
     "mpirun: ./all_reduce_perf -b 1M"),
    (8, "mpirun -np 8 --mca pml ucx --mca spml ucx --mca osc ucx --mca btl ^vader,tcp,openib,uct --map-by node "
        "--rank-by slot --bind-to none gmx_mpi mdrun -g x.log",
     "mpirun: gmx_mpi mdrun -g x.log"),
    (8, "mpirun -np 8 -H 192.168.100.101:1,192.168.100.102:1 --mca plm_rsh_agent \"ssh -o "
        "StrictHostKeyChecking=no\" --mca oob_tcp_if_include enP7s7 -x NCCL_IB_HCA==rocep1s0f1,roceP2p1s0f1 "
        "/root/all_gather_perf -b 512M",
     "mpirun: /root/all_gather_perf -b 512M"),
    (8, "mpirun -n 8 --map-by ppr:8:node:PE=1 --oversubscribe -x NCCL_NVLS_ENABLE -x PATH uv run finetune.py "
        "--launcher mpi --use_deepspeed",
     "mpirun: uv run finetune.py --launcher mpi --use_deepspeed"),
    (8, "mpirun -np 8 -x PATH=/usr/local/openmpi/bin:/usr/bin --mca plm_rsh_args \"-p 22\" "
        "./build/all_reduce_perf_mpi -b 8",
     "mpirun: ./build/all_reduce_perf_mpi -b 8"),
    (8, "mpirun -np 1 --map-by ppr:1:node --bind-to none -x HF_HOME torchrun --nnodes=1 --nproc_per_node=4 "
        "./sample_ddp_flow.py",
     "refused: mpirun starts a rank for each GPU, so torchrun would run 8 times"),
    (8, "mpirun -H node1:2 -H node2:2 ./build/all_reduce_perf -g 4",
     "refused: mpirun: the command asks for 4 processes, but the job has 8 GPUs and"),
    (8, "mpiexec --np 8 -ppn 4 --depth 16 --cpu-bind depth python3 -m dl_comm.dl_comm_main --config-path=/e",
     "mpirun: python3 -m dl_comm.dl_comm_main --config-path=/e"),
    (8, "mpiexec --np 8 -ppn 4 -d 8 --cpu-bind depth ./a",
     "refused: mpirun: gpurun does not support the"),
    (8, "horovodrun -np 8 python bind.py --cpu=exclusive --ib=single -- python3 main.py --x",
     "horovod: python bind.py --cpu=exclusive --ib=single -- python3 main.py --x"),
    (8, "horovodrun --mpi --mpi-args=\"--oversubscribe\" -np 8 -H a:4,b:4 python t.py",
     "horovod: python t.py"),
    (8, "deepspeed --hostfile=\"\" --include localhost:0 --master_port 12600 ../src/train/qwen.py --deepspeed "
        "zero3.json",
     "deepspeed: LOCAL_RANK ../src/train/qwen.py --deepspeed zero3.json"),
    (8, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True PYTHONPATH=. deepspeed --include localhost:0,3 "
        "cascade/main/llama_eval.py",
     "deepspeed: LOCAL_RANK cascade/main/llama_eval.py"),
    (8, "time srun --mpi=pmi2 -K1 --resv-ports -n 8 torchrun a.py",
     "torchrun: time python3 -u a.py"),
    (8, "srun torchrun --nnodes 8 --nproc_per_node 1 --max_restarts 0 --rdzv_endpoint h --redirects 3 --tee 3 "
        "net.py",
     "torchrun: python3 -u net.py"),
    (16, "srun accelerate launch --multi_gpu --num_processes=16 --num_machines=2 --machine_rank=0 "
        "--main_process_ip=h --mixed_precision=bf16 train.py",
     "tasks, once on each host: accelerate launch --mixed_precision=bf16 train.py"),
    (8, "srun bash -c 'torchrun --nproc_per_node=4 --nnodes=$SLURM_NNODES --node_rank=$SLURM_NODEID "
        "--master_addr=$MASTER_ADDR train.py | tee x'",
     "srun, once on each host: bash -c 'torchrun --nproc_per_node=4 --nnodes=$SLURM_NNODES "
     "--node_rank=$SLURM_NODEID --master_addr=$MASTER_ADDR train.py | tee x'"),
    (8, "srun bash -c 'accelerate launch --multi_gpu --num_processes 8 --num_machines 2 --machine_rank "
        "$SLURM_PROCID --main_process_ip $MASTER_ADDR train.py; echo'",
     "srun, once on each host: bash -c 'accelerate launch --multi_gpu --num_processes 8 --num_machines 2 "
     "--machine_rank $SLURM_PROCID --main_process_ip $MASTER_ADDR train.py; echo'"),
    (8, "docker run --gpus all -v /d:/d me/x torchrun --nproc_per_node=8 train.py",
     "refused: docker run starts a container, and gpurun itself starts"),
    (8, "bash -c 'nohup torchrun --nproc_per_node=8 train.py > log 2>&1 &'",
     "refused: the command starts torchrun in the background (&) and does not"),
    (8, "OMP_NUM_THREADS=2 time torchrun --rdzv-backend=c10d --rdzv-endpoint=localhost:4222 --nnodes=1 "
        "--nproc_per_node=8 ft.py config/x.py",
     "torchrun: time python3 -u ft.py config/x.py"),
    (8, "stdbuf -oL -eL torchrun --nproc_per_node=8 t.py",
     "torchrun: stdbuf -oL -eL python3 -u t.py"),
    (8, "nice -n 5 nohup stdbuf -oL uv run accelerate launch --num_processes 8 t.py",
     "tasks, once on each host: nice -n 5 nohup stdbuf -oL uv run accelerate launch t.py"),
    (8, "script -q -c \"torchrun --nproc_per_node=8 t.py\" log.txt",
     "refused: gpurun cannot read the flags of torchrun in this command, so each of 8"),
    (8, "command torchrun t.py",
     "torchrun: python3 -u t.py"),
    (8, "tmux new-session -d -s tr 'torchrun --nproc_per_node=8 t.py'",
     "refused: gpurun cannot read the flags of torchrun in this command, so each of 8"),
    (16, "fabric run model train_renderer.py --strategy=configs/ds.json --devices=8 --num-nodes=2 "
        "--accelerator=cuda --main-port=52444",
     "tasks, once on each host: fabric run model --strategy=configs/ds.json --accelerator=cuda "
     "train_renderer.py"),
    (8, "axolotl train c.yml --num-processes 8",
     "tasks, once on each host: axolotl train c.yml"),
    (8, "axolotl train c.yml --num-processes 16 --num-machines 2 --machine-rank 0",
     "refused: axolotl train: the command asks for 16 processes, but the job has 8 GPUs "),
    (8, "NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 swift sft --output_dir o --model m",
     "tasks, once on each host: swift sft --output_dir o --model m"),
    (8, "accelerate launch --mixed_precision=\"bf16\" --use_fsdp --fsdp_auto_wrap_policy "
        "TRANSFORMER_BASED_WRAP --fsdp_cpu_ram_efficient_loading False s.py",
     "tasks, once on each host: accelerate launch --mixed_precision=bf16 --use_fsdp --fsdp_auto_wrap_policy "
     "TRANSFORMER_BASED_WRAP --fsdp_cpu_ram_efficient_loading False s.py"),
    (8, "accelerate launch --no_python torchrun t.py",
     "refused: accelerate launch starts a rank for each GPU, so torchrun would run 8 times"),
    (8, "python -W ignore -m torch.distributed.launch --nproc_per_node=8 --use_env t.py",
     "torchrun: python -u t.py"),
    (8, "torchrun --nproc_per_node=8 --rdzv_endpoint 30000 --nnodes 1 examples/ft.py",
     "torchrun: python3 -u examples/ft.py"),
    (8, "salloc -N 2 --gres=gpu:4 torchrun t.py",
     "refused: salloc asks another queue for machines, but gpurun itself queues"),
    (8, "runai submit-dist pytorch --workers=3 -i x -g 1 -- python t.py",
     "refused: runai submit-dist asks another queue for machines, but gpurun itself"),
    (8, "mpirun -np 8 singularity exec --nv x.sif python t.py",
     "refused: mpirun starts a rank for each GPU, so singularity exec would run 8 times"),
    (8, "python /opt/conda/bin/deepspeed --num_gpus 8 t.py",
     "deepspeed: sh -c 'script=\"$1\"; shift; exec python -u \"$script\" --local_rank=\"$LOCAL_RANK\" \"$@\"' "
     "deepspeed t.py"),
    (8, "/usr/bin/env python3 -m torch.distributed.run t.py",
     "torchrun: python3 -u t.py"),
    (8, "bash -c 'srun -N2 torchrun t.py'",
     "torchrun: python3 -u t.py"),
]  # fmt: skip
