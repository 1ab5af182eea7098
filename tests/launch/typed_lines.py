"""Lines as people type them, each with where it stands; what a shell would put in for a variable is put in.

Each: GPUs of the job, line, what becomes of it ("launcher: command of each rank", or "refused: words of the message").
"""

LINES = [
    # PyTorch's torchrun
    (4, "torchrun --nproc_per_node=4 -m uarf.cli.uarf_cli run --model Qwen/Qwen2.5-7B --distributed",
     "torchrun: python3 -u -m uarf.cli.uarf_cli run --model Qwen/Qwen2.5-7B --distributed"),  # README, UARF
    (1, "torchrun --nproc_per_node=1 --master_port=2122 test_pose_10k.py --num_imgs 2",
     "torchrun: python3 -u test_pose_10k.py --num_imgs 2"),  # script, RealEstate10k
    (2, "torchrun --nproc_per_node=2 benchmark_device_communicators.py --sequence-lengths 512 1024 --num-warmup 10",
     "torchrun: python3 -u benchmark_device_communicators.py --sequence-lengths 512 1024 --num-warmup 10"),  # vLLM
    (4, "torchrun --nproc_per_node=4  mle.py --deepspeed ds_stage_2.json --gradient_checkpointing True",
     "torchrun: python3 -u mle.py --deepspeed ds_stage_2.json --gradient_checkpointing True"),  # RTL-Coder
    (32, "torchrun --nproc_per_node 8 --nnodes 4 --master_addr 10.208.55.55 --node_rank 0 --master_port 6000 "
         "/workspace/Megatron-LM/pretrain_gpt.py --tp 4",
     "torchrun: python3 -u /workspace/Megatron-LM/pretrain_gpt.py --tp 4"),  # script, Megatron-LM
    (1, "CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 torchrun --nproc_per_node=1 "
        "scripts/debug_nan_training_step.py --steps 12",
     "torchrun: python3 -u scripts/debug_nan_training_step.py --steps 12"),
    (4, "torchrun --rdzv_backend c10d --rdzv_endpoint localhost:0 --nproc_per_node=4 train.py imagenet",
     "torchrun: python3 -u train.py imagenet"),  # timm
    (6, "torchrun --nnodes=1:3 --nproc_per_node=2 --rdzv_id=1 --rdzv_backend=c10d --rdzv_endpoint=ib1:8880 "
        "train_ms.py",
     "torchrun: python3 -u train_ms.py"),  # run_Mgpus.sh, Bert-VITS2
    (16, "torchrun --nproc_per_node=8 --nnodes=2 --node_rank 0 --master_addr 10.10.10.16 --master_port 29500 "
         "train.py --arg1 --arg2",
     "torchrun: python3 -u train.py --arg1 --arg2"),  # docs, Lightning
    (4, "torchrun --standalone --nproc_per_node=4 train_sft.py --pretrain /path/to/LLaMa-7B/ --model llama",
     "torchrun: python3 -u train_sft.py --pretrain /path/to/LLaMa-7B/ --model llama"),  # ColossalChat
    (8, "torchrun --local-ranks-filter 0 --role rank --tee 3 train.py --job.config_file llama3_8b.toml",
     "torchrun: python3 -u train.py --job.config_file llama3_8b.toml"),  # torchtitan
    (2, "python -m torch.distributed.run --nproc_per_node=2 --max_restarts=0 train.py --data coco.yaml",
     "torchrun: python -u train.py --data coco.yaml"),  # YOLO
    (2, "torchrun --nproc-per-node=8 --nnodes=4 train.py",
     "refused: torchrun: the command asks for 32 processes"),
    (2, "torchrun --nnodes 2 --node_rank=1 --master_addr=10.20.1.170 --nproc_per_node 8  benchmark.py -p 3d",
     "refused: torchrun: the command asks for 16 processes"),  # ColossalAI
    (4, "torchrun --virtual-local-rank --nproc-per-node=4 train.py",
     "refused: torchrun: gpurun does not support the flag --virtual-local-rank"),
    (2, "OMP_NUM_THREADS=1 python3 /opt/conda/bin/torchrun --nproc_per_node=2 train.py",
     "torchrun: python3 -u train.py"),
    # uv, poetry, conda, env and shells in front of it
    (2, "CUDA_VISIBLE_DEVICES=0,1 uv run torchrun --standalone --nnodes=1 --nproc_per_node=2 scripts/train_pytorch.py "
        "dp_libero --exp-name dp_libero_test --overwrite",
     "torchrun: uv run python3 -u scripts/train_pytorch.py dp_libero --exp-name dp_libero_test --overwrite"),
    (4, "uv run torchrun --nproc_per_node=4 train.py --size small --chunk-size 1024",
     "torchrun: uv run python3 -u train.py --size small --chunk-size 1024"),
    (2, "uv run torchrun --nproc_per_node=2 -m examples.ddp_mnist.main",
     "torchrun: uv run python3 -u -m examples.ddp_mnist.main"),
    (2, "uv run torchrun --standalone --nproc_per_node 2 -m zero.train.pretrain --config configs/tiny/pretrain.toml",
     "torchrun: uv run python3 -u -m zero.train.pretrain --config configs/tiny/pretrain.toml"),
    (2, "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0,1 uv run torchrun --nproc_per_node=2 "
        "examples/ddp_fsdp.py",
     "torchrun: uv run python3 -u examples/ddp_fsdp.py"),  # ParaRNN
    (4, "uv run --frozen --extra gpu python -m torch.distributed.run --nproc_per_node=4 pretrain_gpt.py",
     "torchrun: uv run --frozen --extra gpu python -u pretrain_gpt.py"),
    (2, "conda run --no-capture-output -n train torchrun --nproc_per_node=2 train.py",
     "torchrun: conda run --no-capture-output -n train python3 -u train.py"),
    (8, "poetry run torchrun --nproc_per_node 8 main.py",
     "torchrun: poetry run python3 -u main.py"),
    (2, "bash -c 'torchrun --nproc-per-node 2 --standalone train.py --n 1,2'",
     "torchrun: python3 -u train.py --n 1,2"),
    (8, "/bin/bash -c 'torchrun --nnodes 1:1 --nproc-per-node 8 --rdzv_id=101 --rdzv_backend=c10d "
        "--rdzv_endpoint=node:29400 scripts/train.py config.yaml'",
     "torchrun: python3 -u scripts/train.py config.yaml"),  # OLMo
    (6, "srun bash -c 'torchrun --nproc_per_node=3 --nnodes=2 --node_rank=$SLURM_NODEID --master_addr=n1 "
        "pretrain_modify.py'",
     "refused: the command names hosts for torchrun, but"),  # scBERT
    (8, "bash -c 'cd /work && torchrun --nproc_per_node=8 train.py'",
     "tasks, once on each host: bash -c 'cd /work && torchrun --nproc_per_node=8 train.py'"),
    (2, "timeout 3600 nohup torchrun --nproc_per_node=2 train.py",
     "torchrun: timeout 3600 nohup python3 -u train.py"),
    # Slurm's srun
    (4, "srun torchrun --nproc_per_node=4 train_autoencoder.py --workdir=/data",
     "torchrun: python3 -u train_autoencoder.py --workdir=/data"),  # tqdne
    (256, "srun torchrun --nproc_per_node=8 --nnodes=32 --rdzv_id=77 --rdzv_backend=c10d --rdzv_endpoint=n1:29500 "
          "src/train.py conf.yaml",
     "torchrun: python3 -u src/train.py conf.yaml"),  # LLaMA-Factory, Slurm
    (2, "srun torchrun --nnodes 2 --nproc_per_node 1 --max_restarts 0 --rdzv_backend c10d --rdzv_id 5 "
        "--rdzv_endpoint n1:29500 train.py",
     "torchrun: python3 -u train.py"),
    (16, "OMPI_MCA_btl_tcp_if_include=eth0 srun --exclusive --mem=0 --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 "
         "--mpi=pmix all_reduce_perf_mpi -b 512M -e 8G -f 2 -g 1",
     "refused: srun: gpurun does not support the flag --mem=0"),  # nebius/soperator
    (2, "srun -N2 --ntasks-per-node=1 --mpi=pmix python train.py",
     "srun: python train.py"),
    (1, "srun python -m torch.distributed.launch --nproc_per_node=1 diora/scripts/train_bert.py --arch mlp-shared",
     "torchrun: LOCAL-RANK diora/scripts/train_bert.py --arch mlp-shared"),
    # torch.distributed.launch
    (8, "python -m torch.distributed.launch --nproc_per_node=8 src/tools/run_gphmer_handmesh.py --arch hrnet-w64",
     "torchrun: LOCAL-RANK src/tools/run_gphmer_handmesh.py --arch hrnet-w64"),
    (8, "python3 -m torch.distributed.launch --nproc_per_node=8 --master_port=29501 tools/test.py cfg.py w.pth "
        "--launcher pytorch --eval track",
     "torchrun: LOCAL-RANK tools/test.py cfg.py w.pth --launcher pytorch --eval track"),  # MMTracking
    (2, "CUDA_VISIBLE_DEVICES=0,1 python -m torch.distributed.launch --nproc_per_node=2 --master_port=29501 "
        "scripts/dist_train_voc_seg_neg.py --work_dir w",
     "torchrun: LOCAL-RANK scripts/dist_train_voc_seg_neg.py --work_dir w"),
    (8, "python -m torch.distributed.launch --nproc_per_node=8 --use_env main.py --model deit_small",
     "torchrun: python -u main.py --model deit_small"),  # DeiT
    (64, "python -m torch.distributed.launch --nproc_per_node=8 --nnodes=8 --node_rank=0 main_ldm.py",
     "torchrun: LOCAL-RANK main_ldm.py"),  # rcg
    # DeepSpeed
    (4, "deepspeed --num_gpus=4 --master_port=29500 scripts/train_cpt.py --deepspeed configs/ds_config_zero3.json",
     "deepspeed: LOCAL_RANK scripts/train_cpt.py --deepspeed configs/ds_config_zero3.json"),
    (2, "deepspeed --num_gpus 1 --num_nodes 2 --hostfile hosts --no_ssh --node_rank=0 --master_addr n1 "
        "--master_port=12345 train.py",
     "deepspeed: LOCAL_RANK train.py"),
    (2, "deepspeed --num_gpus=2 --module swift.cli.sft --model Qwen/Qwen3-VL-32B-Instruct",
     "deepspeed: python3 -u -m swift.cli.sft --model Qwen/Qwen3-VL-32B-Instruct"),
    (4, "deepspeed --hostfile hostfile --include=work1:2,3 training.py",
     "deepspeed: LOCAL_RANK training.py"),  # DeepSpeed 3625
    (4, "deepspeed --include=localhost:1,2,6,7 ../pretrain_gpt2.py --model-parallel-size 2",
     "deepspeed: LOCAL_RANK ../pretrain_gpt2.py --model-parallel-size 2"),  # DeepSpeed 2920
    (2, "uv run deepspeed --include localhost:0,1 src/main.py",
     "deepspeed: uv run LOCAL_RANK src/main.py"),
    (8, "deepspeed --exclude worker-5:3 train.py",
     "deepspeed: LOCAL_RANK train.py"),  # DeepSpeed 662
    (4, "deepspeed --hostfile /etc/mpi/hostfile cifar10_deepspeed.py --deepspeed --deepspeed_config ds_config.json",
     "deepspeed: LOCAL_RANK cifar10_deepspeed.py --deepspeed --deepspeed_config ds_config.json"),
    # Horovod
    (4, "horovodrun -np 4 -H localhost:4 python3 tensorflow_mnist.py",
     "horovod: python3 tensorflow_mnist.py"),
    (16, "horovodrun -np 16 -H server1:4,server2:4,server3:4,server4:4 python train_dalle.py --distributed_backend "
         "horovod",
     "horovod: python train_dalle.py --distributed_backend horovod"),  # DALLE-pytorch
    (16, "horovodrun -np 16 -hostfile /home/u/ib_config -p 2222 --network-interface ib0 python "
         "/examples/tensorflow2_keras_mnist.py",
     "horovod: python /examples/tensorflow2_keras_mnist.py"),  # apulis
    (8, "horovodrun -np 8 --min-np 4 --max-np 8 --host-discovery-script ./discover.sh python train.py",
     "horovod: python train.py"),  # Horovod, elastic
    (2, "CUDA_VISIBLE_DEVICES=6 horovodrun -np 2 --autotune --autotune-log-file /tmp/a.csv python pretrain.py",
     "horovod: python pretrain.py"),
    (2, "horovodrun -np 4 python distributed_training.py",
     "refused: horovodrun: the command asks for 4 processes"),
    # mpirun and mpiexec
    (16, "mpirun -np 16 -H server1:4,server2:4,server3:4,server4:4 -bind-to none -map-by slot -x NCCL_DEBUG=INFO "
         "-x LD_LIBRARY_PATH -x PATH -mca pml ob1 -mca btl ^openib python train.py",
     "mpirun: python train.py"),  # Horovod's documentation
    (16, "NCCL_DEBUG=INFO mpirun -mca btl_openib_receive_queues P,128,32:P,2048,32 -x LD_LIBRARY_PATH -x "
         "NCCL_DEBUG -n 16 "
         "-H host1:4,host2:4,host3:4,host4:4 python tf_cnn_benchmarks.py --model resnet101",
     "mpirun: python tf_cnn_benchmarks.py --model resnet101"),  # Horovod 21
    (4, "mpirun -np 4 -npernode 1 -x NCCL_DEBUG=INFO -x NCCL_SOCKET_IFNAME=ib0 -x NCCL_IB_HCA=mlx4_0 -x "
        "LD_LIBRARY_PATH "
        "-mca btl ^openib -x UCX_MEM_MALLOC_HOOKS=no -mca btl_tcp_if_include ib0 python horovod_main_testing.py",
     "mpirun: python horovod_main_testing.py"),  # 492
    (2, "/usr/bin/mpirun --hostfile HOSTFILE --mca btl tcp,self --mca btl_tcp_if_exclude docker0,lo "
        "--bind-to none -N 1 "
        "-x NCCL_DEBUG=INFO nccl-tests/build/all_reduce_perf --minbytes 8 --ngpus 1",
     "mpirun: nccl-tests/build/all_reduce_perf --minbytes 8 --ngpus 1"),  # nccl-tests 36
    (2, "mpirun --allow-run-as-root --tag-output -np 2 -H localhost:2 -bind-to none -map-by slot -mca pml "
        "ob1 -x CUDA_PATH "
        "python train.py",
     "mpirun: python train.py"),  # Horovod 2097
    (4, "mpirun --allow-run-as-root -np 4 -mca coll ^hcoll ./bench --path a",
     "mpirun: ./bench --path a"),
    (2, "taskset -c 0-23 mpirun --allow-run-as-root -np 2 python3 test.py",
     "mpirun: taskset -c 0-23 python3 test.py"),
    (16, "mpirun --allow-run-as-root -np 16 --map-by ppr:8:node --rank-by slot --report-bindings --wdir /work "
         "./all_reduce_perf -b 8",
     "mpirun: ./all_reduce_perf -b 8"),
    (4, "mpiexec -n 4 python ./mpi_convert.py results.txt",
     "mpirun: python ./mpi_convert.py results.txt"),
    (8, "mpiexec -n 8 -ppn 4 -genv NCCL_DEBUG INFO python train.py",
     "mpirun: python train.py"),  # Hydra
    (4, "mpirun -n 1 ./master : -n 3 ./worker",
     "refused: mpirun: the command starts several programs (':')"),
    # launchers that read a configuration of their own, or start processes on each host themselves
    (4, "accelerate launch --num_processes 4 main.py",
     "tasks, once on each host: accelerate launch main.py"),
    (2, "accelerate launch --multi_gpu --num_processes 2 pixart_kd_finetune.py --quant_method RPCA",
     "tasks, once on each host: accelerate launch pixart_kd_finetune.py --quant_method RPCA"),
    (8, "accelerate launch --num_processes=8 --main_process_port 12345 -m lmms_eval --model llava_hf",
     "tasks, once on each host: accelerate launch -m lmms_eval --model llava_hf"),  # lmms-eval
    (1, "uv run accelerate launch --num_processes 1 --mixed_precision bf16 packages/ltx-trainer/process_dataset.py",
     "tasks: uv run accelerate launch --num_processes 1 --mixed_precision bf16 "
     "packages/ltx-trainer/process_dataset.py"),
    (8, "uv run accelerate launch --config_file configs/fsdp.yaml train.py --config_path=configs/config.yaml",
     "tasks, once on each host: uv run accelerate launch --config_file configs/fsdp.yaml train.py "
     "--config_path=configs/config.yaml"),
    (2, "FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=0 MASTER_ADDR=192.168.0.1 MASTER_PORT=29500 llamafactory-cli train "
        "examples/train_lora/qwen2vl_full_sft.yaml",
     "tasks, once on each host: llamafactory-cli train examples/train_lora/qwen2vl_full_sft.yaml"),  # LLaMA-Factory
    (1, "FORCE_TORCHRUN=1 llamafactory-cli train examples/2025_train_full/qwen2_5omni_full_sft.yaml",
     "tasks: llamafactory-cli train examples/2025_train_full/qwen2_5omni_full_sft.yaml"),
    (4, "bash -lc 'FORCE_TORCHRUN=1 llamafactory-cli train cfg.yaml 2>&1 | tee run.log'",
     "tasks, once on each host: bash -lc 'FORCE_TORCHRUN=1 llamafactory-cli train cfg.yaml 2>&1 | tee run.log'"),
    (8, "bash -c 'sbatch train.sbatch'", "refused: sbatch asks another queue for machines"),
    (1, "sbatch -N 2 --gres=gpu:a100:8 train.sbatch", "refused: sbatch asks another queue for machines"),
    (1, "ray job submit -- torchrun x.py", "refused: ray job submit asks another queue for machines"),
    (16, "srun -N2 bash -c 'source /opt/env.sh; torchrun --nproc_per_node=8 --nnodes=$NNODES "
         "--node_rank=$NODE_RANK --master_addr=$MASTER_ADDR x.py'",
     "srun, once on each host: bash -c 'source /opt/env.sh; torchrun --nproc_per_node=8 --nnodes=$NNODES "
     "--node_rank=$NODE_RANK --master_addr=$MASTER_ADDR x.py'"),
    (8, "mpirun -np 1 ./all_reduce_perf -b 8 -e 256M -f 2 -g 8", "refused: mpirun: the command asks for 1 process,"),
    (8, "composer -n 8 --stderr output_{rank}.out --stdout output_{rank}.out main.py yamls/main/modernbert-base.yaml",
     "tasks, once on each host: composer --stderr 'output_{rank}.out' --stdout 'output_{rank}.out' main.py "
     "yamls/main/modernbert-base.yaml"),
    (4, "colossalai run --nproc_per_node 4 --master_port 29501 benchmark.py -p 3d --pp 4 -b 16 -g -x",
     "tasks, once on each host: colossalai run benchmark.py -p 3d --pp 4 -b 16 -g -x"),
    (8, "colossalai run --nproc_per_node 4 --hostfile hostfile --master_port 31312 train_dpo.py --pretrain p",
     "tasks, once on each host: colossalai run train_dpo.py --pretrain p"),
    (2, "tune run --nproc_per_node 2 lora_finetune_distributed --config llama3/8B_lora",
     "tasks, once on each host: tune run lora_finetune_distributed --config llama3/8B_lora"),  # torchtune
    # what was got wrong: found in public repositories
    (2, "torchrun --nnode=1 --nproc_per_node=2 train-multiple-gpus.py with Triplet base_model=laion/clap-htsat-unfused",
     "torchrun: python3 -u train-multiple-gpus.py with Triplet base_model=laion/clap-htsat-unfused"),  # argparse
    (2, "singularity exec --pwd /home --nv -B /myovision:/mnt image bash -c "
        "'cd /mnt/myovision-sam && torchrun --standalone --nproc_per_node=gpu train.py'",
     "refused: singularity exec starts a container, and gpurun itself"),  # myovision-sam
    (2, "python -m debugpy --listen 0.0.0.0:9999 --wait-for-client -m torch.distributed.run --nproc_per_node=2 "
        "tools/train.py cfg.py --launcher pytorch",
     "refused: gpurun cannot read the flags of torchrun in this command"),
    (2, "python -um torch.distributed.launch --nproc_per_node=2 train.py",
     "refused: gpurun cannot read the flags of torch.distributed.launch in this command"),
    (2, "python -mtorch.distributed.run --nproc_per_node=2 train.py",
     "refused: gpurun cannot read the flags of torchrun in this command"),
    (4, "mpiexec -host gpu07 -n 4 -ppn 4 -genv FI_PROVIDER=verbs -genv MPIR_CVAR_ALLREDUCE_CCL ucc ./ucc_bench -n 1024",
     "mpirun: ./ucc_bench -n 1024"),  # Hydra splits NAME=VALUE
    (2, "mpirun -n 2 --display map-devel --runtime-options abort-nonzero-status --stream-buffering 0 --gomca btl tcp "
        "--amca x --path /opt/b ./a",
     "mpirun: ./a"),  # Open MPI 5
    (2, "mpirun -np 2 --report-pid - --leave-session-attached --debug-daemons ./a",
     "mpirun: ./a"),
    (2, "horovodrun -np 2 --min-np=1 --blacklist-cooldown-range 15 30 --host-discovery-script d.sh "
        "--log-hide-timestamp python3 horovod_mnist_elastic.py",
     "horovod: python3 horovod_mnist_elastic.py"),
    (2, "deepspeed --num_accelerators 2 train.py", "deepspeed: LOCAL_RANK train.py"),
    (2, "colossalai run -host a,b --nproc_per_node 1 train.py",
     "tasks, once on each host: colossalai run train.py"),
    (2, "python -m torch.distributed.launch --nproc_per_node=2 --logdir logs train.py",
     "torchrun: LOCAL-RANK train.py"),  # PyTorch 1.7
    (4, "srun -lu -K1 --resv-ports --mpi=pmi2 -n 4 torchrun --nproc_per_node=4 train.py",
     "torchrun: python3 -u train.py"),
    (4, "srun --network=disable_rdzv_get --container-writable torchrun train.py",
     "refused: srun: gpurun does not support the flag --container-writable"),
    (2, "torchrun \u2014nproc_per_node=2 train.py",
     "refused: torchrun: \u2014nproc_per_node=2 begins with a typographic dash"),  # pasted from a web page
    (2, "mpirun \u2013np 2 ./a", "refused: mpirun: \u2013np begins with a typographic dash"),
    # ... and right before, of kinds that are not above
    (16, "mpirun -np 16 --bind-to numa --map-by ppr:8:node -x LD_LIBRARY_PATH=/usr/local/plugins/lib:/x "
         "-x NCCL_DEBUG=INFO -mca coll_hcoll_enable 0 "
         "-x UCX_TLS=tcp /opt/nccl-tests/build/all_reduce_perf -b8 -f 2 -g 1 -e 8G -c 1",
     "mpirun: /opt/nccl-tests/build/all_reduce_perf -b8 -f 2 -g 1 -e 8G -c 1"),  # Azure
    (4, "srun singularity exec --nv nanotron.sif torchrun --nnodes 2 --nproc-per-node=2 train.py --filename x",
     "refused: singularity exec starts a container, and gpurun itself"),
    (2, "xvfb-run -a -s '-screen 0 1280x800x24' torchrun --nproc_per_node=2 train.py",
     "torchrun: xvfb-run -a -s '-screen 0 1280x800x24' python3 -u train.py"),
    (2, "numactl --all --interleave all torchrun --nproc_per_node=2 train.py",
     "torchrun: numactl --all --interleave all python3 -u train.py"),
    (2, "/usr/bin/time -f %M torchrun --nproc_per_node=2 train.py",
     "torchrun: /usr/bin/time -f %M python3 -u train.py"),
    (2, "rye run torchrun --nproc_per_node=2 train.py", "torchrun: rye run python3 -u train.py"),
    (4, "axolotl train config.yml", "tasks, once on each host: axolotl train config.yml"),
    (4, "python -m paddle.distributed.launch --gpus 0,1,2,3 train.py",
     "refused: paddle.distributed.launch starts processes of its own on each host"),
    (4, "python -m lightning run model --devices 4 train.py",
     "tasks, once on each host: python -m lightning run model train.py"),
    (4, "mpirun.mpich -np 4 ./a", "mpirun: ./a"),
    (4, "flux run -n 4 -g 1 ./a", "refused: flux run starts processes of its own on each host"),
    (4, "lrun -n 4 ./a", "refused: lrun starts processes of its own on each host"),
    (8, "torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth=26",
     "torchrun: python3 -u -m scripts.base_train -- --depth=26"),  # nanochat
    (4, "torchrun --nproc_per_node ${NPROC} train.py",
     "refused: torchrun: --nproc-per-node must be a number, not '${NPROC}'"),
    (4, "horovodrun --hostfile hostfile -np 4 --mpi-args='--map-by socket:pe=3 -x A=/a' bash ./train_eval_test.sh",
     "horovod: bash ./train_eval_test.sh"),
    # flags of other MPIs and of Slurm, and texts of env
    (16, "mpiexec -n 16 --ppn 4 --depth=8 --cpu-bind depth --env OMP_NUM_THREADS=8 ./affinity.sh python3 test.py",
     "mpirun: ./affinity.sh python3 test.py"),  # HPE's PALS, on Polaris
    (8, "mpiexec.hydra -n 8 -ppn 4 -l -rr -print-rank-map -genv I_MPI_PIN 1 -bootstrap ssh ./a.out -l",
     "mpirun: ./a.out -l"),  # Intel MPI
    (4, "mpirun -prepend-rank -rmk pbs -binding cell:numa -n 4 ./a", "mpirun: ./a"),  # MPICH
    (4, "mpirun -genvexcl A -n 4 ./a", "refused: mpirun: gpurun does not support the flag -genvexcl"),
    (4, "mpirun --version", "refused: mpirun: gpurun does not support the flag --version"),
    (8, "srun --mpi=pmix --gpu-freq=high --profile=task -L foo:1 torchrun --nproc_per_node=8 t.py",
     "torchrun: python3 -u t.py"),
    (8, "srun --dependency=afterok:1 torchrun t.py",
     "refused: srun: gpurun does not support the flag --dependency=afterok:1"),
    (8, "srun --ear=on torchrun t.py",
     "refused: srun: gpurun does not know the flag --ear=on"),  # a site's plugin
    (4, "env -S 'A=1 torchrun --nproc_per_node=4 x.py' --lr 1", "torchrun: python3 -u x.py --lr 1"),
    (4, "env -u B -vS 'torchrun x.py'", "torchrun: env -u B python3 -u x.py"),
    (4, "env --split-string='torchrun x.py ${A}'",
     "refused: gpurun cannot read the flags of torchrun in this command"),
    (4, "env -i -S 'torchrun x.py'", "refused: gpurun cannot read the flags of torchrun in this command"),
    # launchers of other frameworks, other queues, and texts of other programs
    (8, "NPROC_PER_NODE=8 xtuner train internlm_7b_qlora --deepspeed deepspeed_zero2",
     "refused: xtuner train starts processes of its own on each host"),
    (8, "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 swift sft --model Qwen/Qwen2-7B --deepspeed zero2",
     "tasks, once on each host: swift sft --model Qwen/Qwen2-7B --deepspeed zero2"),
    (8, "litgpt pretrain pythia-14m --devices 8", "refused: litgpt pretrain starts processes of its own on each host"),
    (8, "mim train mmdet configs/x.py --gpus 8", "refused: mim train starts processes of its own on each host"),
    (8, "python3 -m torch_xla.distributed.xla_dist --tpu=t -- python3 /x.py",
     "refused: xla_dist starts processes of its own on each host"),
    (4, "python -m deepspeed.launcher.launch --world_info=abc train.py",
     "refused: deepspeed.launcher.launch starts processes of its own on each host"),
    (8, "dlrover-run --nnodes=2 --nproc_per_node=4 train.py",
     "refused: dlrover-run starts processes of its own on each host"),
    (8, "ipexrun --nnodes 2 train.py", "refused: ipexrun starts processes of its own on each host"),
    (8, "msrun --worker_num=8 train.py", "refused: msrun starts processes of its own on each host"),
    (8, "bpslaunch python3 train.py", "refused: bpslaunch starts processes of its own on each host"),
    (4, "oshrun -np 4 ./a", "refused: oshrun starts processes of its own on each host"),
    (8, "ray start --head --block", "refused: ray start starts processes of its own on each host"),
    (16, "lightning run model --node-rank=0 --main-address=192.168.48.36 --devices=8 --num-nodes=2 pretrain/x.py",
     "tasks, once on each host: lightning run model pretrain/x.py"),
    (8, "oumi distributed torchrun -m oumi train -c cfg.yaml",
     "refused: gpurun cannot read the flags of torchrun in this command"),
    (4, "coverage run -m torch.distributed.run --nproc_per_node=4 x.py",
     "refused: gpurun cannot read the flags of torchrun in this command"),
    (4, "script -qc 'torchrun --nproc_per_node=4 x.py' /dev/null",
     "refused: gpurun cannot read the flags of torchrun in this command"),
    (4, "./notify --text 'torchrun is here' 'no torchrun there'",
     "horovod: ./notify --text 'torchrun is here' 'no torchrun there'"),
    (64, "srun -p llm_s -n 8 -N 8 --ntasks-per-node=1 --gpus-per-task=8 -w 'HOST-10-[1-8]' torchrun --nproc_per_node 8 "
         "--rdzv_endpoint 10.140.60.12:29500 --local-ranks-filter 0 ./train.py --job.config_file c.toml",
     "torchrun: python3 -u ./train.py --job.config_file c.toml"),  # torchtitan
    (8, "python -m torch.distributed.launch --use_env --nproc_per_node=4 --nnodes=2 --node_rank=0 "
        "--master_addr=localhost /opt/bin/fairseq-hydra-train --config-dir hubert",
     "torchrun: python -u /opt/bin/fairseq-hydra-train --config-dir hubert"),
    (8, "mpirun -n 8 -N 4 --bind-to none nsys profile -o rep_%q{OMPI_COMM_WORLD_RANK} python train.py",
     "mpirun: nsys profile -o 'rep_%q{OMPI_COMM_WORLD_RANK}' python train.py"),
    # as they were understood before gpurun read whole lines
    (4, "torchrun --no-python ./train -n 3", "torchrun: ./train -n 3"),
    (4, "torchrun --no_python ./train", "torchrun: ./train"),
    (4, "torchrun --standalone -m pkg.train -m x", "torchrun: python3 -u -m pkg.train -m x"),
    (4, "/opt/conda/bin/torchrun train.py", "torchrun: python3 -u train.py"),
    (4, "/opt/venv/bin/python3.11 -u -m torch.distributed.run -m pkg", "torchrun: /opt/venv/bin/python3.11 -u -m pkg"),
    (4, "deepspeed --num_gpus=4 --module pkg.train --deepspeed", "deepspeed: python3 -u -m pkg.train --deepspeed"),
    (4, "deepspeed --no_local_rank --hostfile h train.py", "deepspeed: python3 -u train.py"),
    (4, "mpirun -np 4 -H a:2,b:2 --allow-run-as-root python3 x.py -np 3", "mpirun: python3 x.py -np 3"),
    # no launcher
    (4, "python3 train.py --launcher pytorch --backend mpirun",
     "horovod: python3 train.py --launcher pytorch --backend mpirun"),
    (2, "CUDA_VISIBLE_DEVICES=0 python train.py",
     "horovod: python train.py"),
    (2, "env NCCL_DEBUG=INFO python train.py",
     "horovod: env NCCL_DEBUG=INFO python train.py"),
    (2, "uv run scripts/train.py pi05 --exp_name=run1",
     "horovod: uv run scripts/train.py pi05 --exp_name=run1"),
    (2, "sh -c 'cd /out && exec python3 /workspace/train.py'",
     "horovod: sh -c 'cd /out && exec python3 /workspace/train.py'"),
    (2, "nsys profile -o report torchrun --nproc_per_node=2 train.py",
     "refused: gpurun cannot read the flags of torchrun in this command, so each of 2"),
    (1, "terminus composer -n live -- require drupal",
     "horovod: terminus composer -n live -- require drupal"),
]  # fmt: skip
