"""Lists of hosts in the forms that other tools have, each before and after somebody changed it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Listed:
    """One list of hosts.

    Attributes:
        file: the file to import, or "" for the folder.
        before: file → its text; `after`: the files that changed.
        found: the hosts and their GPUs, as ``n[1-2]=4 m1=8``; `found_after`: after the change, without `kept`.
        flags: options of the import.
    """

    file: str
    before: dict[str, str]
    after: dict[str, str]
    found: str
    found_after: str
    flags: tuple[str, ...] = ()


SOURCES = {
    "Ansible, INI, with login and CPU nodes": Listed(
        "inventory.ini",
        {"inventory.ini": "[gpu_nodes]\ngpu[01:03] gpus=8\n[cpu_nodes]\ncpu[01:02]\n[login]\nlogin01\n"
                          "[monitoring]\nprom01\n"
                          "[cluster:children]\ngpu_nodes\ncpu_nodes\n"},
        {"inventory.ini": "[gpu_nodes]\ngpu[02:04] gpus=8\n[cpu_nodes]\ncpu[01:03]\n[login]\nlogin01\n"},
        "gpu[01-03]=8", "gpu[02-04]=8",
    ),
    "Ansible, YAML, racks and children": Listed(
        "hosts.yml",
        {"hosts.yml": "all:\n  vars: {ansible_user: train}\n  children:\n    rack1:\n      hosts:\n"
                      "        'w[1:2]': {gpus: 4, gpu_type: a100}\n    rack2:\n      hosts:\n        w3: {gpus: 4}\n"
                      "    frontend:\n      hosts: {head: {}}\n"},
        {"hosts.yml": "all:\n  vars: {ansible_user: ops}\n  children:\n    rack1:\n      hosts:\n"
                      "        w1: {gpus: 4, gpu_type: a100}\n    rack2:\n      hosts:\n        w3: {gpus: 2}\n"
                      "        w2: {gpus: 4, gpu_type: a100}\n"},
        "w[1-3]=4", "w[1-2]=4 w3=2",
    ),
    "Ansible, a cluster of kubespray's with a bastion and control planes": Listed(
        "inventory.ini",
        {"inventory.ini": "[bastion]\nb1 ansible_host=192.0.2.1\n[kube_control_plane]\ncp1\n[etcd]\ncp1\n"
                          "[kube_node]\nk1 ansible_host=10.1.0.1\nk2 ansible_host=10.1.0.2\n"
                          "[k8s_cluster:children]\nkube_control_plane\nkube_node\n"},
        {"inventory.ini": "[bastion]\nb1\n[kube_control_plane]\ncp1\n[kube_node]\nk1 ansible_host=10.1.0.1\n"
                          "k2 ansible_host=10.1.0.22\nk3\n[k8s_cluster:children]\nkube_control_plane\nkube_node\n"},
        "k[1-2]=4", "k[1-3]=4", ("--gpus", "4", "--generation", "volta"),
    ),
    "Ansible, a jump host in arguments of SSH": Listed(
        "hosts",
        {"hosts": "[dgx]\nd1 gpus=8\nd2 gpus=8\n[all_hosts]\ngate ansible_host=192.0.2.9\n[all_hosts:children]\ndgx\n"
                  "[all:vars]\nansible_ssh_common_args='-o ProxyCommand=\"ssh -W %h:%p -q ops@192.0.2.9\"'\n"},
        {"hosts": "[dgx]\nd1 gpus=8\nd3 gpus=8\n[all_hosts]\ngate\n"
                  "[all:vars]\nansible_ssh_common_args='-o ProxyJump=ops@gate'\n"},
        "d[1-2]=8", "d1=8 d3=8",
    ),
    "Ansible, a folder of DeepOps's form": Listed(
        "",
        {"inventory": "[slurm-master]\nm1\n[slurm-node]\ng1\ng2\n[slurm-cluster:children]\nslurm-master\nslurm-node\n",
         "group_vars/slurm-node.yml": "gpus: 8\ngpu_type: v100\n"},
        {"group_vars/slurm-node.yml": "gpus: 4\ngpu_type: v100\n"},
        "g[1-2]=8", "g[1-2]=4",
    ),
    "Ansible, roles alone, all hosts in [all], the head itself": Listed(
        "hosts",
        {"hosts": "[all]\nm1 ansible_host=10.6.0.1\nl1 ansible_host=10.6.0.2\nw1 ansible_host=10.6.0.3\nw2\n"
                  "[local]\nlocalhost ansible_connection=local\n[slurm_master]\nm1\n[login]\nl1\n[compute]\nw[1:2]\n"
                  "[nfs-server]\nl1\n[all:vars]\nansible_connection=ssh\n"},
        {"hosts": "[all]\nm1\nw1 ansible_host=10.6.0.33\nw2\nw3\n[head_node]\nm1\n[compute]\nw[1:3]\n"},
        "w[1-2]=1", "w[1-3]=1",
    ),
    "Slurm, topology, gres, partitions": Listed(
        "etc",
        {"etc/slurm.conf": "ClusterName=c\nNodeName=login1 CPUs=8\nNodeName=g[1-4] Gres=gpu:v100:4 State=UNKNOWN\n"
                           "NodeName=c[1-9] CPUs=64\nPartitionName=p Nodes=ALL\n",
         "etc/topology.conf": "SwitchName=s1 Nodes=g[1-2]\nSwitchName=s2 Nodes=g[3-4]\nSwitchName=t Switches=s[1-2]\n",
         "etc/gres.conf": "NodeName=g[1-4] Name=gpu Type=v100 File=/dev/nvidia[0-3]\n"},
        {"etc/slurm.conf": "ClusterName=c\nNodeName=g[1-2,4-5] Gres=gpu:v100:4\nPartitionName=p Nodes=ALL\n",
         "etc/topology.conf": "SwitchName=s1 Nodes=g[1-2,4]\nSwitchName=s2 Nodes=g5\n"},
        "g[1-4]=4", "g[1-2,4-5]=4",
    ),
    "Slurm, whole GPUs beside MIG slices": Listed(
        "slurm.conf",
        {"slurm.conf": "GresTypes=gpu,shard\nNodeName=a1 Gres=gpu:a100:8\nNodeName=a2 Gres=gpu:a100_1g.5gb:56\n"
                       "NodeName=a3 Gres=gpu:a100:6,gpu:3g.20gb:4,shard:32\n"
                       "NodeName=h1 Gres=gpu:nvidia_h100_80gb_hbm3:4\nNodeName=a4 Gres=gpu\nNodeName=n1 Gres=nvme:1\n"
                       "NodeName=gpu9 Gres=gpu:a100:0\nNodeName=dgx-login\n",
         "gres.conf": "NodeName=a4 Name=gpu MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap21\n"
                      "NodeName=a4 Name=gpu Type=a100 File=/dev/nvidia1,/dev/nvidia2\n"},
        {"slurm.conf": "NodeName=a1 Gres=gpu:a100:8\nNodeName=a2 Gres=gpu:a100:8\nNodeName=a3 Gres=gpu:3g.20gb:14\n"
                       "NodeName=h1 Gres=gpu:nvidia_h100_80gb_hbm3:4\n"},
        "a1=8 a3=6 h1=4 a4=1", "a[1-2]=8 h1=4",
    ),
    "Slurm, GPUs that only AutoDetect knows": Listed(
        "slurm.conf",
        {"slurm.conf": "NodeName=x[1-2] Gres=gpu:h100:8 \\\n  Features=ib\nNodeName=front\n",
         "gres.conf": "AutoDetect=nvml\n"},
        {"slurm.conf": "NodeName=x[1-3] Gres=gpu:h100:8 Features=ib\nNodeName=front\n"},
        "x[1-2]=8", "x[1-3]=8",
    ),
    "Open MPI": Listed(
        "hostfile",
        {"hostfile": "# ours\na slots=4 max_slots=4\nb slots=0\nc\nd slots=2\nd slots=2\n"},
        {"hostfile": "a slots=8\nb slots=4\nd slots=4\n"},
        "a=4 c=1 d=4", "a=8 b=4 d=4",
    ),
    "DeepSpeed": Listed(
        "hostfile", {"hostfile": "worker-1 slots=8\nworker-2 slots=8\n"},
        {"hostfile": "worker-1 slots=8\nworker-2 slots=0\nworker-3 slots=8\n"},
        "worker-[1-2]=8", "worker-1=8 worker-3=8",
    ),
    "MPICH": Listed(
        "machinefile", {"machinefile": "n1:2\nn2:2 binding=rr\nme@n3:4\n"}, {"machinefile": "n1:2\nn2:4\n"},
        "n[1-2]=2 n3=4", "n1=2 n2=4",
    ),
    "a plain list": Listed(
        "hostfile", {"hostfile": "n1.example\nn2.example\n"}, {"hostfile": "n2.example\nn3.example\n"},
        "n1.example=2 n2.example=2", "n2.example=2 n3.example=2", ("--gpus", "2"),
    ),
    "PBS, a line for each slot": Listed(
        "nodefile", {"nodefile": "p1\np1\np1\np1\np2\np2\n"}, {"nodefile": "p1\np1\np3\np3\n"},
        "p1=4 p2=2", "p1=2 p3=2",
    ),
    "PBS, a line for each GPU": Listed(
        "gpufile", {"gpufile": "q1-gpu0\nq1-gpu1\nq2-gpu0\n"}, {"gpufile": "q1-gpu0\nq2-gpu0\nq2-gpu1\n"},
        "q1=2 q2=1", "q1=1 q2=2",
    ),
    "Torque's nodes": Listed(
        "nodes", {"nodes": "t1 np=16 gpus=4 ib\nt2 np=16 gpus=4\nt3 np=64 gpus=0\nt4 np=64\n"},
        {"nodes": "t1 np=16 gpus=2\nt3 np=64 gpus=1\n"}, "t[1-2]=4", "t1=2 t3=1",
    ),
    "OpenSSH, jump hosts in ProxyJump and ProxyCommand": Listed(
        "config",
        {"config": "Host gate\n  HostName 192.0.2.1\nHost old nas login-2.example\n  User ops\n"
                   "Host github.com\n  User git\n"
                   "Host g1 g2\n  ProxyJump ops@192.0.2.1:22\nHost g3\n  ProxyCommand ssh -q -p 22 -W %h:%p old\n"
                   "Host g*\n  User train\n"},
        {"config": "Host gate\nHost g1\n  ProxyJump gate\nHost g3 g4\n  ProxyCommand /usr/bin/ssh gate nc %h %p\n"},
        "g[1-3]=4", "g1=4 g[3-4]=4", ("--gpus", "4", "--generation", "pascal"),
    ),
    "OpenSSH, Match, quotes and equal signs": Listed(
        "config",
        {"config": 'Host="box1" box2 !box9\n  Port=2222\nMatch host box3 exec "true"\n  User x\n'
                   "Host *\n  Compression yes\n"},
        {"config": "host box2\n  port 22\nHOST box4\n"},
        "box[1-2]=2", "box2=2 box4=2", ("--gpus", "2", "--generation", "ada"),
    ),
    "OpenSSH, several names of one machine": Listed(
        "config",
        {"config": "Host n1 n1.example\n  HostName 10.7.0.1\nHost 10.7.0.1\n  User x\nHost a b\n  HostName %h.example\n"
                   "Host t1\n  HostName localhost\n  ProxyJump j1\nHost t2\n  HostName localhost\n  ProxyJump j2\n"},
        {"config": "Host n1 n1.example\n  HostName 10.7.0.1\nHost n2 n1b\n  HostName \"10.7.0.2\"\n"},
        "n1=2 a=2 b=2 t[1-2]=2", "n[1-2]=2", ("--gpus", "2", "--generation", "ada"),
    ),
    "Grid Engine": Listed(
        "pe_hostfile", {"pe_hostfile": "s1 4 all.q@s1 UNDEFINED\ns2 2 all.q@s2 <NULL>\n"},
        {"pe_hostfile": "s1 2 all.q@s1 UNDEFINED\ns3 2 all.q@s3 UNDEFINED\n"}, "s1=4 s2=2", "s1=2 s3=2",
    ),
    "CSV with semicolons and a byte order mark": Listed(
        "machines.csv",
        {"machines.csv": "\ufeffHostname;Rack;GPU count;GPU;Owner\r\nm1;A1;4;V100;vision\r\nm2;A1;4;V100;vision\r\n"
                         "log1;A1;;;\r\n"},
        {"machines.csv": "Hostname;Rack;GPU count;GPU;Owner\r\nm1;A2;4;V100;speech\r\nm3;A1;4;V100;vision\r\n"},
        "m[1-2]=4", "m1=4 m3=4",
    ),
    "tab-separated": Listed(
        "machines.tsv",
        {"machines.tsv": "name\tip\tgpus\tgpu_type\nm1\t10.0.0.1\t8\ta100\nm2\t10.0.0.2\t7\t1g.10gb\n"},
        {"machines.tsv": "name\tip\tgpus\tgpu_type\nm1\t10.0.0.11\t8\ta100\nm2\t10.0.0.2\t8\ta100\n"},
        "m1=8", "m[1-2]=8",
    ),
    "SkyPilot's SSH node pools": Listed(
        "ssh_node_pools.yaml",
        {"ssh_node_pools.yaml": "lab:\n  user: ubuntu\n  identity_file: ~/.ssh/id\n  hosts:\n    - 10.2.0.1\n"
                                "    - ip: 10.2.0.2\n      user: ops\n      password: x\n"
                                "boxes:\n  hosts: [box1, box2]\n"},
        {"ssh_node_pools.yaml": "lab:\n  user: ubuntu\n  hosts:\n    - 10.2.0.1\n    - ip: 10.2.0.2\n"
                                "      user: ubuntu\n    - 10.2.0.3\nboxes:\n  hosts:\n    - box2\n"},
        "10.2.0.[1-2]=8 box[1-2]=8", "10.2.0.[1-3]=8 box2=8", ("--gpus", "8", "--generation", "hopper"),
    ),
    "dstack's SSH fleet": Listed(
        "lab.dstack.yml",
        {"lab.dstack.yml": "type: fleet\nname: lab\nplacement: cluster\nssh_config:\n  user: ubuntu\n  port: 22\n"
                           "  identity_file: ~/.ssh/id\n  hosts:\n    - 10.3.0.1\n    - hostname: 10.3.0.2\n"
                           "      port: 2222\n      blocks: 4\n      internal_ip: 172.16.0.2\n"
                           "  proxy_jump:\n    hostname: 10.3.0.9\n"},
        {"lab.dstack.yml": "type: fleet\nname: lab\nssh_config:\n  user: root\n"
                           "  hosts:\n    - 10.3.0.2\n    - 10.3.0.4\n"},
        "10.3.0.[1-2]=8", "10.3.0.2=8 10.3.0.4=8", ("--gpus", "8", "--generation", "hopper"),
    ),
    "/etc/hosts": Listed(
        "hosts",
        {"hosts": "127.0.0.1 localhost\n::1 ip6-localhost\nff02::1 ip6-allnodes\n"
                  "10.4.0.1\te1 e1.example\n10.4.0.2 e2 # new\n10.4.0.9 head01\n"},
        {"hosts": "127.0.0.1 localhost\n10.4.0.12 e2\n10.4.0.3 e3\n"},
        "e[1-2]=1", "e[2-3]=1", ("--gpus", "1", "--generation", "turing"),
    ),
}  # fmt: skip
