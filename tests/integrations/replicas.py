"""What torchft's tests share: a small model, its data, its fragments as modules, and threads that fail together."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composer_prime.integrations.torchft import BucketManager
from composer_prime.outer.fragments import plan_fragments
from tests.patience import PATIENCE_S

INNER_LR, OUTER_LR, OUTER_MOMENTUM = 0.05, 0.7, 0.9


def make_net(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Four linear blocks, 187 parameters: the same values in every dtype, exact in fp32."""
    net = nn.Sequential(*[nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh()])
    net.append(nn.Linear(6, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return net.to(dtype)


def batches(seed: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Inputs without end; the same for the same seed in every dtype, but for rounding."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 4, generator=generator).to(dtype)


def inner_step(net: nn.Module, inputs: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step on a fixed linear map's outputs."""
    optimizer.zero_grad()
    ((net(inputs) - inputs[:, :3].cumsum(1)) ** 2).mean().backward()
    optimizer.step()


def flat(net: nn.Module) -> Tensor:
    """All parameters as one vector, a copy."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()]).clone()


def fragment_modules(net: nn.Sequential, num_fragments: int) -> list[nn.Module]:
    """Our plan of the fragments, as the list of modules that torchft wants."""
    plan = plan_fragments([(name, tuple(value.shape)) for name, value in net.named_parameters()], num_fragments)
    blocks = [sorted({int(name.split(".")[0]) for name in fragment.names}) for fragment in plan]
    return [nn.ModuleList(net[index] for index in members) for members in blocks]


def outer_optimizers(fragments: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    """One for each fragment: a shared one would also step the fragments that aren't due."""
    return [
        torch.optim.SGD(fragment.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        for fragment in fragments
    ]


def masters(manager: "BucketManager | LockstepManager") -> Tensor:
    """The weights that all replicas share, as one vector; on them torchft's local ones are built."""
    states = manager.state_dict()["states"].values()
    return torch.cat([value.reshape(-1) for state in states for value in state["original_parameters"].values()])


def run_together(*calls: Callable[[], Any], timeout_s: float = PATIENCE_S) -> list[Any]:
    """Each call on a thread of its own; their results, or the first error."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a replica hangs"
    return results


class Lockstep:
    """Averages over the replicas of one process: what a manager's allreduce is, without anything that can fail."""

    def __init__(self, num_replicas: int) -> None:
        self._slots: list[Tensor] = [torch.empty(0)] * num_replicas
        self._barrier = threading.Barrier(num_replicas, timeout=PATIENCE_S)

    def mean(self, place: int, tensor: Tensor) -> Tensor:
        """The mean of what every replica gave; blocks until the last one has."""
        self._slots[place] = tensor.clone()
        self._barrier.wait()
        mean = torch.stack(self._slots).mean(0)
        self._barrier.wait()
        return mean


class LockstepManager:
    """The least that torchft's DiLoCo asks of a manager; every round commits."""

    _use_async_quorum = False

    def __init__(self, lockstep: Lockstep, place: int) -> None:
        self._lockstep, self._place, self._step = lockstep, place, 0
        self._states: dict[str, Callable[[], Any]] = {}

    def register_state_dict_fn(self, key: str, load_state_dict: object, state_dict: Callable[[], Any]) -> None:
        self._states[key] = state_dict

    def state_dict(self) -> dict[str, Any]:
        return {"states": {key: save() for key, save in self._states.items()}}

    def disallow_state_dict_read(self) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def start_quorum(self) -> None: ...

    def wait(self) -> None:
        """The handle's: all is done when allreduce returns."""

    def current_step(self) -> int:
        return self._step

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> "LockstepManager":
        assert not should_quantize
        tensor.copy_(self._lockstep.mean(self._place, tensor))
        return self

    def should_commit(self) -> bool:
        self._step += 1
        return True


def in_lockstep(num_replicas: int, **train: Any) -> tuple[Tensor, list[Tensor]]:
    """What torchft makes of replicas that never fail: the weights they share in the end, and each one's local ones."""
    lockstep = Lockstep(num_replicas)
    managers = [LockstepManager(lockstep, place) for place in range(num_replicas)]
    calls = [
        lambda place=place, manager=manager: train_with_torchft(manager, data_seed=place, **train)
        for place, manager in enumerate(managers)
    ]
    weights = [seen[-1] for seen in run_together(*calls)]
    return masters(managers[0]), weights


def train_with_torchft(
    manager: Any,
    *,
    inner_steps: int,
    num_fragments: int,
    steps: int,
    delay: int = 0,
    alpha: float = 0.0,
    data_seed: int = 0,
    dtype: torch.dtype = torch.float32,
    free_steps: int = 0,
) -> list[Tensor]:
    """torchft's DiLoCo for `steps` inner steps of SGD; the parameters after each, what the outer loop did included.

    free_steps   how many of them come before torchft begins to count; its round 0 starts from the weights before them
    """
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

    net = make_net(dtype)
    fragments = fragment_modules(net, num_fragments)
    optimizer = torch.optim.SGD(net.parameters(), lr=INNER_LR)
    diloco = DiLoCo(
        manager,
        fragments,
        optimizer,
        outer_optimizers(fragments),
        sync_every=inner_steps,
        fragment_sync_delay=delay,
        fragment_update_alpha=alpha,
    )
    data, seen = batches(data_seed, dtype), []
    for _ in range(free_steps):
        inner_step(net, next(data), optimizer)
        seen.append(flat(net))
    with diloco:
        for _ in range(steps - free_steps):
            inner_step(net, next(data), optimizer)
            seen.append(flat(net))
    return seen
