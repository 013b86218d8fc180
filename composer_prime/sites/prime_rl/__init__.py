"""A site that is a real PRIME-RL: our loss and our outer loop inside its unmodified trainer.

Users name `composer_prime.sites.prime_rl.loss.composer_loss` as their loss; docs/prime-rl.md says the rest.
"""
