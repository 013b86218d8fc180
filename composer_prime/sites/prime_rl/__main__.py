"""`python -m composer_prime.sites.prime_rl`: prints which PRIME-RL this interpreter has, or reads like, in one word.

The launcher asks PRIME-RL's own interpreter so, which also shows that our package is installed beside it. A release
that isn't known is said on stderr.
"""

import sys

from composer_prime.errors import ConfigError
from composer_prime.sites.prime_rl.versions import detect, untested

if __name__ == "__main__":
    try:
        found = detect()
    except ConfigError as error:
        sys.exit(f"error: {error}")
    print(found.name)
    unknown = untested()
    if unknown is not None:
        print(f"release: {unknown}", file=sys.stderr)
