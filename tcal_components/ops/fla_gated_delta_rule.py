"""The gated delta rule by flash-linear-attention's kernels, as operators that torch.compile does not look into."""

import torch
from torch import Tensor

from tcal_components.ops.documents import Documents
from tcal_components.ops.kernels import fla_function

MAX_CUDA_HEAD_DIM = 256


# The library's wrappers break torch.compile's graphs in many places; one break is enough.
@torch.compiler.disable
def fla_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    documents: Documents | None,
) -> tuple[Tensor, Tensor | None]:
    if max(q.shape[-1], v.shape[-1]) > MAX_CUDA_HEAD_DIM:
        raise ValueError(
            f"head size {max(q.shape[-1], v.shape[-1])} of the gated delta rule; "
            f"flash-linear-attention allows at most {MAX_CUDA_HEAD_DIM} on CUDA"
        )
    chunk_gated_delta_rule = fla_function("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    batch, length = q.shape[:2]
    if initial_state is not None:
        initial_state = initial_state.float()
        if documents is not None:
            fresh = documents.starts[:, 0, None, None, None]
            initial_state = torch.where(fresh, torch.zeros_like(initial_state), initial_state)
    packed = documents if documents is not None and documents.packed else None
    kwargs: dict[str, Tensor] = {}
    if packed is not None:
        # Boundaries need a batch of one.
        q, k, v, g, beta = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta))
        kwargs = {"cu_seqlens": packed.cu_seqlens, "cu_seqlens_cpu": packed.cu_seqlens_cpu}
        if initial_state is not None:
            pieces = packed.cu_seqlens_cpu.numel() - 1
            zeros = initial_state.new_zeros(pieces, *initial_state.shape[1:])
            initial_state = zeros.index_copy(0, packed.first, initial_state)
    dtype = v.dtype
    o, state = chunk_gated_delta_rule(
        q=q.to(dtype),
        k=k.to(dtype),
        v=v,
        g=g.float(),
        beta=beta.float(),
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        **kwargs,
    )
    if packed is not None:
        o = o.squeeze(0).unflatten(0, (batch, length))
        if state is not None:
            state = state.index_select(0, packed.last)
    return o, state


@torch.compiler.disable
def fla_gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    step = fla_function("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule")
    q, k, v, a, b = (x.unsqueeze(1) for x in (q, k, v, a, b))
    o, state = step(
        q,
        k,
        v,
        g=a,
        beta=b,
        A_log=A_log,
        dt_bias=dt_bias,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
    )
    return o.squeeze(1), state
