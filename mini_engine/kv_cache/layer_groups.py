"""Layer groups: layers that share a page table, so that pages return to the pool as soon as their own layers allow it.

In a model like Gemma 2 or Gemma 3, most layers have a sliding window, and the others see all keys. With one page table
for all layers, a page stays until no layer reads it, so the windows save no memory. With a page table for each group of
layers, a page that has left a group's window is free at once, for any group (vLLM: hybrid KV cache manager).

Groups have equally many layers, so their pages have the same size and come from one pool. The cache is one stack of
tensors, as tall as a group: tensor i stores layer i of every group, and a page belongs to one group at a time. A group
with fewer layers leaves the rest of its pages empty. Explained in chapter 15.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mini_engine.attention.spec import AttentionSpec

MAX_PADDING = 1 / 6  # most memory that may stay empty, as a share of the layers; Gemma 3 27B has 70 for 62
MAX_GROUPS = 8  # each group costs host time in every step; Gemma 3 27B has 7


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share a page table.

    Attributes:
        layers: their indices in the model, in order.
        window: most keys that any of them sees; None if one of them sees all keys.
    """

    layers: tuple[int, ...]
    window: int | None


def one_group(specs: Sequence[AttentionSpec]) -> tuple[LayerGroup, ...]:
    """Return a single group of all layers, whose pages stay until the widest window has passed them."""
    windows = [spec.window for spec in specs]
    widest = None if None in windows else max(window for window in windows if window is not None)
    return (LayerGroup(tuple(range(len(specs))), widest),)


def layer_groups(specs: Sequence[AttentionSpec], max_model_len: int) -> tuple[LayerGroup, ...]:
    """Divide the layers of a model into groups: all layers that see all keys, then each kind of layer with a window.

    The first group decides how many layers a group has.

    Args:
        specs: one for each layer of the model.
        max_model_len: longest text in tokens. A wider window is none.

    Returns:
        The groups. There is only one if all layers see all keys or none do, if layers store entries of different sizes,
        or if several groups would leave too much memory empty.
    """
    full, by_window = list[int](), dict[int, list[int]]()
    for layer, spec in enumerate(specs):
        if spec.window is None or spec.window >= max_model_len:
            full.append(layer)
        else:
            by_window.setdefault(spec.window, []).append(layer)
    if not full or not by_window or len({(spec.entry, spec.kv_dtype) for spec in specs}) > 1:
        return one_group(specs)
    size = len(full)
    groups = [LayerGroup(tuple(full), None)]
    for window, layers in by_window.items():
        groups += [LayerGroup(tuple(layers[i : i + size]), window) for i in range(0, len(layers), size)]
    fits = len(groups) * size <= (1 + MAX_PADDING) * len(specs) and len(groups) <= MAX_GROUPS
    return tuple(groups) if fits else one_group(specs)


def stored_specs(specs: Sequence[AttentionSpec], groups: Sequence[LayerGroup]) -> list[AttentionSpec]:
    """Return a spec for each layer that a token takes memory for: those of the model, and the padding of groups."""
    return [specs[layer] for layer in groups[0].layers] * len(groups)
