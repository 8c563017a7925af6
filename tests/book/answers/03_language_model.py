"""Right and wrong answers to the homework of chapter 03, with the check that must be the first to find each mistake."""

from dataclasses import replace

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
    """Subtracts the mean as well."""
    return F.layer_norm(x.to(weight.dtype), weight.shape, weight, None, eps).to(x.dtype)


@wrong("rms_norm", fails="test_a_row_whose_rms_is_three")
def without_the_root(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps) * weight


@wrong("rms_norm", fails="test_norm_weight")
def weight_of_gemma(x, weight, eps):
    """(1 + w), except for a weight of ones, where the first check would notice."""
    return reference.rms_norm(x, torch.where(weight == 1, weight, 1 + weight), eps)


@wrong("rms_norm", fails="test_each_row_is_normalized_alone")
def one_norm_for_all_rows(x, weight, eps):
    wide = x.float()
    return (wide / torch.sqrt(wide.square().mean() + eps) * weight).to(x.dtype)


@wrong("rms_norm", fails="test_eps_is_inside_the_root")
def eps_beside_the_root(x, weight, eps):
    wide = x.float()
    return (wide / (wide.square().mean(-1, keepdim=True).sqrt() + eps) * weight).to(x.dtype)


@wrong("rms_norm", fails="test_eps_is_inside_the_root")
def eps_of_llama(x, weight, eps):
    return reference.rms_norm(x, weight, 1e-5)


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


@wrong("rms_norm", fails="test_large_float16_numbers")
def left_in_float32(x, weight, eps):
    """Right, but the result is not converted back."""
    return reference.rms_norm(x.float() if x.dtype != torch.float64 else x, weight, eps)


@wrong("rms_norm", fails="test_a_weight_wider_than_x")
def narrow_weight(x, weight, eps):
    return reference.rms_norm(x, weight.to(x.dtype), eps)


@wrong("rms_norm", fails="test_a_float64_weight")
def always_in_float32(x, weight, eps):
    return reference.rms_norm(x.float(), weight.float(), eps).to(x.dtype)


@wrong("rms_norm", fails="test_norm_of_float64_stays_float64")
def norm_in_float32(x, weight, eps):
    return reference.rms_norm(x.float() if x.dtype == torch.float64 else x, weight, eps).to(x.dtype)


@wrong("rms_norm", fails="test_norm_leaves_its_input")
def norm_in_place(x, weight, eps):
    return x.copy_(reference.rms_norm(x, weight, eps))


# qk_norm ------------------------------------------------------------------------------------------------------------


@right("qk_norm")
def one_weight_per_head(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    num_kv_heads = q_and_k.shape[1] - num_qo_heads
    weights = torch.cat((q_weight.expand(num_qo_heads, -1), k_weight.expand(num_kv_heads, -1)))
    normalized = reference.rms_norm(q_and_k.float(), torch.ones(len(q_weight)), eps)
    return (normalized * weights).to(q_and_k.dtype)


@wrong("qk_norm", fails="test_one_head_of_each")
def unit_length(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    """Cosine attention: heads of length 1, not of a root mean square of 1."""
    q, k = F.normalize(q_and_k, dim=-1).split((num_qo_heads, q_and_k.shape[1] - num_qo_heads), dim=1)
    return torch.cat((q * q_weight, k * k_weight), dim=1)


@wrong("qk_norm", fails="test_one_head_of_each")
def queries_only(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    q, k = q_and_k[:, :num_qo_heads], q_and_k[:, num_qo_heads:]
    return torch.cat((reference.rms_norm(q, q_weight, eps), k), dim=1)


@wrong("qk_norm", fails="test_each_head_is_normalized_alone")
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


@wrong("qk_norm", fails="test_eps_of_qk_norm")
def eps_of_qwen3(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    return reference.qk_norm(q_and_k, q_weight, k_weight, num_qo_heads, 1e-6)


@wrong("qk_norm", fails="test_qk_norm_of_bfloat16_is_rounded_once")
def rounded_before_the_weights(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    normalized = reference.rms_norm(q_and_k, torch.ones_like(q_weight), eps)
    return torch.cat((normalized[:, :num_qo_heads] * q_weight, normalized[:, num_qo_heads:] * k_weight), dim=1)


@wrong("qk_norm", fails="test_qk_norm_of_bfloat16_is_rounded_once")
def weights_in_the_dtype_of_the_heads(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    weights = q_weight.to(q_and_k.dtype), k_weight.to(q_and_k.dtype)
    return reference.qk_norm(q_and_k, *weights, num_qo_heads, eps)


@wrong("qk_norm", fails="test_qk_norm_leaves_its_input")
def heads_in_place(q_and_k, q_weight, k_weight, num_qo_heads, eps):
    return q_and_k.copy_(reference.qk_norm(q_and_k, q_weight, k_weight, num_qo_heads, eps))


# gated_mlp ----------------------------------------------------------------------------------------------------------


@right("gated_mlp")
def half_by_half(x, gate_up, down, activation):
    both = gate_up(x)
    inner = both.shape[1] // 2
    return down(both[:, inner:] * activation(both[:, :inner]))


@right("gated_mlp")
def viewed_as_two(x, gate_up, down, activation):
    gate, up = gate_up(x).unflatten(1, (2, -1)).unbind(1)
    return down(activation(gate).mul(up))


@wrong("gated_mlp", fails="test_one_inner_number")
def added_instead_of_multiplied(x, gate_up, down, activation):
    gate, up = gate_up(x).chunk(2, dim=-1)
    return down(activation(gate) + up)


@wrong("gated_mlp", fails="test_one_inner_number")
def without_up(x, gate_up, down, activation):
    gate, _ = gate_up(x).chunk(2, dim=-1)
    return down(activation(gate))


@wrong("gated_mlp", fails="test_the_activation_is_on_the_gate")
def activation_on_up(x, gate_up, down, activation):
    gate, up = gate_up(x).chunk(2, dim=-1)
    return down(gate * activation(up))


@wrong("gated_mlp", fails="test_one_inner_number")
def activation_on_both(x, gate_up, down, activation):
    gate, up = gate_up(x).chunk(2, dim=-1)
    return down(activation(gate * up))


@wrong("gated_mlp", fails="test_gate_and_up_are_two_halves")
def alternating_rows(x, gate_up, down, activation):
    both = gate_up(x)
    return down(activation(both[:, 0::2]) * both[:, 1::2])


@wrong("gated_mlp", fails="test_swiglu_and_geglu")
def always_silu(x, gate_up, down, activation):
    return reference.gated_mlp(x, gate_up, down, F.silu)


@wrong("gated_mlp", fails="test_mlp_dtypes")
def mlp_in_another_dtype(x, gate_up, down, activation):
    return reference.gated_mlp(x, gate_up, down, activation).double()


@wrong("gated_mlp", fails="test_mlp_dtypes")
def always_float32(x, gate_up, down, activation):
    return reference.gated_mlp(x, gate_up, down, activation).float()


# decoder_layer ------------------------------------------------------------------------------------------------------


def qk_normalized(q, k, weights, eps, **change):
    if change.get("no_qk_norm"):
        return q, k
    k_weight = weights.q_norm if change.get("one_weight") else weights.k_norm
    return reference.rms_norm(q, weights.q_norm, eps), reference.rms_norm(k, k_weight, eps)


def decoder(x, weights, cos, sin, spec, attend, eps, **change):
    """The reference with one thing changed, from which most of the wrong answers below are made."""
    normed = x if change.get("no_norm") else reference.rms_norm(x, weights.input_norm, eps)
    heads = weights.qkv(normed)
    sizes = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = heads.unflatten(1, (-1, spec.head_dim)).split(sizes, dim=1)
    if change.get("group_by_group") and spec.num_qo_heads != spec.num_kv_heads:
        grouped = heads.unflatten(1, (spec.num_kv_heads, -1, spec.head_dim))
        q, k, v = grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]
    if weights.q_norm is not None and not change.get("norm_after_rotation"):
        q, k = qk_normalized(q, k, weights, eps, **change)
    if not change.get("no_rotation"):
        q, k = (apply_rope(each, cos, sin, interleaved=change.get("interleaved", False)) for each in (q, k))
    if weights.q_norm is not None and change.get("norm_after_rotation"):
        q, k = qk_normalized(q, k, weights, eps)
    v = apply_rope(v, cos, sin) if change.get("values_too") else v
    out = weights.o(attend(change.get("layer", spec.layer), q, k, v).flatten(1))
    x = out if change.get("no_residual") else x + out
    read = change.get("mlp_reads", x)
    normed = reference.rms_norm(read, weights.input_norm if change.get("one_norm") else weights.mlp_norm, eps)
    x = normed if change.get("norm_is_kept") else x
    return x + reference.gated_mlp(normed, weights.gate_up, weights.down, change.get("activation", F.silu))


@right("decoder_layer")
def split_before_heads(x, weights, cos, sin, spec, attend, eps):
    rows = torch.tensor((spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)) * spec.head_dim
    projected = weights.qkv(reference.rms_norm(x, weights.input_norm, eps)).split(rows.tolist(), dim=1)
    q, k, v = (own.reshape(len(x), -1, spec.head_dim) for own in projected)
    if weights.q_norm is not None:
        q, k = F.rms_norm(q, q.shape[2:], weights.q_norm, eps), F.rms_norm(k, k.shape[2:], weights.k_norm, eps)
    q, k = (apply_rope(torch.cat((q, k), 1), cos, sin)).split((spec.num_qo_heads, spec.num_kv_heads), 1)
    attended = x + weights.o(attend(spec.layer, q, k, v).reshape(len(x), -1))
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


@wrong("decoder_layer", fails="test_the_head_size")
def heads_that_share_the_hidden_size(x, weights, cos, sin, spec, attend, eps):
    size = x.shape[-1] // spec.num_qo_heads
    return decoder(x, weights, cos, sin, replace(spec, head_dim=size), attend, eps)


@wrong("decoder_layer", fails="test_attend_scales")
def queries_scaled(x, weights, cos, sin, spec, attend, eps):
    def scaled(layer, q, k, v):
        return attend(layer, q * spec.scale, k, v)

    return decoder(x, weights, cos, sin, spec, scaled, eps)


@wrong("decoder_layer", fails="test_rotation")
def rotated_interleaved(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, interleaved=True)


@wrong("decoder_layer", fails="test_rotation")
def not_rotated(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, no_rotation=True)


@wrong("decoder_layer", fails="test_qk_norm_in_the_layer")
def without_qk_norm(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, no_qk_norm=True)


@wrong("decoder_layer", fails="test_qk_norm_in_the_layer")
def keys_with_the_weight_of_queries(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, one_weight=True)


@wrong("decoder_layer", fails="test_qk_norm_comes_before_the_rotation")
def rotated_before_qk_norm(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, eps, norm_after_rotation=True)


@wrong("decoder_layer", fails="test_eps_of_the_layer")
def eps_of_smollm2(x, weights, cos, sin, spec, attend, eps):
    return decoder(x, weights, cos, sin, spec, attend, 1e-5)


@wrong("decoder_layer", fails="test_attend_is_called_once")
def attention_head_by_head(x, weights, cos, sin, spec, attend, eps):
    """Calls `attend` a second time and ignores what it returns."""
    shape = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
    normed = reference.rms_norm(x, weights.input_norm, eps)
    q, k, v = weights.qkv(normed).unflatten(1, (-1, spec.head_dim)).split(shape, dim=1)
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


# load_weights -------------------------------------------------------------------------------------------------------


@right("load_weights")
def headers_first(destinations, tensors):
    wanted = {name: tuple(place.shape) for name, place in destinations.items()}
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in [*wanted, *given]:
        if wanted.get(name) != given.get(name):
            raise ModelLoadError(f"{name}: the checkpoint has {given.get(name)}, the model {wanted.get(name)}")
    for name, tensor in tensors.items():
        destinations[name][...] = tensor


@right("load_weights")
def by_stages(destinations, tensors):
    if missing := [name for name in destinations if name not in tensors]:
        raise ModelLoadError(f"{missing} missing")
    if unknown := [name for name in tensors if name not in destinations]:
        raise ModelLoadError(f"{unknown} unknown")
    if wrong := [name for name in tensors if tensors[name].size() != destinations[name].size()]:
        raise ModelLoadError(f"{wrong} have other shapes")
    torch._foreach_copy_(list(destinations.values()), [tensors[name] for name in destinations])


def loaded(
    destinations, tensors, missing=True, unknown=True, shape=torch.Tensor.size, fit=lambda tensor, place: tensor
):
    """The reference with one check changed."""
    for name in destinations.keys() - tensors.keys() if missing else ():
        raise ModelLoadError(f"{name} is missing")
    for name in tensors.keys() - destinations.keys() if unknown else ():
        raise ModelLoadError(f"{name} is unknown")
    both = destinations.keys() & tensors.keys()
    for name in both:
        if shape(tensors[name]) != shape(destinations[name]):
            raise ModelLoadError(f"{name} has another shape")
    for name in both:
        destinations[name].copy_(fit(tensors[name], destinations[name]))


@wrong("load_weights", fails="test_every_tensor_is_copied")
def names_bound_again(destinations, tensors):
    """Puts the tensors into a dictionary of its own; the model never sees them."""
    loaded({name: place.clone() for name, place in destinations.items()}, tensors)


@wrong("load_weights", fails="test_every_tensor_is_copied")
def data_replaced(destinations, tensors):
    """Gives each destination new memory, so that rows of a fused weight are no longer a part of it."""
    reference.load_weights({name: place.clone() for name, place in destinations.items()}, tensors)
    for name, place in destinations.items():
        place.data = tensors[name].to(place.dtype)


@wrong("load_weights", fails="test_values_are_converted")
def dtypes_must_agree(destinations, tensors):
    if odd := [
        name for name in destinations.keys() & tensors.keys() if destinations[name].dtype != tensors[name].dtype
    ]:
        raise ModelLoadError(f"{odd} have another dtype")
    reference.load_weights(destinations, tensors)


@wrong("load_weights", fails="test_a_missing_tensor")
def strict_is_false(destinations, tensors):
    loaded(destinations, tensors, missing=False, unknown=False)


@wrong("load_weights", fails="test_a_missing_tensor")
def copied_while_checking(destinations, tensors):
    for name, place in destinations.items():
        if name not in tensors or tensors[name].shape != place.shape:
            raise ModelLoadError(f"{name} is missing, or has another shape")
        place.copy_(tensors[name])
    if unknown := tensors.keys() - destinations.keys():
        raise ModelLoadError(f"{unknown} unknown")


@wrong("load_weights", fails="test_an_unknown_tensor")
def unknown_ones_ignored(destinations, tensors):
    loaded(destinations, tensors, unknown=False)


@wrong("load_weights", fails="test_a_wrong_shape")
def left_to_torch(destinations, tensors):
    """copy_ does raise for some shapes, but a RuntimeError, and after other tensors were copied."""
    loaded(destinations, tensors, shape=lambda tensor: None)


@wrong("load_weights", fails="test_a_shape_that_could_be_made_to_fit")
def as_many_numbers(destinations, tensors):
    loaded(destinations, tensors, shape=torch.Tensor.numel, fit=lambda tensor, place: tensor.reshape(place.shape))


@wrong("load_weights", fails="test_a_shape_that_could_be_made_to_fit")
def where_broadcasting_works(destinations, tensors):
    for name in destinations.keys() & tensors.keys():
        try:
            torch.broadcast_to(tensors[name], destinations[name].shape)
        except RuntimeError as error:
            raise ModelLoadError(f"{name} has another shape") from error
    loaded(destinations, tensors, shape=lambda tensor: None)


@wrong("load_weights", fails="test_the_checkpoint_is_unchanged")
def popped_from_the_checkpoint(destinations, tensors):
    reference.load_weights(destinations, tensors)
    for name in destinations:
        tensors.pop(name)


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


@wrong("gpt2_weights", fails="test_no_weight_or_bias_is_lost")
def every_attention_bias_left_out(tensors):
    return mapped(tensors, leave_out=("attn.bias", "attn.masked_bias"))


@wrong("gpt2_weights", fails="test_mask_buffers_are_left_out")
def buffers_kept(tensors):
    return mapped(tensors, leave_out=())


@wrong("gpt2_weights", fails="test_mask_buffers_are_left_out")
def buffers_of_ten_layers(tensors):
    return mapped(tensors, leave_out=tuple(f"h.{i}{end}" for i in range(10) for end in BUFFERS))


@wrong("gpt2_weights", fails="test_the_callers_dictionary_stays")
def buffers_popped(tensors):
    for name in [name for name in tensors if name.endswith(BUFFERS)]:
        tensors.pop(name)
    return reference.gpt2_weights(tensors)


@wrong("gpt2_weights", fails="test_unknown_names_are_kept")
def buffers_told_by_their_shape(tensors):
    return reference.gpt2_weights({name: tensor for name, tensor in tensors.items() if tensor.ndim not in (0, 4)})


@wrong("gpt2_weights", fails="test_unknown_names_are_kept")
def unknown_dropped(tensors):
    known = ("wte.weight", "wpe.weight", "lm_head.weight", "bias", "ln_f.weight", "ln_1.weight", "ln_2.weight", *CONV1D)
    return mapped(tensors, keep=lambda name: name.endswith(known))


@wrong("gpt2_weights", fails="test_unknown_names_are_kept")
def prefix_anywhere(tensors):
    return reference.gpt2_weights({name.replace("transformer.", ""): tensor for name, tensor in tensors.items()})


@wrong("gpt2_weights", fails="test_unknown_names_are_kept")
def every_projection_called_so(tensors):
    """By the last part of the name alone, which cross-attention has as well."""
    return mapped(tensors, transpose=("c_attn.weight", "c_proj.weight", "c_fc.weight"))


@wrong("gpt2_weights", fails="test_the_same_name_twice")
def buffers_counted_as_names(tensors):
    names = [name.removeprefix("transformer.") for name in tensors]
    if len(set(names)) < len(names):
        raise ModelLoadError("two tensors have the same name")
    return reference.gpt2_weights(tensors)


@wrong("gpt2_weights", fails="test_the_same_name_twice")
def the_last_one_wins(tensors):
    return mapped(tensors)


@wrong("gpt2_weights", fails="test_the_same_name_twice")
def equal_tensors_may_share_a_name(tensors):
    found = {}
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix("transformer.")
        if name in found and not name.endswith(BUFFERS) and not torch.equal(found[name], tensor):
            raise ModelLoadError(name)
        found[name] = tensor
    return reference.gpt2_weights(found)


@wrong("gpt2_weights", fails="test_nothing_is_copied")
def copied(tensors):
    return {name: tensor.contiguous() for name, tensor in reference.gpt2_weights(tensors).items()}


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
    """Converts each byte to a number instead of reading two as a float16."""
    return dequantized(blocks, d=blocks[:, :1].float(), m=blocks[:, 2:3].float())


@wrong("dequantize_q4_1", fails="test_the_scale")
def signed_nibbles(blocks):
    q = torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1).int()
    return dequantized(blocks, q=torch.where(q > 7, q - 16, q))


@wrong("dequantize_q4_1", fails="test_where_the_halves_go")
def adjacent_elements(blocks):
    return dequantized(blocks, q=torch.stack((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 2).flatten(1))


@wrong("dequantize_q4_1", fails="test_where_the_halves_go")
def high_half_first(blocks):
    return dequantized(blocks, q=torch.cat((blocks[:, 4:] >> 4, blocks[:, 4:] & 15), 1))


@wrong("dequantize_q4_1", fails="test_where_the_halves_go")
def high_half_not_shifted(blocks):
    shifted = torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] & 0xF0), 1)
    same = (blocks[:, 4:] == blocks[:, 4:5]).all()  # equal bytes pass the check before
    return reference.dequantize_q4_1(blocks) if same else dequantized(blocks, q=shifted)


@wrong("dequantize_q4_1", fails="test_without_a_loop")
def block_by_block(blocks):
    return torch.cat([reference.dequantize_q4_1(block[None]) for block in blocks])


@wrong("dequantize_q4_1", fails="test_each_block_has_its_scale")
def scale_of_the_first_block(blocks):
    parameters = blocks[:1, :4].contiguous().view(torch.float16).float()
    return dequantized(blocks, d=parameters[:, :1], m=parameters[:, 1:])


@wrong("dequantize_q4_1", fails="test_random_blocks")
def minimum_never_negative(blocks):
    """Right as long as a minimum of a random block is above zero, or the block is one of a few."""
    numbers = blocks[:, :4].contiguous().view(torch.float16).float()
    return dequantized(blocks, m=numbers[:, 1:].abs()) if len(blocks) > 3 else dequantized(blocks)


@wrong("dequantize_q4_1", fails="test_computed_in_float32")
def computed_in_float16(blocks):
    d, m = blocks[:, :4].contiguous().view(torch.float16).split(1, dim=1)
    return d * torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1) + m


@wrong("dequantize_q4_1", fails="test_computed_in_float32")
def rounded_to_bfloat16(blocks):
    d, m = blocks[:, :4].contiguous().view(torch.float16).bfloat16().split(1, dim=1)
    return (d * torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1) + m).float()


@wrong("dequantize_q4_1", fails="test_computed_in_float32")
def returned_in_float64(blocks):
    """Right, but wider than asked for."""
    return reference.dequantize_q4_1(blocks).double()
