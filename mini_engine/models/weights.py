"""The weights of a model's layers: what a checkpoint fills, their bytes, and their product with tokens.

A layer calls a `Projection` and does not know how it is stored. `Linear` holds its matrix as it is, and
`QuantizedLinear` in one of the formats of `mini_engine.quantization`. Explained in chapters 03 and 13.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor, nn

from mini_engine import ops
from mini_engine.errors import ModelLoadError
from mini_engine.models.linear import linear
from mini_engine.quantization import FP8, Format, QuantizedTensor, quantize, spread

CHUNK = 4096  # rows that are rounded at once


@runtime_checkable
class Destination(Protocol):
    """What one tensor of a checkpoint fills: a parameter, some rows of one, or `QuantizedRows`."""

    @property
    def shape(self) -> torch.Size: ...
    def copy_(self, tensor: Any, /) -> Any: ...


def empty_weight(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Create a parameter without values on the default device; `load_weights` fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Projection(nn.Module):
    """Computes `x @ weight.T + bias`. Projections of the same input are fused: each one is a block of rows.

    Attributes:
        in_features: size of the input.
        rows: for each projection, its name in the checkpoint and the size of its output.
        bias: [Out] or None.
        weight: [Out, In] the matrix, in a `Linear`.
    """

    weight: Tensor

    def __init__(self, in_features: int, rows: Mapping[str, int], bias: bool) -> None:
        super().__init__()
        self.in_features, self.rows = in_features, rows
        self.bias = empty_weight(sum(rows.values())) if bias else None

    @abstractmethod
    def __call__(self, x: Float[Tensor, "T In"]) -> Float[Tensor, "T Out"]:  # without hooks, which cost host time
        """Multiply tokens."""

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> Float[Tensor, "Out In"]:
        """Return the matrix in a dtype."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrix, its scales, and the biases: what one step reads."""
        return sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))

    @abstractmethod
    def destinations(self) -> dict[str, Destination]:
        """Map the checkpoint name of each tensor to what it fills."""

    def prepare(self, dtype: torch.dtype) -> None:
        """Change the form of the weights for the kernels of their device, once, after loading.

        Args:
            dtype: the model's.
        """


class Linear(Projection):
    """A projection whose matrix is stored as it is.

    Args:
        in_features: see `Projection`.
        rows: the same.
        bias: whether there are biases.
        weight: [Out, In] a matrix that is used elsewhere, too; default a new one.
    """

    def __init__(
        self, in_features: int, rows: Mapping[str, int], bias: bool = False, weight: nn.Parameter | None = None
    ) -> None:
        super().__init__(in_features, rows, bias)
        self.weight = empty_weight(sum(rows.values()), in_features) if weight is None else weight

    def __call__(self, x: Float[Tensor, "T In"]) -> Float[Tensor, "T Out"]:
        return linear(x, self.weight, self.bias)

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "Out In"]:
        return self.weight.to(dtype)

    def destinations(self) -> dict[str, Destination]:
        return {
            f"{name}.{kind}": rows
            for kind, tensor in self.named_parameters()
            for name, rows in zip(self.rows, tensor.split(list(self.rows.values())), strict=True)
        }


class QuantizedLinear(Projection):
    """A projection whose matrix is quantized, with scales (and offsets) for each row or for groups of columns of a row.

    A format with larger tiles repeats the scale of a tile for each of its rows. INT4 numbers are stored in pairs: the
    byte of columns 2k and 2k + 1 has the first in its lower four bits, and 8 is added to both.

    Attributes:
        format: the format of the matrix.
        numbers: [Out, In] float8_e4m3fn or int8, or [Out, In / 2] uint8 for INT4.
        scale: [Out, groups]; one group unless the format has several along a row.
        offset: like `scale`, or None.
        order: [In] see `QuantizedTensor.order`; None if columns have their own order.
        kernel: multiplies tokens; None before `prepare`, and where there is none.
    """

    def __init__(self, in_features: int, rows: Mapping[str, int], form: Format, bias: bool = False) -> None:
        super().__init__(in_features, rows, bias)
        num_rows, groups = sum(rows.values()), form.tiles(1, in_features)[1]
        if form.kind == "int4" and in_features % 2:
            raise ModelLoadError(f"{', '.join(rows)} has {in_features} columns, but INT4 stores pairs: use INT8 or FP8")
        self.format = form
        self.kernel: QuantizedKernel | None = None
        self.order: Tensor | None = None
        # A scale for a whole row costs nothing. Those of groups do, so they have 16 bits if the model has.
        model_dtype = torch.get_default_dtype()
        dtype = model_dtype if groups > 1 and model_dtype.itemsize == 2 else torch.float32
        number = {"fp8": FP8, "int8": torch.int8, "int4": torch.uint8}[form.kind]
        self.numbers = nn.Buffer(torch.empty(num_rows, in_features * form.bits // 8, dtype=number))
        self.scale = nn.Buffer(torch.empty(num_rows, groups, dtype=dtype))
        self.offset = nn.Buffer(torch.empty(num_rows, groups, dtype=dtype)) if form.has_offsets else None

    def __call__(self, x: Float[Tensor, "T In"]) -> Float[Tensor, "T Out"]:
        x = x if self.order is None else x[:, self.order]
        if self.kernel is not None and self.kernel.accepts(x):
            out = self.kernel(x)
            return out if self.bias is None else out + self.bias
        return linear(x, self._in_order(x.dtype), self.bias)

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "Out In"]:
        matrix = self._in_order(dtype)
        return matrix if self.order is None else torch.empty_like(matrix).index_copy_(1, self.order, matrix)

    def destinations(self) -> dict[str, Destination]:
        ends = list(accumulate(self.rows.values(), initial=0))
        found: dict[str, Destination] = {}
        for name, first, last in zip(self.rows, ends, ends[1:], strict=False):
            found[f"{name}.weight"] = QuantizedRows(self, first, last)
            if self.bias is not None:
                found[f"{name}.bias"] = self.bias[first:last]
        return found

    def prepare(self, dtype: torch.dtype) -> None:
        self.kernel = ops.quantized_kernel(self, dtype)

    @property
    def num_numbers(self) -> int:
        """Numbers of the matrix."""
        return sum(self.rows.values()) * self.in_features

    def quantized(self) -> QuantizedTensor:
        """Return the matrix in the common form, with a scale for each row."""
        form = Format(self.format.kind, 1, self.format.columns, self.format.has_offsets)
        numbers = unpack(self.numbers) if self.format.kind == "int4" else self.numbers
        offset = None if self.offset is None else self.offset.float()
        return QuantizedTensor(form, numbers, self.scale.float(), offset, self.order)

    def _in_order(self, dtype: torch.dtype) -> Float[Tensor, "Out In"]:
        """The matrix, its columns in the order in which they are stored."""
        if self.kernel is not None:
            return self.kernel.dense(dtype)
        own = self.quantized()
        return QuantizedTensor(own.format, own.q, own.scale, own.offset).dequantize(dtype)


class QuantizedKernel(Protocol):
    """Multiplies tokens by a loaded `QuantizedLinear`. It may have changed how the matrix is stored."""

    def accepts(self, x: Tensor) -> bool:
        """Return whether the kernel multiplies these tokens; if not, a dense copy of the matrix does."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute `x @ weight.T`; columns are in the order in which they are stored."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix, columns in that order."""


class QuantizedRows:
    """The rows of a `QuantizedLinear` that one matrix of a checkpoint fills.

    Attributes:
        linear: the projection.
        rows: its rows.
        shape: shape of the matrix.
    """

    def __init__(self, linear: QuantizedLinear, first: int, last: int) -> None:
        self.linear, self.rows = linear, slice(first, last)
        self.shape = torch.Size((last - first, linear.in_features))

    def copy_(self, matrix: Float[Tensor, "R In"] | QuantizedTensor) -> None:
        """Store a matrix. One that is not quantized yet is rounded to nearest.

        Raises:
            ModelLoadError: if the columns of fused projections have different orders.
        """
        to, form = self.linear, self.linear.format
        if isinstance(matrix, QuantizedTensor):
            assert matrix.format == form, "the projection was built for the format of its tensors"
            self._store(matrix, self.rows.start)
            return
        # A few rows at a time, because rounding needs several copies; a tile without end needs them all.
        at_once = max(1, CHUNK // form.rows) * form.rows if form.rows else len(matrix)
        for first, rows in zip(range(self.rows.start, self.rows.stop, at_once), matrix.split(at_once), strict=True):
            self._store(quantize(rows.to(to.scale.device), form, to.scale.dtype), first)

    def _store(self, matrix: QuantizedTensor, first: int) -> None:
        to, form, device = self.linear, self.linear.format, self.linear.scale.device
        order = None if matrix.order is None else matrix.order.to(device)
        if first == 0:
            to.order = order
        elif not _same(order, to.order):
            raise ModelLoadError(
                f"{', '.join(to.rows)} have their columns in different orders, so one product cannot compute them: "
                "use a checkpoint that was quantized without desc_act"
            )
        rows = slice(first, first + len(matrix.q))
        to.numbers[rows] = pack(matrix.q.to(device)) if form.kind == "int4" else matrix.q.to(device)
        to.scale[rows] = _of_each_row(matrix.scale.to(device), form, len(matrix.q))
        if to.offset is not None:
            assert matrix.offset is not None
            to.offset[rows] = _of_each_row(matrix.offset.to(device), form, len(matrix.q))


class Concatenated(Projection):
    """Projections of the same input that cannot be one matrix, because their formats differ.

    Args:
        parts: each has some of the rows, in order.
    """

    def __init__(self, parts: Sequence[Projection]) -> None:
        rows = {name: size for part in parts for name, size in part.rows.items()}
        super().__init__(parts[0].in_features, rows, bias=False)  # the parts have the biases
        for part in parts:
            self.add_module("_".join(part.rows).replace(".", "_"), part)
        self._parts = tuple(parts)

    def __call__(self, x: Float[Tensor, "T In"]) -> Float[Tensor, "T Out"]:
        return torch.cat([part(x) for part in self._parts], dim=1)

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "Out In"]:
        return torch.cat([part.dense(dtype) for part in self._parts])

    def destinations(self) -> dict[str, Destination]:
        return {name: filled for part in self._parts for name, filled in part.destinations().items()}


def projection(
    formats: Mapping[str, Format], prefix: str, in_features: int, rows: Mapping[str, int], bias: bool = False
) -> Projection:
    """Build a projection without values.

    Args:
        formats: the formats of quantized matrices, by name; the others are stored as they are.
        prefix: what precedes the names of `rows` in `formats`.
        in_features: size of the input.
        rows: for each fused projection, its name and the size of its output.
        bias: whether they have biases.
    """
    parts: list[Projection] = []
    for form, names in groupby(rows, key=lambda name: formats.get(prefix + name)):
        own = {name: rows[name] for name in names}
        parts.append(QuantizedLinear(in_features, own, form, bias) if form else Linear(in_features, own, bias))
    return parts[0] if len(parts) == 1 else Concatenated(parts)


def pack(q: Int8[Tensor, "R C"]) -> UInt8[Tensor, "R half"]:
    """Store pairs of neighboring columns in a byte: the first in the lower four bits, and 8 is added to both."""
    low, high = (q[:, first::2].to(torch.int16) + 8 for first in (0, 1))
    return (low | high << 4).to(torch.uint8)


def unpack(packed: UInt8[Tensor, "R half"]) -> Int8[Tensor, "R C"]:
    """Invert `pack`."""
    pairs = torch.stack((packed & 15, packed >> 4), dim=2)
    return pairs.to(torch.int8).sub_(8).flatten(1)


def _of_each_row(tiles: Float[Tensor, "TR TC"], form: Format, num_rows: int) -> Float[Tensor, "R TC"]:
    return spread(tiles, Format(form.kind, form.rows, 1), torch.Size((num_rows, tiles.shape[1])))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
