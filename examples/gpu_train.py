"""Train a small CNN on GPUs, as many ranks as you like: on one GPU each, or several on one.

    mpirun -np 4 python examples/gpu_train.py       # --oversubscribe on fewer cores

Compared with a script for CPUs, one line chooses a GPU, and there is .to("cuda"). Gradients are
averaged on the GPU; only .item() waits for it. The data are made up: pictures of 16 x 16 pixels of
noise, with a bright cross or a bright ring somewhere.
"""

import sys

import torch
from torch import nn

import ringcomm.torch as hvd

STEPS, GLOBAL_BATCH, SIDE = 120, 96, 16
GOAL = 0.95
NO_GPU = (
    "gpu_train: torch {} sees no GPU here, so nothing is trained. `ringcomm check` says what is "
    'missing; a torch whose version ends in "+cpu" can use none'
)


def main() -> None:
    hvd.init()
    if not torch.cuda.is_available():
        if hvd.rank() == 0:
            print(NO_GPU.format(torch.__version__), flush=True)
        hvd.shutdown()
        sys.exit(1)
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.manual_seed(hvd.rank())

    model = cnn().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict())

    for step in range(STEPS):
        images, labels = pictures(GLOBAL_BATCH // hvd.size())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0 and step % 20 == 19:
            print(f"step {step + 1:3}  loss {loss.item():.4f}", flush=True)

    model.eval()
    images, labels = pictures(500)
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean()
    accuracy = hvd.allreduce(right, name="accuracy").item()
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.2%} on {hvd.size()} ranks", flush=True)
    assert accuracy >= GOAL, f"accuracy {accuracy:.2%} is below {GOAL:.0%}"


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 16, 2),
    )


def pictures(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return other pictures at every call, and whether each shows a ring."""
    labels = torch.randint(0, 2, (count,), device="cuda")
    at = torch.rand(2, count, 1, 1, device="cuda") * (SIDE - 8) + 4
    pixels = torch.arange(SIDE, device="cuda")
    across, down = (pixels[None, None, :] - at[0]).abs(), (pixels[None, :, None] - at[1]).abs()
    cross = (torch.minimum(across, down) < 1) & (torch.maximum(across, down) < 4)
    ring = (across.square() + down.square()).sqrt().sub(3).abs() < 1
    shape = torch.where(labels[:, None, None] == 1, ring, cross)
    return (shape + torch.randn(shape.shape, device="cuda") * 0.3).unsqueeze(1), labels


if __name__ == "__main__":
    main()
