"""Where verifiers looks for the taskset of the id "composer-prime-pairs", and for its environment."""

from composer_prime.sites.prime_rl.pairs_env import PairsEnv, PairsTaskset

__all__ = ["PairsEnv", "PairsTaskset"]
