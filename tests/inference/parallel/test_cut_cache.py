"""A rank's share of the cache: what stands by head is cut with the heads."""

import torch

from formats.checkpoint.part import Span
from inference.models.kv_cache import CacheShape, LayerCache
from inference.models.model import KVHeads
from inference.parallel.loader import cut_cache


def test_what_keys_are_moved_by_is_cut_with_their_heads():
    offset, feedback = torch.randn(4, 8), torch.randn(4, 8, 8)
    layer = LayerCache(KVHeads(4, 8, 8), turn=8, offset=offset, feedback=feedback)
    (own,) = cut_cache(CacheShape(1, [layer, LayerCache(KVHeads(4, 8, 8))]), Span(1, 3)).layers[:1]
    assert own.heads.count == 2
    assert torch.equal(own.offset, offset[1:3])
    assert torch.equal(own.feedback, feedback[1:3])
