"""Whether this machine's torch has the device that `site.device` names."""

from composer_prime.errors import ConfigError


def check_device(device: str) -> None:
    """Raise ConfigError where torch doesn't have it here. Torch is imported only for another device than the CPU."""
    if device == "cpu":
        return
    import torch

    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not found.get(device):
        here = ", ".join(name for name, is_here in found.items() if is_here)
        raise ConfigError(
            f'device ("{device}") must be cpu, cuda or mps and one that torch has, and torch {torch.__version__} has '
            f"{here} here: take that, or install a driver and a torch that are built for another"
        )
