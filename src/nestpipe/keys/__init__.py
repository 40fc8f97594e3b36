"""Host-side work on embedding keys: native speed, no GIL, any int64 key.

Tables share kernels, so a key is always the pair (table number, int64).  `hash_of` mixes both.  The high bits of a hash
choose the owner, the low bits the place in an index, so the keys of one owner still spread over its whole index.
"""

from nestpipe.keys.dedup import dedup, dedup_pairs
from nestpipe.keys.index import HashIndex
from nestpipe.keys.mixing import owners_of, share_of

__all__ = ["HashIndex", "dedup", "dedup_pairs", "owners_of", "share_of"]
