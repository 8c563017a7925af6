"""Right and wrong answers to chapter 03, with the check that has to find each mistake first."""

import math

import numpy as np
import torch
from torch.nn import functional as F

from book.grading import right, solution, wrong
from mini_engine.attention.naive import attention_mask, masked_attention
from mini_engine.errors import ModelLoadError
from mini_engine.rope import apply_rope

reference = solution("03_language_model")


# rms_norm -----------------------------------------------------------------------------------------------------------


@right("rms_norm")
def by_vector_norm(x, weight, eps):
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    wide = x.to(dtype)
    mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True) ** 2 / x.shape[-1]
    return wide.mul((mean_square + eps) ** -0.5).mul(weight).to(x.dtype)


@right("rms_norm")
def by_the_library(x, weight, eps):
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


@wrong("rms_norm", fails="test_a_row_whose_rms_is_three")
def divided_by_the_length(x, weight, eps):
    return (x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps) * weight).to(x.dtype)


@wrong("rms_norm", fails="test_a_row_whose_rms_is_three")
def layer_norm(x, weight, eps):
    """Subtracts the mean, too."""
    return F.layer_norm(x.to(weight.dtype), weight.shape, weight, None, eps).to(x.dtype)


@wrong("rms_norm", fails="test_a_row_whose_rms_is_three")
def without_the_root(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps) * weight


@wrong("rms_norm", fails="test_norm_weight")
def weight_of_gemma(x, weight, eps):
    """(1 + w), but the engine adds the 1 when it loads. (For a weight of ones it looks right if ones count as none.)"""
    return reference.rms_norm(x, torch.where(weight == 1, weight, 1 + weight), eps)


@wrong("rms_norm", fails="test_each_row_is_normed_alone")
def one_norm_for_all_rows(x, weight, eps):
    wide = x.float()
    return (wide / torch.sqrt(wide.square().mean() + eps) * weight).to(x.dtype)


@wrong("rms_norm", fails="test_eps_is_inside_the_root")
def eps_beside_the_root(x, weight, eps):
    wide = x.float()
    return (wide / (wide.square().mean(-1, keepdim=True).sqrt() + eps) * weight).to(x.dtype)


@wrong("rms_norm", fails="test_eps_is_inside_the_root")
def eps_forgotten(x, weight, eps):
    wide = x.float()
    return (wide / wide.square().mean(-1, keepdim=True).sqrt() * weight).to(x.dtype)


@wrong("rms_norm", fails="test_large_float16_numbers")
def squared_in_half_precision(x, weight, eps):
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


@wrong("rms_norm", fails="test_norm_of_bfloat16_is_rounded_once")
def rounded_before_the_weight(x, weight, eps):
    """As in transformers: cast back first, then multiply."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight.to(x.dtype)


@wrong("rms_norm", fails="test_a_weight_wider_than_x")
def narrow_weight(x, weight, eps):
    return reference.rms_norm(x, weight.to(x.dtype), eps)


@wrong("rms_norm", fails="test_norm_of_float64_stays_float64")
def norm_in_float32(x, weight, eps):
    return reference.rms_norm(x.float(), weight.float(), eps).to(x.dtype) if x.element_size() == 8 else (
        reference.rms_norm(x, weight, eps)
    )  # fmt: skip


@wrong("rms_norm", fails="test_norm_leaves_its_input")
def norm_in_place(x, weight, eps):
    return x.copy_(reference.rms_norm(x, weight, eps))


# qk_norm ------------------------------------------------------------------------------------------------------------


@right("qk_norm")
def one_weight_per_head(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    num_kv_heads = q_and_k.shape[1] - num_qo_heads
    weights = torch.cat((q_weight.expand(num_qo_heads, -1), k_weight.expand(num_kv_heads, -1)))
    return reference.rms_norm(q_and_k, torch.ones_like(q_weight), eps) * weights


@wrong("qk_norm", fails="test_one_head_of_each")
def unit_length(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    """Cosine attention: heads of length 1, not of a root mean square of 1."""
    q, k = F.normalize(q_and_k, dim=-1).split((num_qo_heads, q_and_k.shape[1] - num_qo_heads), dim=1)
    return torch.cat((q * q_weight, k * k_weight), dim=1)


@wrong("qk_norm", fails="test_one_head_of_each")
def queries_only(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    q, k = q_and_k[:, :num_qo_heads], q_and_k[:, num_qo_heads:]
    return torch.cat((reference.rms_norm(q, q_weight, eps), k), dim=1)


@wrong("qk_norm", fails="test_each_head_is_normed_alone")
def over_the_whole_token(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    """As in OLMo 2: one norm over all query heads of a token."""
    q, k = q_and_k[:, :num_qo_heads], q_and_k[:, num_qo_heads:]
    normed = [reference.rms_norm(x.flatten(1), w.repeat(x.shape[1]), eps).unflatten(1, x.shape[1:])
              for x, w in ((q, q_weight), (k, k_weight))]  # fmt: skip
    return torch.cat(normed, dim=1)


@wrong("qk_norm", fails="test_queries_and_keys_have_their_own_weights")
def one_weight_for_both(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    return reference.rms_norm(q_and_k, q_weight, eps)


@wrong("qk_norm", fails="test_queries_and_keys_have_their_own_weights")
def heads_cut_in_the_middle(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    q, k = q_and_k.tensor_split(2, dim=1)
    return torch.cat((reference.rms_norm(q, q_weight, eps), reference.rms_norm(k, k_weight, eps)), dim=1)


@wrong("qk_norm", fails="test_qk_norm_leaves_its_input")
def heads_in_place(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    return q_and_k.copy_(reference.qk_norm(q_and_k, q_weight, k_weight, num_qo_heads, eps))


# gated_mlp ----------------------------------------------------------------------------------------------------------


@right("gated_mlp")
def three_products(x, gate_up, down, activation):
    inner = down.shape[1]
    return (activation(x @ gate_up[:inner].T) * (x @ gate_up[inner:].T)) @ down.mT


@right("gated_mlp")
def summed_over_the_inner_axis(x, gate_up, down, activation):
    projected = torch.einsum("th,ih->ti", x, gate_up)
    inner = activation(projected[:, : down.shape[1]]).mul(projected[:, down.shape[1] :])
    return torch.einsum("ti,hi->th", inner, down)


@wrong("gated_mlp", fails="test_one_inner_number")
def added_instead_of_multiplied(x, gate_up, down, activation):
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(activation(gate) + up, down)


@wrong("gated_mlp", fails="test_one_inner_number")
def without_up(x, gate_up, down, activation):
    gate, _ = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(activation(gate), down)


@wrong("gated_mlp", fails="test_the_activation_is_on_the_gate")
def activation_on_up(x, gate_up, down, activation):
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(gate * activation(up), down)


@wrong("gated_mlp", fails="test_one_inner_number")
def activation_on_both(x, gate_up, down, activation):
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(activation(gate * up), down)


@wrong("gated_mlp", fails="test_gate_and_up_are_two_halves")
def alternating_rows(x, gate_up, down, activation):
    both = F.linear(x, gate_up)
    return F.linear(activation(both[:, 0::2]) * both[:, 1::2], down)


@wrong("gated_mlp", fails="test_swiglu_and_geglu")
def always_silu(x, gate_up, down, activation):
    return reference.gated_mlp(x, gate_up, down, F.silu)


@wrong("gated_mlp", fails="test_mlp_sizes_and_dtypes")
def always_float32(x, gate_up, down, activation):
    return reference.gated_mlp(x.float(), gate_up.float(), down.float(), activation)


# decoder_layer ------------------------------------------------------------------------------------------------------


def decoder(x, weights, cos, sin, spec, attend, eps, **change):
    """The reference with one thing changed: what most of the wrong answers below are made of."""
    normed = x if change.get("no_norm") else reference.rms_norm(x, weights.input_norm, eps)
    heads = F.linear(normed, weights.qkv)
    sizes = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = heads.unflatten(1, (-1, spec.head_dim)).split(sizes, dim=1)
    if change.get("group_by_group") and spec.num_qo_heads != spec.num_kv_heads:
        grouped = heads.unflatten(1, (spec.num_kv_heads, -1, spec.head_dim))
        q, k, v = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    if not change.get("no_rotation"):
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
    v = apply_rope(v, cos, sin) if change.get("values_too") else v
    out = F.linear(attend(change.get("layer", spec.layer), q, k, v).flatten(1), weights.o)
    x = out if change.get("no_residual") else x + out
    read = change.get("mlp_reads", x)
    normed = reference.rms_norm(read, weights.input_norm if change.get("one_norm") else weights.mlp_norm, eps)
    x = normed if change.get("norm_is_kept") else x
    return x + reference.gated_mlp(normed, weights.gate_up, weights.down, change.get("activation", F.silu))


@right("decoder_layer")
def unfused(x, weights, cos, sin, spec, attend, eps):
    rows = torch.tensor((spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)) * spec.head_dim
    q_weight, k_weight, v_weight = weights.qkv.split(rows.tolist())
    normed = reference.rms_norm(x, weights.input_norm, eps)
    q, k, v = ((normed @ w.T).reshape(len(x), -1, spec.head_dim) for w in (q_weight, k_weight, v_weight))
    q, k = (apply_rope(torch.cat((q, k), 1), cos, sin)).split((spec.num_qo_heads, spec.num_kv_heads), 1)
    attended = x + attend(spec.layer, q, k, v).reshape(len(x), -1) @ weights.o.T
    normed = reference.rms_norm(attended, weights.mlp_norm, eps)
    return attended + reference.gated_mlp(normed, weights.gate_up, weights.down, F.silu)


@wrong("decoder_layer", fails="test_the_mlp_half")
def without_residual(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, no_residual=True)


@wrong("decoder_layer", fails="test_the_mlp_half")
def norm_in_the_residual(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, norm_is_kept=True)


@wrong("decoder_layer", fails="test_the_mlp_half")
def the_same_norm_twice(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, one_norm=True)


@wrong("decoder_layer", fails="test_the_mlp_half")
def geglu(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, activation=F.gelu)


@wrong("decoder_layer", fails="test_values_pass_through")
def attention_without_a_norm(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, no_norm=True)


@wrong("decoder_layer", fails="test_rotation")
def values_rotated(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, values_too=True)


@wrong("decoder_layer", fails="test_the_mlp_reads_the_sum")
def parallel_halves(x, weights, cos, sin, spec, attend, eps):
    """As in GPT-J: attention and MLP read the same x."""
    return decoder(x, weights, cos, sin, spec, attend, eps, mlp_reads=x)


@wrong("decoder_layer", fails="test_grouped_heads")
def rows_group_by_group(x, weights, cos, sin, spec, attend, eps):
    """The order of Falcon's and GPT-NeoX's fused weights: each group with its own key and value."""
    return decoder(x, weights, cos, sin, spec, attend, eps, group_by_group=True)


@wrong("decoder_layer", fails="test_rotation")
def not_rotated(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, no_rotation=True)


@wrong("decoder_layer", fails="test_attend_is_called_once")
def attention_head_by_head(x, weights, cos, sin, spec, attend, eps):
    """Asks `attend` once more, to look at what it returns."""
    shape = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
    normed = reference.rms_norm(x, weights.input_norm, eps)
    q, k, v = F.linear(normed, weights.qkv).unflatten(1, (-1, spec.head_dim)).split(shape, dim=1)
    attend(spec.layer, q, k, v)
    return decoder(x, weights, cos, sin, spec, attend, eps)


@wrong("decoder_layer", fails="test_attend_is_called_once")
def always_the_first_layer(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, layer=0)


@wrong("decoder_layer", fails="test_attention_is_left_to_attend")
def own_attention(x, weights, cos, sin, spec, attend, eps):
    def ours(layer, q, k, v):
        positions = torch.arange(len(q))
        return masked_attention(q, k, v, scale=spec.scale, mask=attention_mask(positions, positions))

    return decoder(x, weights, cos, sin, spec, ours, eps)


@wrong("decoder_layer", fails="test_grouped_heads")
def keys_of_one_head_after_another(x, weights, cos, sin, spec, attend, eps):
    def mixed(layer, q, k, v):
        return attend(layer, q, k.reshape(k.shape[1], len(k), -1).transpose(0, 1), v)

    return decoder(x, weights, cos, sin, spec, mixed, eps)


@wrong("decoder_layer", fails="test_the_layer_leaves_its_input")
def residual_in_place(x, weights, cos, sin, spec, attend, eps):
    return x.copy_(decoder(x, weights, cos, sin, spec, attend, eps))


# gpt2_weights -------------------------------------------------------------------------------------------------------

CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
BUFFERS = (".attn.bias", ".attn.masked_bias")


@right("gpt2_weights")
def by_the_end_of_the_name(tensors):
    found = {}
    for full_name, tensor in tensors.items():
        name = full_name[len("transformer.") :] if full_name.startswith("transformer.") else full_name
        if name.endswith(BUFFERS):
            continue
        if name in found:
            raise ModelLoadError(name)
        found[name] = tensor.transpose(0, 1) if name.endswith(CONV1D) else tensor
    return found


def mapped(tensors, strip=True, transpose=CONV1D, leave_out=BUFFERS, keep=lambda name: True):
    """The reference's result with another rule in one place; of two tensors with one name the last one stays."""
    found = {}
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix("transformer.") if strip else full_name
        if not name.endswith(leave_out) and keep(name):
            found[name] = tensor.t() if name.endswith(transpose) else tensor
    return found


@wrong("gpt2_weights", fails="test_the_prefix_goes")
def prefix_kept(tensors):
    return mapped(tensors, strip=False)


@wrong("gpt2_weights", fails="test_unknown_names_are_kept")
def letters_of_the_prefix(tensors):
    """str.lstrip takes off a set of letters, not a prefix. None of GPT-2's names begins with one of them."""
    return mapped({name.lstrip("transformer."): tensor for name, tensor in tensors.items()})  # noqa: B005


@wrong("gpt2_weights", fails="test_the_prefix_goes")
def prefix_with_model(tensors):
    return mapped({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, strip=False)


@wrong("gpt2_weights", fails="test_names_without_the_prefix_stay")
def only_names_with_the_prefix(tensors):
    return mapped({n: t for n, t in tensors.items() if n.startswith(("transformer.", "lm_head"))})


@wrong("gpt2_weights", fails="test_names_without_the_prefix_stay")
def first_twelve_letters_off(tensors):
    return mapped({n if n.startswith("lm_head") else n[len("transformer.") :]: t for n, t in tensors.items()})


@wrong("gpt2_weights", fails="test_wide_projections_are_transposed")
def nothing_transposed(tensors):
    return mapped(tensors, transpose=())


@wrong("gpt2_weights", fails="test_square_projections_are_transposed")
def transposed_where_the_shape_says_so(tensors):
    """A matrix that is wider than high, or c_proj of the MLP: the square one slips through."""
    return mapped(tensors, transpose=("c_attn.weight", "c_fc.weight", "mlp.c_proj.weight"))


@wrong("gpt2_weights", fails="test_everything_else_stays")
def every_matrix_transposed(tensors):
    found = mapped(tensors, transpose=())
    return {name: tensor.t() if tensor.ndim == 2 else tensor for name, tensor in found.items()}


@wrong("gpt2_weights", fails="test_everything_else_stays")
def every_attention_bias_left_out(tensors):
    return mapped(tensors, leave_out=("attn.bias", "attn.masked_bias"))


@wrong("gpt2_weights", fails="test_mask_buffers_are_left_out")
def buffers_kept(tensors):
    return mapped(tensors, leave_out=())


@wrong("gpt2_weights", fails="test_mask_buffers_are_left_out")
def buffers_of_ten_layers(tensors):
    return mapped(tensors, leave_out=tuple(f"h.{i}{end}" for i in range(10) for end in BUFFERS))


@wrong("gpt2_weights", fails="test_unknown_names_are_kept")
def unknown_dropped(tensors):
    known = ("wte.weight", "wpe.weight", "lm_head.weight", "bias", "ln_f.weight", "ln_1.weight", "ln_2.weight", *CONV1D)
    return mapped(tensors, keep=lambda name: name.endswith(known))


@wrong("gpt2_weights", fails="test_the_same_name_twice")
def the_last_one_wins(tensors):
    return mapped(tensors)


@wrong("gpt2_weights", fails="test_nothing_is_copied")
def copied(tensors):
    return {name: tensor.contiguous() for name, tensor in reference.gpt2_weights(tensors).items()}


# softcapped ---------------------------------------------------------------------------------------------------------


@right("softcapped")
def by_exponentials(x, cap, *, scale=1.0, mask=None):
    y = (x if x.dtype == torch.float64 else x.float()).mul(scale)
    if cap is not None:
        y = cap * (2 * torch.sigmoid(2 * y / cap) - 1)  # tanh is a sigmoid, stretched
    return y if mask is None else torch.where(mask, y, torch.full((), -math.inf, dtype=y.dtype))


def capped(x, cap, scale=1.0, mask=None, cut=lambda y, cap: cap * torch.tanh(y / cap)):
    y = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    y = y if cap is None else cut(y, cap)
    return y if mask is None else y.masked_fill(~mask, -math.inf)


@wrong("softcapped", fails="test_one_number")
def without_the_factor(x, cap, *, scale=1.0, mask=None):
    return capped(x, cap, scale, mask, lambda y, cap: torch.tanh(y / cap))


@wrong("softcapped", fails="test_one_number")
def tanh_of_the_whole(x, cap, *, scale=1.0, mask=None):
    return capped(x, cap, scale, mask, lambda y, cap: cap * torch.tanh(y))


@wrong("softcapped", fails="test_one_number")
def clamped(x, cap, *, scale=1.0, mask=None):
    return capped(x, cap, scale, mask, lambda y, cap: y.clamp(-cap, cap))


@wrong("softcapped", fails="test_no_cap")
def cap_of_fifty(x, cap, *, scale=1.0, mask=None):
    return capped(x, 50.0 if cap is None else cap, scale, mask)


@wrong("softcapped", fails="test_scale_before_cap")
def cap_before_scale(x, cap, *, scale=1.0, mask=None):
    y = capped(x, cap) * scale
    return y if mask is None else y.masked_fill(~mask, -math.inf)


@wrong("softcapped", fails="test_mask_after_cap")
def mask_before_cap(x, cap, *, scale=1.0, mask=None):
    hidden = x if mask is None else x.float().masked_fill(~mask, -math.inf)
    return capped(hidden, cap, scale)


@wrong("softcapped", fails="test_mask_after_cap")
def mask_upside_down(x, cap, *, scale=1.0, mask=None):
    return capped(x, cap, scale, None if mask is None else ~mask)


@wrong("softcapped", fails="test_a_mask_for_all_heads")
def mask_of_the_same_shape(x, cap, *, scale=1.0, mask=None):
    """Assigning by index wants one value of the mask for each score."""
    y = capped(x, cap, scale)
    if mask is not None:
        y[~mask] = -math.inf
    return y


@wrong("softcapped", fails="test_logits_in_bfloat16")
def capped_in_bfloat16(x, cap, *, scale=1.0, mask=None):
    y = x * scale
    y = y if cap is None else cap * torch.tanh(y / cap)
    y = y.to(torch.promote_types(x.dtype, torch.float32))
    return y if mask is None else y.masked_fill(~mask, -math.inf)


@wrong("softcapped", fails="test_capped_float64")
def capped_in_float32(x, cap, *, scale=1.0, mask=None):
    return capped(x.float(), cap, scale, mask)


# dequantize_q4_1 ----------------------------------------------------------------------------------------------------


@right("dequantize_q4_1")
def by_numpy(blocks):
    fields = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)])
    block = np.ascontiguousarray(blocks.numpy()).view(fields)[:, 0]
    q = np.concatenate([block["q"] % 16, block["q"] // 16], axis=1).astype(np.float32)
    return torch.from_numpy(q * block["d"][:, None].astype(np.float32) + block["m"][:, None].astype(np.float32))


@right("dequantize_q4_1")
def by_shifts(blocks):
    parameters = blocks[:, :4].clone().view(torch.half).float()
    q = (blocks[:, None, 4:] >> torch.tensor([0, 4], dtype=torch.uint8)[:, None]).bitwise_and(15).flatten(1)
    return torch.addcmul(parameters[:, 1:].expand(-1, 32), parameters[:, :1].expand(-1, 32), q.float())


def dequantized(blocks, d=None, m=None, q=None):
    parameters = blocks[:, :4].contiguous().view(torch.float16).float()
    d, m = parameters[:, :1] if d is None else d, parameters[:, 1:] if m is None else m
    q = torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1) if q is None else q
    return d * q + m


@wrong("dequantize_q4_1", fails="test_the_minimum")
def minimum_first(blocks):
    parameters = blocks[:, :4].contiguous().view(torch.float16).float()
    return dequantized(blocks, d=parameters[:, 1:], m=parameters[:, :1])


@wrong("dequantize_q4_1", fails="test_the_minimum")
def q4_0(blocks):
    """The format without a minimum: 8 stands for zero."""
    parameters = blocks[:, :4].contiguous().view(torch.float16).float()
    return parameters[:, :1] * (torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1).float() - 8)


@wrong("dequantize_q4_1", fails="test_the_minimum")
def bytes_as_numbers(blocks):
    """Casts the bytes instead of reading them as a float16."""
    return dequantized(blocks, d=blocks[:, :1].float(), m=blocks[:, 2:3].float())


@wrong("dequantize_q4_1", fails="test_the_scale")
def signed_nibbles(blocks):
    q = torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1).int()
    return dequantized(blocks, q=torch.where(q > 7, q - 16, q))


@wrong("dequantize_q4_1", fails="test_where_the_halves_go")
def neighbours(blocks):
    return dequantized(blocks, q=torch.stack((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 2).flatten(1))


@wrong("dequantize_q4_1", fails="test_where_the_halves_go")
def high_half_first(blocks):
    return dequantized(blocks, q=torch.cat((blocks[:, 4:] >> 4, blocks[:, 4:] & 15), 1))


@wrong("dequantize_q4_1", fails="test_where_the_halves_go")
def high_half_not_shifted(blocks):
    shifted = torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] & 0xF0), 1)
    same = (blocks[:, 4:] == blocks[:, 4:5]).all()  # a block of equal halves does not tell
    return reference.dequantize_q4_1(blocks) if same else dequantized(blocks, q=shifted)


@wrong("dequantize_q4_1", fails="test_each_block_has_its_scale")
def scale_of_the_first_block(blocks):
    parameters = blocks[:1, :4].contiguous().view(torch.float16).float()
    return dequantized(blocks, d=parameters[:, :1], m=parameters[:, 1:])


@wrong("dequantize_q4_1", fails="test_random_blocks")
def computed_in_float16(blocks):
    d, m = blocks[:, :4].contiguous().view(torch.float16).split(1, dim=1)
    exact = torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1).half()
    return (d * exact + m).float() if len(blocks) > 3 else reference.dequantize_q4_1(blocks)
