"""The work of `minimal.py` as a plain PyTorch loop: what the trainer does on one process, and nothing is lost by it.

    python examples/plain_loop.py

A task is an `nn.Module`, and its steps can be called from any loop. At the end the trainer trains the same task, and
the weights of both are compared: they are equal to the last bit.
"""

import torch
from minimal import Digits, digits
from torch.utils.data import DataLoader, DistributedSampler

from sanctuary_trainer import Trainer


def train_plainly(task: Digits, train: DataLoader, test: DataLoader, max_epochs: int) -> float:
    """Trains the task and returns its accuracy on the test digits."""
    optimizer = task.configure_optimizers()
    for epoch in range(max_epochs):
        train.sampler.set_epoch(epoch)
        task.train()
        for batch_idx, batch in enumerate(train):
            loss = task.training_step(batch, batch_idx)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    task.eval()
    with torch.inference_mode():
        right = [task.predict_step(batch, i).argmax(-1) == batch[1] for i, batch in enumerate(test)]
    return torch.cat(right).float().mean().item()


def main(max_epochs: int = 10, seed: int = 0) -> None:
    train, test = digits()
    # On one process this sampler's only effect is an order that is a function of seed and epoch, in any loop.
    order = DistributedSampler(train, num_replicas=1, rank=0, seed=seed)
    loaders = DataLoader(train, 32, sampler=order), DataLoader(test, 128)

    torch.manual_seed(seed)
    plain = Digits()
    accuracy = train_plainly(plain, *loaders, max_epochs)

    torch.manual_seed(seed)
    trained = Digits()
    result = Trainer(max_epochs=max_epochs, seed=seed).fit(trained, *loaders)

    pairs = zip(plain.parameters(), trained.parameters(), strict=True)
    difference = max((a - b.cpu()).abs().max().item() for a, b in pairs)
    print(f"accuracy: {accuracy:.4f} by the plain loop, {result.metrics['val/accuracy']:.4f} by the trainer")
    print(f"largest difference of a weight: {difference:g}")


if __name__ == "__main__":
    main()
