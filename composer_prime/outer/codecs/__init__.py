"""The codecs by the name that `outer.codec` and offers use; a codec is one class and one line here.

A codec is a pure function of the vector: what must be remembered between rounds is not its business.
"""

from composer_prime.errors import ConfigError
from composer_prime.outer.codecs.base import Codec, SparseCodec, is_sparse
from composer_prime.outer.codecs.blocks import Int4Codec, Int8Codec
from composer_prime.outer.codecs.plain import BF16, FP32
from composer_prime.outer.codecs.topk import TopkCodec

CODECS: dict[str, Codec] = {codec.name: codec for codec in (FP32, BF16, Int8Codec(), Int4Codec(), TopkCodec())}


def get_codec(name: str) -> Codec:
    """The codec of that name. Raises ConfigError, naming the known ones, when there is none."""
    if name not in CODECS:
        raise ConfigError(f'outer.codec ("{name}") must be one of {", ".join(CODECS)}: choose one of them')
    return CODECS[name]


__all__ = ["CODECS", "Codec", "SparseCodec", "get_codec", "is_sparse"]
