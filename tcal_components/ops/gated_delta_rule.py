"""The gated delta rule: flash-linear-attention's kernels on CUDA, chunked PyTorch elsewhere, one signature.

Per head, with L2-normalised q and k (Gated DeltaNet, arXiv 2412.06464, equation 10)::

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        S: [K, V]
    o_t = S_t^T q_t / sqrt(K)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tcal_components.ops.documents import Documents, documents_from_starts
from tcal_components.ops.fla_gated_delta_rule import fla_gated_delta_rule, fla_gated_delta_rule_step

L2_EPS = 1e-6


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_EPS)


def _compute_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Log decay ``-exp(A_log) * softplus(a + dt_bias)``.

    Args:
        a (Tensor): input-dependent part, shape [..., H].
        A_log (Tensor): shape [H].
        dt_bias (Tensor): shape [H].

    Returns:
        Tensor: negative, shape [..., H], float32 (float64 for float64 inputs).
    """
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    # The sum widens `a` within its own kernel.
    return -A_log.to(dtype).exp() * F.softplus(a + dt_bias.to(dtype))


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    documents: Documents | None = None,
    document_starts: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Runs the gated delta rule over a run of tokens; differentiable in all five inputs and the initial state.

    q and k are L2-normalised inside, q is scaled by ``K ** -0.5``. CUDA tensors of at most 32 bits go to
    flash-linear-attention, all others through :func:`chunked_gated_delta_rule`.

    Args:
        q (Tensor): queries, shape [B, T, H, K].
        k (Tensor): keys, shape [B, T, H, K].
        v (Tensor): values, shape [B, T, H, V].
        g (Tensor): log decay, at most 0, shape [B, T, H].
        beta (Tensor): write gate in [0, 1], shape [B, T, H].
        initial_state (Tensor | None): state before the first token, shape [B, H, K, V]; zeros where None. Ignored in
            rows whose first token starts a document.
        output_final_state (bool): whether to return the state after the last token.
        documents (Documents | None): where documents start; the state is zero before each start.
        document_starts (Tensor | None): the same as a bool mask, shape [B, T]. Give one of the two.
        chunk_size (int): tokens a chunk; 64 on CUDA whatever is given.

    Returns:
        tuple[Tensor, Tensor | None]: outputs, shape [B, T, H, V], in the dtype of ``v``; state, shape [B, H, K, V],
            in float32 (float64 for float64 inputs), or None.

    Raises:
        ValueError: on shapes that do not fit together.
    """
    _check_shapes(q, k, v, g, beta, initial_state)
    if document_starts is not None:
        if documents is not None:
            raise ValueError("documents and document_starts are both given; give one of them")
        documents = documents_from_starts(document_starts)
    if q.device.type == "cuda" and _compute_dtype(q, k, v, g, beta) == torch.float32:
        return fla_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state, documents=documents
        )
    o, state = chunked_gated_delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        document_starts=None if documents is None else documents.starts,
        chunk_size=chunk_size,
    )
    return o, state if output_final_state else None


def chunked_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    document_starts: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule in plain PyTorch, by chunks: dense products and one triangular solve within a chunk, a
    recurrence over chunks (arXiv 2412.06464, section 3.3). Any device, any dtype, differentiable by autograd.

    Half precision is computed in float32. Arguments and results as in :func:`gated_delta_rule`.
    """
    # Under autocast the products would run in bf16; the state must not.
    with torch.autocast(q.device.type, enabled=False):
        return _chunked(q, k, v, g, beta, initial_state, document_starts, chunk_size)


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    starts: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    # Suffixes: B batch, H heads, N chunks, C tokens of a chunk, K key size, V value size.
    batch, length, heads, key_dim = k.shape
    value_dim = v.shape[-1]
    out_dtype, dtype = v.dtype, _compute_dtype(q, k, v, g, beta)
    chunk = min(chunk_size, length)
    pad = -length % chunk

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [B, H, N, C, ...]
        x = x.transpose(1, 2).to(dtype)
        if pad:
            x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, pad))
        return x.unflatten(2, (-1, chunk))

    q_BHNCK = chunks(_l2norm(q.to(dtype)) * key_dim**-0.5)
    k_BHNCK = chunks(_l2norm(k.to(dtype)))
    v_BHNCV, beta_BHNC1 = chunks(v), chunks(beta).unsqueeze(-1)
    if starts is not None:
        # Nothing is carried over a start, so its own decay acts on nothing.
        g = g.masked_fill(starts.unsqueeze(-1), 0.0)
    log_decay = chunks(g).cumsum(dim=-1)  # since the start of the chunk

    index = torch.arange(chunk, device=q.device)
    pair_log = log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)
    hidden = index.unsqueeze(-1) < index  # the later token of a pair cannot be seen
    into_log, outof_log, across_log = log_decay, log_decay[..., -1:] - log_decay, log_decay[..., -1]
    if starts is not None:
        # Starts are masked exactly and not by a large negative decay: sums of -30 in a cumulative sum cost the
        # neighbouring documents their precision (60 padding tokens in a chunk: 1e-4).
        segment = F.pad(starts, (0, pad)).unflatten(1, (-1, chunk)).cumsum(dim=-1).unsqueeze(1)  # [B, 1, N, C]
        hidden = hidden | (segment.unsqueeze(-1) != segment.unsqueeze(-2))
        into_log = into_log.masked_fill(segment != 0, float("-inf"))
        outof_log = outof_log.masked_fill(segment != segment[..., -1:], float("-inf"))
        across_log = across_log.masked_fill(segment[..., -1] != 0, float("-inf"))
    # -inf before exp, not 0 after it: the masked half would overflow and its gradient be 0 * inf.
    pair = pair_log.masked_fill(hidden, float("-inf")).exp()
    into, outof = into_log.exp().unsqueeze(-1), outof_log.exp().unsqueeze(-1)
    across = across_log.exp()[..., None, None]

    # Writes u - w S of all tokens of a chunk, given the state S before it, by forward substitution.
    k_beta = k_BHNCK * beta_BHNC1
    lower = (k_beta @ k_BHNCK.transpose(-1, -2)) * pair  # unit diagonal implied by the solve
    u, w = torch.linalg.solve_triangular(
        lower, torch.cat([v_BHNCV * beta_BHNC1, k_beta * into], dim=-1), upper=False, unitriangular=True
    ).split([value_dim, key_dim], dim=-1)
    scores = (q_BHNCK @ k_BHNCK.transpose(-1, -2)) * pair
    q_into = q_BHNCK * into
    k_outof = (k_BHNCK * outof).transpose(-1, -2)

    if initial_state is None:
        state = torch.zeros(batch, heads, key_dim, value_dim, dtype=dtype, device=q.device)
    else:
        state = initial_state.to(dtype)
        if starts is not None:
            # where, not a product: a state that is not to be read may hold anything, NaN too.
            state = torch.where(starts[:, 0, None, None, None], torch.zeros_like(state), state)
    outputs = []
    for u_c, w_c, scores_c, q_c, k_c, across_c in zip(*(x.unbind(2) for x in (u, w, scores, q_into, k_outof, across))):
        written = u_c - w_c @ state
        outputs.append(q_c @ state + scores_c @ written)
        state = state * across_c + k_c @ written
    o = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :length].transpose(1, 2)
    return o.to(out_dtype), state


def gated_delta_rule_step(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One decoding step of the gated delta rule, gates included: decoding is bound by the number of kernels.

    Without gradients, CUDA tensors of at most 32 bits go to one kernel of flash-linear-attention, all others through
    PyTorch.

    Args:
        q (Tensor): query, shape [B, H, K]; normalised and scaled inside, like k.
        k (Tensor): key, shape [B, H, K].
        v (Tensor): value, shape [B, H, V].
        a (Tensor): what the decay depends on, see :func:`log_decay`, shape [B, H].
        b (Tensor): write gate before its sigmoid, shape [B, H].
        A_log (Tensor): shape [H].
        dt_bias (Tensor): shape [H].
        state (Tensor): state before the token, shape [B, H, K, V], float32 or float64.

    Returns:
        tuple[Tensor, Tensor]: output, shape [B, H, V], in the dtype of ``v``; the new state, shape [B, H, K, V].
    """
    if q.device.type == "cuda" and not torch.is_grad_enabled() and state.dtype == torch.float32:
        return fla_gated_delta_rule_step(q, k, v, a, b, A_log, dt_bias, state)
    dtype = _compute_dtype(q, k, v, a, b, state)
    with torch.autocast(q.device.type, enabled=False):
        out_dtype = v.dtype
        q, k, v, a, b, state = (x.to(dtype) for x in (q, k, v, a, b, state))
        g, beta = log_decay(a, A_log, dt_bias), b.sigmoid()
        q, k = _l2norm(q) * q.shape[-1] ** -0.5, _l2norm(k)
        state = state * g.exp()[..., None, None]
        read = (k.unsqueeze(-2) @ state).squeeze(-2)
        state = state + k.unsqueeze(-1) * ((v - read) * beta.unsqueeze(-1)).unsqueeze(-2)
        o = (q.unsqueeze(-2) @ state).squeeze(-2)
    return o.to(out_dtype), state


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> None:
    batch, length, heads, key_dim = k.shape
    expected = {
        "q": (q, (batch, length, heads, key_dim)),
        "v": (v, (batch, length, heads, v.shape[-1])),
        "g": (g, (batch, length, heads)),
        "beta": (beta, (batch, length, heads)),
    }
    if state is not None:
        expected["initial_state"] = (state, (batch, heads, key_dim, v.shape[-1]))
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {list(shape)} for k {list(k.shape)}")
