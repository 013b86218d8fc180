"""`python -m composer_prime.sites.prime_rl`: prints which PRIME-RL this interpreter has, or reads like, in one word.

The launcher asks PRIME-RL's own interpreter so, which also shows that our package is installed beside it.
"""

import sys

from composer_prime.errors import ConfigError
from composer_prime.sites.prime_rl.versions import detect

if __name__ == "__main__":
    try:
        print(detect().name)
    except ConfigError as error:
        sys.exit(f"error: {error}")
