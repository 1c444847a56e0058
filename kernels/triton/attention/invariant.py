"""Decode attention whose results do not depend on what else is in the batch.

How the pages of a sequence are cut into runs, and so the order of a sum, follows from its own
length: the number of splits is that of `SEQUENCES` of `PAGES`, whatever the batch is. A run has
`LEAST` pages or more, so that short sequences, of which a batch may have many, are not cut. Queries
of a prompt may stand as sequences of their own, each a token longer than the one before: their
results are then those of decodes, however the prompt is cut into chunks.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from kernels.op_inputs import AttentionInputs
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.paged_cache import result, scale_kind
from kernels.triton.common import Workspace
from kernels.triton.tuning import kv_split

SEQUENCES = 8  # few enough to give a GPU work where sequences are long, and as good for many
PAGES = 64
LEAST = 8


def invariant_attention(
    q: Tensor,
    inputs: AttentionInputs,
    workspace: Workspace,
    *,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    metadata_ready: bool = False,
) -> Tensor:
    """As `kernels.triton.attention.decode.decode_attention`, in one order of sums.

    Args:
        q: [S, Hq, D]; any number of them, in as many launches as the workspace asks for.
    """
    (_, q_heads, dim), pool = q.shape, inputs.pool
    heads, window = pool.k.shape[1], inputs.sliding_window
    pages = PAGES if window is None else min(PAGES, window // 64 + 2)
    packed = pool.v.dtype == torch.uint8
    split = kv_split(q.device, SEQUENCES, heads, pages, scale_kind(pool), dim, packed)
    split = replace(split, least=LEAST)
    padded = max(8, triton.next_power_of_2(q_heads // heads))
    of_one = heads * split.splits * padded * (triton.next_power_of_2(dim) + 2)
    most = int(min(workspace.parts.numel() // of_one, workspace.arrivals.numel() // heads))
    out, at_once = result(q, None, out_scale, out_dtype), len(q) <= most
    for i in range(0, len(q), most):
        rows = slice(i, i + most)
        own = replace(
            inputs, block_tables=inputs.block_tables[rows], context_len=inputs.context_len[rows]
        )
        decode_attention(
            q[rows], own, workspace, split=split, out_scale=out_scale, out_dtype=out_dtype,
            out=out[rows], metadata_ready=metadata_ready and at_once,
        )  # fmt: skip
    return out
