"""What Slurm, SkyPilot, dstack, Ray, Docker and others call the settings of a job."""

from __future__ import annotations

from collections.abc import Mapping

FOREIGN: Mapping[str, str] = {
    "gpus": "gres ntasks num_gpus accelerators gpu nproc entrypoint_num_gpus nodes num_nodes nnodes resources replicas",
    "gpus_per_host": "gpus_per_node nproc_per_node ntasks_per_node tasks_per_node",
    "command": "run cmd script commands entrypoint args", "python": "setup pip packages conda runtime_env",
    "pool": "partition queue account qos fleet", "project": "wckey comment tag",
    "time_limit": "time max_time max_duration walltime timeout", "memory": "mem mem_per_node entrypoint_memory",
    "cpus": "cpus_per_task num_cpus entrypoint_num_cpus", "name": "job_name submission_id run_name",
    "hosts": "nodelist host instance", "avoid": "exclude", "generation": "constraint", "gpu_model": "gpu_type",
    "workdir": "chdir working_dir cwd", "env": "export envs env_file env_vars environment runtime_env_json",
    "image": "container_image docker_image docker container image_id", "secrets": "env_secret secret_file",
    "mounts": "container_mounts volume volumes file_mounts", "notify": "mail_type mail_user", "priority": "nice",
    "max_restarts": "requeue retry retries max_retries restart", "preemptible": "spot use_spot", "data": "storage",
}  # fmt: skip
"""A setting of gpurun → words of other tools, as a recipe would have them."""
MEANT = {word: key for key, words in FOREIGN.items() for word in words.split()}
