"""Where a request goes."""

import msgspec


class Route(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names of endpoints. Without `prefill` the decode endpoint computes the prompt itself."""

    decode: str
    prefill: str = ""
    cached_tokens: int = 0  # of the prompt, believed to lie in the cache of whoever computes it
