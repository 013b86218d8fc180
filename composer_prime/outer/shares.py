"""Each site's share of a round: the multipliers that a commit records and the weighted mean uses.

Apart from aggregate.py because decisions need it, and they run where there is no torch.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from composer_prime.errors import ConfigError, ProtocolError


def multipliers(tokens: Mapping[str, int], weighting: Literal["tokens", "equal"]) -> dict[str, float]:
    """Each site's share of a round, as commits record it.

    tokens     site -> tokens behind its offer, 0 or more.
    weighting  "tokens": in proportion to tokens (arXiv:2604.21428), and equal when no site has any; "equal": 1/n.

    Returns site -> exact fp32 value, sorted by site; the values sum to 1 up to fp32 rounding.
    Raises ConfigError on another weighting, ProtocolError on a negative count.
    """
    if weighting not in ("tokens", "equal"):
        raise ConfigError(f'outer.weighting ("{weighting}") must be "tokens" or "equal": choose one of them')
    for site, count in tokens.items():
        if count < 0:
            raise ProtocolError(f"site {site} offers {count} tokens, 0 is the least there can be: refuse its offer")
    total = sum(tokens.values())
    by_tokens = weighting == "tokens" and total > 0
    return {site: float(np.float32(tokens[site] / total if by_tokens else 1 / len(tokens))) for site in sorted(tokens)}
