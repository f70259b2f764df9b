"""Copy whole pages between KV pools: copy-on-write, and moves to and from a pool on another device."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cache_types import FP8

BLOCK = 2048


@triton.jit
def _copy_pages_kernel(
    p_src,
    p_dst,
    p_pairs,
    stride_src_outer,
    stride_src_page,
    stride_dst_outer,
    stride_dst_page,
    stride_pair,
    PAGE_ELEMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_pair = tl.program_id(0).to(tl.int64)
    i_outer = tl.program_id(1).to(tl.int64)
    o_e = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m_e = o_e < PAGE_ELEMENTS
    src = tl.load(p_pairs + i_pair * stride_pair)
    dst = tl.load(p_pairs + i_pair * stride_pair + 1)
    b_x = tl.load(p_src + i_outer * stride_src_outer + src * stride_src_page + o_e, mask=m_e, other=0.0)
    tl.store(p_dst + i_outer * stride_dst_outer + dst * stride_dst_page + o_e, b_x, mask=m_e)


def _flattened(pool: Tensor, name: str) -> Tensor:
    """Pool [.., N, H, P, D] as a view [L, N, H * P * D]."""
    shape = (-1, pool.shape[-4], pool.shape[-3:].numel())
    try:
        return pool.view(shape)
    except RuntimeError:
        raise ValueError(
            f"{name} with strides {pool.stride()} can't be seen as [L, pages, page]; pages must be contiguous"
        ) from None


def _check(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    same = src.dtype == dst.dtype and src.shape[:-4] == dst.shape[:-4] and src.shape[-3:] == dst.shape[-3:]
    if not same:
        raise ValueError(
            f"pools differ in more than their number of pages: {src.dtype} {list(src.shape)}, "
            f"{dst.dtype} {list(dst.shape)}"
        )
    if pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs must be int64 [n, 2], not {pairs.dtype} {[*pairs.shape]}")


def copy_pages_triton(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """`copy_pages` as one Triton kernel, BLOCK elements of a page a program."""
    _check(src, dst, pairs)
    flat_src, flat_dst = _flattened(src, "src"), _flattened(dst, "dst")
    outer, _, elements = flat_src.shape
    if len(pairs) == 0:
        return
    pairs = pairs.contiguous()
    _copy_pages_kernel[(len(pairs), outer, triton.cdiv(elements, BLOCK))](
        flat_src,
        flat_dst,
        pairs,
        *flat_src.stride()[:2],
        *flat_dst.stride()[:2],
        pairs.stride(0),
        PAGE_ELEMENTS=elements,
        BLOCK=BLOCK,
        num_warps=4,
    )


def copy_pages(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """dst[.., d, :, :, :] = src[.., s, :, :, :] for every (s, d) in pairs.

    Args:
        src: pool [.., N, H, P, D]; leading dimensions (layers, keys and values) are copied alike.
        dst: pool of the same type and shape but for N; may be src itself, and on another device.
        pairs: [n, 2] int64. Destinations are distinct, and none is a source too when dst shares src's memory.

    Raises:
        ValueError: the pools' shapes or types differ, or their pages aren't contiguous.
    """
    if src.is_cuda and dst.device == src.device:
        copy_pages_triton(src, dst, pairs.to(src.device))
        return
    _check(src, dst, pairs)
    if src.dtype == FP8:  # torch has no index_copy_ for it
        src, dst = src.view(torch.uint8), dst.view(torch.uint8)
    sources, destinations = pairs.unbind(1)
    pages = src.index_select(-4, sources.to(src.device)).to(dst.device)
    dst.index_copy_(dst.dim() - 4, destinations.to(dst.device), pages)


def copy_pages_reference(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """`copy_pages`, a page at a time."""
    for source, destination in pairs.tolist():
        dst[..., destination, :, :, :] = src[..., source, :, :, :]
