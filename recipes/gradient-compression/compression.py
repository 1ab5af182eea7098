"""Top-k gradients with error feedback, as a communication hook of PyTorch's DistributedDataParallel.

Deep Gradient Compression (Lin et al. 2018, https://arxiv.org/abs/1712.01887): each rank sends only the largest of what
it has gathered, and keeps the rest for later steps (error feedback). Momentum is applied before that, on each rank
(momentum correction), and forgotten where a value was sent (momentum factor masking). So the optimizer behind it is
plain SGD without momentum.

No ``from __future__ import annotations`` here: DDP checks the hook's annotations as types.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass
class TopK:
    """What a rank has not sent yet.

    Attributes:
        density: the share of values that is sent, 0 to 1.
        momentum: of SGD.
        sent_bytes: what this rank has given to the collective so far.
    """

    density: float
    momentum: float = 0.9
    sent_bytes: int = 0
    kept: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def state_of(self, bucket: dist.GradBucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocity and what is left unsent, float32 of the shape of the bucket's buffer.

        DDP forms its buckets anew after the first step: what was kept for the old ones is dropped then.
        """
        key = tuple(id(parameter) for parameter in bucket.parameters())
        if key not in self.kept:
            self.kept[key] = torch.zeros_like(bucket.buffer()), torch.zeros_like(bucket.buffer())
        return self.kept[key]


def top_k_hook(state: TopK, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange the largest values of a bucket; the mean over all ranks of what they sent."""
    gradients = bucket.buffer()
    velocity, unsent = state.state_of(bucket)
    velocity.mul_(state.momentum).add_(gradients)
    unsent.add_(velocity)
    count = max(1, round(state.density * unsent.numel()))
    chosen = torch.topk(unsent.abs(), count, sorted=False).indices
    # One message: the values, and behind them their places, as bits of int32.
    mine = torch.cat([unsent[chosen], chosen.to(torch.int32).view(torch.float32)])
    unsent[chosen] = 0
    velocity[chosen] = 0
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    state.sent_bytes += mine.numel() * mine.element_size()

    def mean(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        done.wait()
        gradients.zero_()
        for each in everyone:
            gradients.index_add_(0, each[count:].view(torch.int32).long(), each[:count])
        return gradients.div_(len(everyone))

    return dist.all_gather(everyone, mine, async_op=True).get_future().then(mean)
