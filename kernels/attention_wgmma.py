"""Prefill attention on Hopper's tensor cores: FlashAttention-3's schedule (Shah 2024, arXiv:2407.08608).

A tile is 128 query rows of one head, and a program, one a multiprocessor, computes tile after tile: two
groups of four warps 64 rows each, while one more warp brings queries, keys and values to shared memory by the
tensor copy engine, as far ahead as there is room. While a group computes the softmax of one block of scores,
the tensor cores work on the values of the block before, and on what the other group needs. Blocks go from the
diagonal towards the beginning, so that what needs a mask comes first (and, of a sliding window, last).

Written in Gluon, Triton's lower level: Triton itself waits for every product before it computes with it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: RUF059  (a tile has more to it than each part needs; Gluon knows no other way to leave some out)

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.attention_decode import LOG2_E, multiprocessors
from kernels.batch import AttentionBatch

ROWS = 64  # of a group of warps
GROUPS = 2
BLOCK_M = ROWS * GROUPS
BLOCK_N = 128
STAGES = 2
REGISTERS = 240  # a thread of the second group of rows; the loader needs a tenth of that


@gluon.jit
def _tile(
    i_turn, p_seq_lens, p_query_starts, first_seq, q_heads, sequences, row_blocks,
    WINDOW: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """A program's tile in its i_turn-th turn: its head, its sequence, its first row, how many it has, the
    first one's position; then how many blocks of keys there are up to the last row, and how many of them,
    from the last one down, are computed (0: there is no tile, or it has no rows), of which the first `masked`
    and those from `full` on need a mask.

    Heads vary fastest, so that a group's heads meet in the L2 cache; late rows have the most keys and go
    first. Every other turn goes through the programs backwards, or the first would always get the longest.
    """
    programs = gl.num_programs(0)
    i = i_turn * programs + gl.where(i_turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    i_h = i % q_heads
    i_b = i // q_heads % sequences
    i_m = row_blocks - 1 - i // (q_heads * sequences)
    start = gl.load(p_query_starts + first_seq + i_b)
    rows = gl.load(p_query_starts + first_seq + i_b + 1) - start
    seq_len = gl.load(p_seq_lens + first_seq + i_b)
    first_pos = seq_len - rows + i_m * BLOCK_M
    end = gl.minimum(first_pos + BLOCK_M, seq_len)
    blocks = (end + BLOCK_N - 1) // BLOCK_N
    masked = blocks - (first_pos + 1) // BLOCK_N
    count = blocks
    full = blocks
    if WINDOW > 0:
        count = blocks - gl.maximum(first_pos - WINDOW + 1, 0) // BLOCK_N
        full = blocks - (gl.maximum(end - WINDOW, 0) + BLOCK_N - 1) // BLOCK_N
    row = start + i_m * BLOCK_M
    count = gl.where((i_m >= 0) & (i_m * BLOCK_M < rows), count, 0)
    left = rows - i_m * BLOCK_M
    return i_h, i_b, row, left, first_pos, blocks, count, masked, full


@gluon.jit
def _load(
    d_q, d_k, d_v, q_tiles, k_tiles, v_tiles, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    p_seq_lens, p_query_starts, first_seq, q_heads, sequences, row_blocks, padded,
    GROUP: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Of each tile: the queries, then the keys and values of its blocks from the last one down."""
    ROWS: gl.constexpr = d_q.block_type.shape[0]
    HEAD_DIM: gl.constexpr = d_q.block_type.shape[1]
    BLOCK_N: gl.constexpr = d_k.block_type.shape[0]
    tiles, done = 0, 0
    for i_turn in range(gl.cdiv(q_heads * sequences * row_blocks, gl.num_programs(0))):
        i_h, i_b, row, left, first_pos, blocks, count, masked, full = _tile(
            i_turn, p_seq_lens, p_query_starts, first_seq, q_heads, sequences, row_blocks, WINDOW, 2 * ROWS,
            BLOCK_N,
        )  # fmt: skip
        kv_row = (i_b * (q_heads // GROUP) + i_h // GROUP) * padded + (blocks - 1) * BLOCK_N
        if count > 0:
            for i in gl.static_range(2):
                mbarrier.wait(q_empty.index(i), (tiles & 1) ^ 1)
                mbarrier.expect(q_ready.index(i), d_q.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    d_q, [row + i * ROWS, i_h * HEAD_DIM], q_ready.index(i), q_tiles.index(i)
                )
            tiles += 1
        for _ in range(count):
            stage, phase = done % STAGES, (done // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_ready.index(stage), d_k.block_type.nbytes)
            tma.async_copy_global_to_shared(d_k, [kv_row, 0], k_ready.index(stage), k_tiles.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_ready.index(stage), d_v.block_type.nbytes)
            tma.async_copy_global_to_shared(d_v, [kv_row, 0], v_ready.index(stage), v_tiles.index(stage))
            kv_row -= BLOCK_N
            done += 1


@gluon.jit
def _keep(x):
    """Use x, in no instruction: up to here its registers hold what a product under way may still read."""
    gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=2)


@gluon.jit
def _softmax(
    b_s, b_max, b_sum, o_pos, first, scale_log2, WINDOW: gl.constexpr, MASKED: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """Weights of a block of scores, and what its rows' earlier sums are to be multiplied by."""
    if MASKED:
        o_n = first + gl.arange(0, b_s.shape[1], layout=gl.SliceLayout(0, SCORES))
        m_s = o_n[None, :] <= o_pos[:, None]
        if WINDOW > 0:
            m_s = m_s & (o_n[None, :] > o_pos[:, None] - WINDOW)
        b_s = gl.where(m_s, b_s, float("-inf"))
    b_new = gl.maximum(b_max, gl.max(b_s, axis=1) * scale_log2)
    b_safe = gl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = gl.exp2(b_s * scale_log2 - b_safe[:, None])
    b_shrink = gl.exp2(b_max - b_safe)
    return b_p, b_new, b_sum * b_shrink + gl.sum(b_p, axis=1), b_shrink


@gluon.jit
def _blocks(
    b_acc, b_p, b_max, b_sum, q_tile, k_tiles, v_tiles, k_ready, k_empty, v_ready, v_empty,
    o_pos, begin, end, last, count, done, scale_log2,
    WINDOW: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Blocks `begin` to `end`, counted from block `last` down. b_p are the weights of the one before `begin`,
    whose values are added up first."""
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    for i in range(begin, end):
        stage, before, behind = (done + i) % STAGES, done + i - 1, done + i + 1
        v_stage, v_phase = before % STAGES, (before // STAGES) & 1
        b_zero = gl.zeros([b_acc.shape[0], BLOCK_N], gl.float32, SCORES)
        b_s = warpgroup_mma(
            q_tile, k_tiles.index(stage).permute((1, 0)), b_zero, use_acc=False, is_async=True
        )
        b_weights = gl.convert_layout(b_p.to(q_tile.dtype), WEIGHTS)
        mbarrier.wait(v_ready.index(v_stage), v_phase)
        b_acc = warpgroup_mma(b_weights, v_tiles.index(v_stage), b_acc, is_async=True)
        b_s = warpgroup_mma_wait(1, deps=[b_s])
        mbarrier.arrive(k_empty.index(stage))
        b_p, b_max, b_sum, b_shrink = _softmax(
            b_s, b_max, b_sum, o_pos, (last - i) * BLOCK_N, scale_log2, WINDOW, MASKED, SCORES
        )
        mbarrier.wait(k_ready.index(behind % STAGES), (behind // STAGES) & 1, pred=i + 1 < count)
        b_acc = warpgroup_mma_wait(0, deps=[b_acc])
        _keep(b_weights)
        mbarrier.arrive(v_empty.index(v_stage))
        b_acc = b_acc * gl.convert_layout(b_shrink, gl.SliceLayout(1, SUMS))[:, None]
    return b_acc, b_p, b_max, b_sum


@gluon.jit
def _attend(
    GROUP_ROW: gl.constexpr, q_tile, o_tile, k_tiles, v_tiles,
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
    p_out, stride_ot, stride_oh, p_seq_lens, p_query_starts, first_seq, q_heads, sequences, row_blocks,
    scale_log2, WINDOW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The rows of each tile from GROUP_ROW on."""
    ROWS: gl.constexpr = q_tile.shape[0]
    HEAD_DIM: gl.constexpr = q_tile.shape[1]
    BLOCK_N: gl.constexpr = k_tiles.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    tiles, done = 0, 0
    for i_turn in range(gl.cdiv(q_heads * sequences * row_blocks, gl.num_programs(0))):
        i_h, i_b, row, left, first_pos, blocks, count, masked, full = _tile(
            i_turn, p_seq_lens, p_query_starts, first_seq, q_heads, sequences, row_blocks, WINDOW, 2 * ROWS,
            BLOCK_N,
        )  # fmt: skip
        if count > 0:
            last = blocks - 1
            o_pos = first_pos + GROUP_ROW + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
            b_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            b_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES))
            b_acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, SUMS)
            stage, behind = done % STAGES, done + 1
            mbarrier.wait(q_ready, tiles & 1)
            mbarrier.wait(k_ready.index(stage), (done // STAGES) & 1)
            b_s = warpgroup_mma(
                q_tile, k_tiles.index(stage).permute((1, 0)), gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES),
                use_acc=False, is_async=True,
            )  # fmt: skip
            b_s = warpgroup_mma_wait(0, deps=[b_s])
            mbarrier.arrive(k_empty.index(stage))
            b_p, b_max, b_sum, b_shrink = _softmax(
                b_s, b_max, b_sum, o_pos, last * BLOCK_N, scale_log2, WINDOW, True, SCORES
            )
            mbarrier.wait(k_ready.index(behind % STAGES), (behind // STAGES) & 1, pred=count > 1)
            b_acc, b_p, b_max, b_sum = _blocks(
                b_acc, b_p, b_max, b_sum, q_tile, k_tiles, v_tiles, k_ready, k_empty, v_ready, v_empty, o_pos,
                1, masked, last, count, done, scale_log2, WINDOW, True, STAGES, SCORES, SUMS,
            )  # fmt: skip
            b_acc, b_p, b_max, b_sum = _blocks(
                b_acc, b_p, b_max, b_sum, q_tile, k_tiles, v_tiles, k_ready, k_empty, v_ready, v_empty, o_pos,
                gl.maximum(masked, 1), full, last, count, done, scale_log2, WINDOW, False, STAGES, SCORES,
                SUMS,
            )  # fmt: skip
            if WINDOW > 0:
                b_acc, b_p, b_max, b_sum = _blocks(
                    b_acc, b_p, b_max, b_sum, q_tile, k_tiles, v_tiles, k_ready, k_empty, v_ready, v_empty,
                    o_pos, gl.maximum(gl.maximum(masked, full), 1), count, last, count, done, scale_log2,
                    WINDOW, True, STAGES, SCORES, SUMS,
                )  # fmt: skip
            mbarrier.arrive(q_empty)
            done += count
            stage, phase = (done - 1) % STAGES, ((done - 1) // STAGES) & 1
            b_weights = gl.convert_layout(b_p.to(q_tile.dtype), WEIGHTS)
            mbarrier.wait(v_ready.index(stage), phase)
            b_acc = warpgroup_mma(b_weights, v_tiles.index(stage), b_acc, is_async=True)
            b_acc = warpgroup_mma_wait(0, deps=[b_acc])
            _keep(b_weights)
            mbarrier.arrive(v_empty.index(stage))
            b_total = gl.convert_layout(b_sum, gl.SliceLayout(1, SUMS))
            b_out = b_acc / gl.where(b_total > 0.0, b_total, 1.0)[:, None]
            o_tile.store(b_out.to(q_tile.dtype))
            o_m = GROUP_ROW + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))
            o_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, STORED))
            p_o = p_out + i_h * stride_oh + (row + o_m).to(gl.int64)[:, None] * stride_ot + o_d[None, :]
            gl.store(p_o, o_tile.load(STORED), mask=(o_m < left)[:, None])
            tiles += 1


@gluon.jit(do_not_specialize=["first_seq", "q_heads", "sequences", "row_blocks", "padded"])
def _attention_kernel(
    d_q, d_k, d_v, p_out, p_seq_lens, p_query_starts, first_seq, q_heads, sequences, row_blocks, padded,
    scale_log2, stride_ot, stride_oh,
    GROUP: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = d_q.block_type.shape[0]
    HEAD_DIM: gl.constexpr = d_q.block_type.shape[1]
    BLOCK_N: gl.constexpr = d_k.block_type.shape[0]
    q_tiles = gl.allocate_shared_memory(d_q.dtype, [2, ROWS, HEAD_DIM], d_q.layout)
    o_tiles = gl.allocate_shared_memory(d_q.dtype, [2, ROWS, HEAD_DIM], d_q.layout)
    k_tiles = gl.allocate_shared_memory(d_k.dtype, [STAGES, BLOCK_N, HEAD_DIM], d_k.layout)
    v_tiles = gl.allocate_shared_memory(d_v.dtype, [STAGES, BLOCK_N, HEAD_DIM], d_v.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_attend, (
                0, q_tiles.index(0), o_tiles.index(0), k_tiles, v_tiles, q_ready.index(0), q_empty.index(0),
                k_ready, k_empty, v_ready, v_empty, p_out, stride_ot, stride_oh, p_seq_lens, p_query_starts,
                first_seq, q_heads, sequences, row_blocks, scale_log2, WINDOW, STAGES,
            )),
            (_attend, (
                ROWS, q_tiles.index(1), o_tiles.index(1), k_tiles, v_tiles, q_ready.index(1),
                q_empty.index(1), k_ready, k_empty, v_ready, v_empty, p_out, stride_ot, stride_oh, p_seq_lens,
                p_query_starts, first_seq, q_heads, sequences, row_blocks, scale_log2, WINDOW, STAGES,
            )),
            (_load, (
                d_q, d_k, d_v, q_tiles, k_tiles, v_tiles, q_ready, q_empty, k_ready, k_empty, v_ready,
                v_empty, p_seq_lens, p_query_starts, first_seq, q_heads, sequences, row_blocks, padded, GROUP,
                WINDOW, STAGES,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def _tiles(tensor: Tensor, shape: list[int], strides: list[int], rows: int, dim: int) -> TensorDescriptor:
    element = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, dim], element)
    return TensorDescriptor(tensor, shape, strides, [rows, dim], layout)


def wgmma_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: AttentionBatch,
    padded: int,
    scale: float,
    sliding_window: int,
    out: Tensor,
    *,
    stages: int = STAGES,
) -> None:
    """Attention of the sequences behind the batch's decodes over keys and values as dense rows.

    Args:
        q: [T, Hq, D], 16-bit, D 64 or 128, last dimension contiguous, rows at multiples of 16 bytes.
        keys: [sequences · Hkv · padded, D], contiguous: `padded` rows for each KV head of each sequence, a
            multiple of 128, finite also where its context has ended.
        values: like keys.
        batch: whose rows they are.
        padded: rows of a head.
        scale: factor of the scores, before the softmax.
        sliding_window: tokens visible to a query, itself included; 0: all.
        out: [T, Hq, D], last dimension contiguous.
        stages: blocks of keys and values that shared memory holds.
    """
    tokens, q_heads, dim = q.shape
    q = q if q.stride(1) == dim else q.contiguous()
    sequences = batch.seq_lens.shape[0] - batch.num_decodes
    kv_heads = keys.shape[0] // (sequences * padded)
    d_q = _tiles(q, [tokens, q_heads * dim], [q.stride(0), 1], ROWS, dim)
    d_k, d_v = (_tiles(x, list(x.shape), list(x.stride()), BLOCK_N, dim) for x in (keys, values))
    row_blocks = triton.cdiv(batch.max_query_len, BLOCK_M)
    programs = min(q_heads * row_blocks * sequences, multiprocessors(q.device))
    _attention_kernel[(programs,)](
        d_q, d_k, d_v, out, batch.seq_lens, batch.query_starts, batch.num_decodes, q_heads, sequences,
        row_blocks, padded, scale * LOG2_E, *out.stride()[:2],
        GROUP=q_heads // kv_heads, WINDOW=sliding_window, STAGES=stages, REGISTERS=REGISTERS, num_warps=4,
    )  # fmt: skip
