"""Our loss by its first name: `import_path = "composer_prime.sites.prime_rl.loss.composer_loss"`; see `outer`."""

from composer_prime.sites.prime_rl.outer import loss as composer_loss

__all__ = ["composer_loss"]
