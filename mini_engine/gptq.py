"""GPTQ (Frantar et al. 2022): round a matrix so that its products with real tokens change least.

Rounding to nearest treats every number alike. But what matters is the error of `x @ W.T`, and the columns of W that
meet large entries of x matter most. GPTQ rounds one column after another, and after each one changes the columns that
are not rounded yet, so that they make up for its error as well as they can on tokens of a calibration text.

For one row w, the squared error over the tokens is (w - q) H (w - q)^T with H = X^T X. Let U be the upper Cholesky
factor of the inverse of H. If column i is rounded with the error e, then the best change of the later columns is
-e / U[i, i] * U[i, later] (section 3.3 of the paper). A column that is rounded early has the most others to make up for
it, so the largest entries of tokens should come first. This version keeps the model's order. Explained in chapter 13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mini_engine.attention.spec import Attend
from mini_engine.models.llama import LlamaForCausalLM
from mini_engine.models.weights import Linear, QuantizedLinear
from mini_engine.quantization import Format, QuantizedTensor, quantize

DAMPING = 0.01  # of the mean of H's diagonal, added to it: a direction that no token has would have no inverse
BLOCK = 64  # columns that are updated at once after they have been rounded


def gptq(
    matrix: Float[Tensor, "Out In"], hessian: Float[Tensor, "In In"], form: Format, scale_dtype: torch.dtype
) -> QuantizedTensor:
    """Round a matrix column by column.

    The scales of a group of columns are set when its first column is reached, from the numbers as they have become.

    Args:
        matrix: the weight.
        hessian: the sum of x x^T over the calibration tokens.
        form: a format with tiles of one row.
        scale_dtype: see `quantize`.
    """
    assert form.rows == 1, "a tile of several rows would be rounded before all its numbers are known"
    columns = matrix.shape[1]
    group = form.columns or columns
    left, h = matrix.to(torch.float32).clone(), hessian.to(torch.float32).clone()
    h += DAMPING * h.diagonal().mean() * torch.eye(columns, device=h.device)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    q, parts = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device), []
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        errors = torch.empty(len(left), last - first, device=left.device)
        for i in range(first, last):
            if i % group == 0:
                parts.append(quantize(left[:, i : i + group], replace(form, columns=None), scale_dtype))
            scale, offset = parts[-1].scale[:, 0], 0.0 if parts[-1].offset is None else parts[-1].offset[:, 0]
            low, high = _range(form)
            q[:, i] = ((left[:, i] - offset) / scale).round().clamp(low, high)
            errors[:, i - first] = (left[:, i] - (q[:, i] * scale + offset)) / upper[i, i]
            left[:, i + 1 : last] -= torch.outer(errors[:, i - first], upper[i, i + 1 : last])
        left[:, last:] -= errors @ upper[first:last, last:]
    scale = torch.cat([part.scale for part in parts], dim=1)
    offsets = [part.offset for part in parts if part.offset is not None]
    return QuantizedTensor(form, q, scale, torch.cat(offsets, dim=1) if offsets else None)


def _range(form: Format) -> tuple[int, int]:
    half = 2 ** (form.bits - 1)
    return (-half, half - 1) if form.has_offsets else (1 - half, half - 1)


class _Recorder(nn.Module):
    """Stands in for a projection and adds up x x^T of the tokens that it gets."""

    def __init__(self, projection: Linear) -> None:
        super().__init__()
        self.projection = projection
        self.hessian = torch.zeros(projection.in_features, projection.in_features)

    def __call__(self, x: Float[Tensor, "T In"]) -> Float[Tensor, "T Out"]:
        wide = x.to(torch.float32)
        self.hessian += (wide.T @ wide).to(self.hessian.device)
        return self.projection(x)


@torch.no_grad()
def quantize_layers(
    model: LlamaForCausalLM, sequences: Int[Tensor, "S L"], form_of: Callable[[int], Format], attend: Attend
) -> None:
    """Replace the projections of every layer by quantized ones, calibrated on a text.

    A layer gets the tokens that the quantized layers before it compute, so it can make up for their errors, too.

    Args:
        model: a loaded model whose projections are all `Linear`, on a CPU.
        sequences: the calibration text.
        form_of: the format of a matrix with this number of columns.
        attend: attention within these sequences, laid end to end.
    """
    positions = torch.arange(sequences.shape[1]).repeat(len(sequences))
    x = model.embed(sequences.flatten())
    for layer, (cos, sin) in zip(model.layers, model.rotations(positions), strict=True):
        owners = [(layer.attention, "qkv"), (layer.attention, "o"), (layer.mlp, "gate_up"), (layer.mlp, "down")]
        for owner, name in owners:
            setattr(owner, name, _Recorder(getattr(owner, name)))
        layer(x, cos, sin, attend)
        for owner, name in owners:
            recorder: _Recorder = getattr(owner, name)
            form = form_of(recorder.projection.in_features)
            setattr(owner, name, _quantized(recorder.projection, recorder.hessian, form))
        x = layer(x, cos, sin, attend)


def _quantized(dense: Linear, hessian: Tensor, form: Format) -> QuantizedLinear:
    made = QuantizedLinear(dense.in_features, dense.rows, form, dense.bias is not None)
    if dense.bias is not None and made.bias is not None:
        made.bias.copy_(dense.bias)
    first = 0
    stored = gptq(dense.weight, hessian, form, made.scale.dtype)
    for name, size in dense.rows.items():
        rows = slice(first, first + size)
        offset = None if stored.offset is None else stored.offset[rows]
        own = QuantizedTensor(form, stored.q[rows], stored.scale[rows], offset)
        made.destinations()[f"{name}.weight"].copy_(own)
        first += size
    made.prepare(dense.weight.dtype)
    return made
