"""Teachers' distributions in PRIME-RL's unmodified trainer: k candidates a token, with any loss.

The candidates ride where upstream carries what router replay needs (`taught`), a hook on the head gives the policy's
logits at them (`head`), and the term is added to what `compute_loss` returns (`adapter`). Nothing is imported or
wrapped unless the trainer's environment has `COMPOSER_PRIME_DISTILL`.
"""

from composer_prime.sites.prime_rl.topk.adapter import install

__all__ = ["install"]
