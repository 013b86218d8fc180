"""The loss that a PRIME-RL user's TOML names: `import_path = "composer_prime.sites.prime_rl.loss.composer_loss"`.

Importing this module inside the trainer makes the trainer a site of the outer run that COMPOSER_PRIME_OUTER names.
Where that isn't set nothing is touched: the loss is `composer_prime.losses.composer.composer_loss` itself.
"""

from composer_prime.losses.composer import composer_loss
from composer_prime.sites.prime_rl.hook import install

__all__ = ["composer_loss"]

install()
