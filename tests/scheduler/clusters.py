"""Small clusters and what runs on them."""

from gpurun.inventory.model import Host, Inventory, Rack
from gpurun.jobs.spec import Grant, Placement
from gpurun.scheduler.model import Running


def cluster(racks, hosts, gpus, pools=()):
    found = tuple(Host(f"r{r}h{h}", f"r{r}", "pascal", gpus, "tcp") for r in range(racks) for h in range(hosts))
    names = {f"r{r}": tuple(host.name for host in found if host.rack == f"r{r}") for r in range(racks)}
    return Inventory(found, tuple(Rack(name, hosts) for name, hosts in names.items()), {}, pools)


def runs(gang, *grants, granted_s=0.0, **more):
    placed = tuple(Grant(host, tuple(gpus)) for host, gpus in grants)
    more.setdefault("running_s", granted_s)
    return Running(gang, Placement("pascal", ("r0",), placed), granted_s, **more)
