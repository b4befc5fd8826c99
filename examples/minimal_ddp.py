"""`BucketedDDP` without Lightning: the gradients of all processes are averaged during backward.

$ torchrun --standalone --nproc-per-node 2 examples/minimal_ddp.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from lightning_ddp import BucketedDDP


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # weights differ here; wrapping broadcasts those of rank 0
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    mine = torch.arange(rank, 1500, world_size)  # a share of the training images; the last 297 are to test

    model = BucketedDDP(
        torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(10):
        for batch in mine[torch.randperm(len(mine))].split(32):
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # when it returns, .grad is the mean over the processes
            optimizer.step()

    with torch.no_grad():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    total = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"rank {rank} of {world_size}: {accuracy:.1%} of the test digits, weights add up to {total:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
