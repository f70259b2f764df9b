"""SwiGLU over a fused projection [gate | up]: silu(gate) * up  (Shazeer 2020, arXiv:2002.05202)."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import pdl
from kernels.pdl import begin

BLOCK = 1024


@triton.jit
def _swiglu_kernel(
    p_gate_up, p_out, stride_in, stride_out, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < INNER
    p_gate = p_gate_up + i_t * stride_in + o_i
    b_gate = tl.load(p_gate, mask=m_i, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + INNER, mask=m_i, other=0.0).to(tl.float32)
    b_y = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    tl.store(p_out + i_t * stride_out + o_i, b_y.to(p_out.dtype.element_ty), mask=m_i)


def swiglu_triton(gate_up: Tensor) -> Tensor:
    """`swiglu` as one Triton kernel, BLOCK columns of a row a program."""
    tokens, width = gate_up.shape
    inner = width // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = torch.empty((tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        block = min(BLOCK, triton.next_power_of_2(inner))
        grid = (tokens, triton.cdiv(inner, block))
        _swiglu_kernel[grid](
            gate_up,
            out,
            gate_up.stride(0),
            out.stride(0),
            INNER=inner,
            BLOCK=block,
            num_warps=4,
            **pdl.launch(gate_up.device),
        )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate_up[:, :I]) * gate_up[:, I:] for gate_up [T, 2I] of any strides -> [T, I], row- or
    column-major as gate_up is."""
    if gate_up.is_cuda:
        return swiglu_triton(gate_up)
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """`swiglu` term by term in float64, rounded once."""
    gate, up = gate_up.double().chunk(2, dim=1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)
