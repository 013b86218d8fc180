"""composer-prime: post-train any Hugging Face model with RL on agentic tasks, across sites that share only a bucket."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_prime.sites.prime_rl.stamping_env import StampingEnv

__version__ = "0.1.0"
__all__ = ["StampingEnv"]


def __getattr__(name: str) -> Any:
    """`StampingEnv`, where verifiers looks for the environment of the id "composer-prime"."""
    if name == "StampingEnv":
        from composer_prime.sites.prime_rl.stamping_env import StampingEnv

        return StampingEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
