"""Host-side work on embedding keys: native speed, no GIL, any int64 key.

Keys of different tables share kernels: a key is always the pair (table number, int64).  `hash_of` mixes both; its high bits
choose the owner, its low bits the place in an index, so that the keys of one owner still spread over its whole index.
"""

from nestpipe.keys.dedup import dedup, dedup_pairs, intersect
from nestpipe.keys.index import HashIndex
from nestpipe.keys.mixing import owners_of, share_of

__all__ = ["HashIndex", "dedup", "dedup_pairs", "intersect", "owners_of", "share_of"]
