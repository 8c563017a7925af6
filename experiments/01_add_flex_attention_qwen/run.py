"""FlexAttention in transformers' Qwen3, registered under a name: equal logits, then times beside eager and SDPA.

    python experiments/01_add_flex_attention_qwen/run.py [--device cpu|cuda] [--out DIR]
    python experiments/01_add_flex_attention_qwen/run.py --predict

On a GPU the model is Qwen3-0.6B's shape in bfloat16, on a CPU two small layers in float32; weights are random. The
result goes to experiments/01_add_flex_attention_qwen/results/<device>.json, below DIR where one is given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch._dynamo.config
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from book import figures, results, timing
from book.experiment import command_line, in_rounds, predicted, record
from book.units import quantity
from mini_engine.attention.masks import MaskMod
from mini_engine.roofline import (
    Cost,
    Machine,
    ModelShape,
    attention_cost,
    decoder_layer_costs,
    linear_cost,
    model_step_cost,
)

EXPERIMENT = "01_add_flex_attention_qwen"
FLEX, UNMASKED = "our_flex", "our_flex_without_mask"
ATTENTIONS = {"eager": "eager", "SDPA": "sdpa", "flex": FLEX}  # name in the results: name in transformers
MASKS = ("causal", "sliding window", "documents")
ROUNDS, RUNS = 3, 5
CHECKED = 64  # tokens of a sequence whose logits are compared

# torch allows 8 kernels for one function; here every pair of mask and length is a kernel.
torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
compiled_flex_attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex_forward(
    module: nn.Module,
    query: Float[Tensor, "B Hq T D"],
    key: Float[Tensor, "B Hk N D"],
    value: Float[Tensor, "B Hk N D"],
    mask: BlockMask | None,
    *,
    scaling: float | None = None,
    **_: object,
) -> tuple[Float[Tensor, "B T Hq D"], None]:
    """What a layer calls for its attention."""
    if mask is None:
        raise ValueError("no BlockMask: register a mask function under the same name, or nothing would be causal")
    out = compiled_flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


def block_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskMod,
    device: torch.device,
    **_: object,
) -> BlockMask:
    """What the model calls once a step for each kind of layer: transformers' mask as a BlockMask.

    Args:
        q_length: queries of the step; the first of them stands at position `q_offset`.
        kv_length: keys of the step, or places of a cache of fixed size; the first stands at position `kv_offset`.
        mask_function: a mask_mod over positions.
    """
    # A static cache hands over its own counter. It moves on before the first layer attends, and the kernel reads
    # the offset only then: without a copy every query would see one key too many.
    first = torch.as_tensor(q_offset, device=device).clone()

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_function(b, h, q_idx + first, kv_idx + kv_offset)

    return create_block_mask(mask_mod, batch_size, None, q_length, kv_length, device=str(device))


def unmasked_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | None, **_: object
) -> tuple[Tensor, None]:
    """The same without the refusal, registered without a mask function: the trap, to see what comes out of it."""
    out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register(FLEX, flex_forward)
AttentionMaskInterface.register(FLEX, block_mask)
AttentionInterface.register(UNMASKED, unmasked_forward)


@dataclass(frozen=True)
class Setting:
    """What is measured on one kind of device.

    Attributes:
        tolerance: largest difference of two logits that counts as rounding; logits are of order 1.
        span: keys of the sliding window, and tokens of a document.
        lengths: tokens of a prefill.
        eager_longest: the longest prefill whose scores fit into memory.
        decodes: keys of a decode.
        capacity: places of the cache of fixed size; the decodes of a case advance, so it has room for a few more.
    """

    model: str
    shape: ModelShape
    dtype: torch.dtype
    tolerance: float
    span: int
    lengths: tuple[int, ...]
    eager_longest: int
    decodes: tuple[int, ...]
    capacity: int


CPU = Setting(
    model="Qwen3, 2 layers of 8 heads of 64",
    shape=ModelShape(512, 2, 8, 4, 64, 1536, 4096),
    dtype=torch.float32,
    tolerance=1e-4,
    span=256,
    lengths=(256, 1024, 2048),
    eager_longest=2048,
    decodes=(256, 1920),
    capacity=2048,
)
GPU = Setting(
    model="Qwen3-0.6B's shape",
    shape=ModelShape(1024, 28, 16, 8, 128, 3072, 151_936),
    dtype=torch.bfloat16,
    tolerance=0.125,
    span=512,
    lengths=(512, 2048, 8192, 32_768),
    eager_longest=8192,
    decodes=(512, 32_512),
    capacity=32_768,
)


def build_model(setting: Setting, sliding: bool, device: torch.device) -> Qwen3ForCausalLM:
    """A Qwen3 with the same random weights each time, all of its layers with a sliding window or none."""
    shape = setting.shape
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_qo_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max(*setting.lengths, setting.capacity),
        tie_word_embeddings=True,
        use_sliding_window=sliding,
        sliding_window=setting.span,
        layer_types=["sliding_attention" if sliding else "full_attention"] * shape.num_layers,
    )
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=setting.dtype).eval()


def positions_of(mask: str, length: int, span: int, device: torch.device) -> Int[Tensor, "1 T"]:
    """Positions of one row of tokens. Where they begin again, transformers sees another document."""
    positions = torch.arange(length, device=device)[None]
    return positions % span if mask == "documents" else positions


def mask_of(
    model: Qwen3ForCausalLM, mask: str, positions: Int[Tensor, "1 T"], cache: StaticCache | None = None
) -> Tensor | BlockMask | None:
    """The mask of one step for the attention that the model is set to, by transformers' own function."""
    create = create_sliding_window_causal_mask if mask == "sliding window" else create_causal_mask
    embeds = torch.empty(*positions.shape, 1, dtype=model.dtype, device=positions.device)
    return create(model.config, embeds, None, cache, position_ids=positions)


def attention_bound(setting: Setting, mask: str, length: int) -> Cost:
    """What one layer's attention must do: each visible pair of query and key, each tensor once."""
    shape = setting.shape
    heads = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, setting.dtype.itemsize
    if mask == "documents":
        span = min(setting.span, length)
        return attention_cost(span, span, *heads) * (length // span)
    return attention_cost(length, length, *heads, window=setting.span if mask == "sliding window" else None)


def prefill_bound(setting: Setting, mask: str, length: int) -> Cost:
    """What a whole forward pass must do, with logits for the last token."""
    shape, size = setting.shape, setting.dtype.itemsize
    layer = decoder_layer_costs(shape, length, length, size) | {"attention": attention_bound(setting, mask, length)}
    return sum(layer.values(), Cost(0, 0)) * shape.num_layers + linear_cost(
        1, shape.hidden_size, shape.vocab_size, size
    )


def attention_seconds(
    setting: Setting, model: Qwen3ForCausalLM, name: str, mask: Tensor | BlockMask | None, queries: int, keys: int
) -> float:
    """Time of one layer's attention on random queries, keys and values, its mask given."""
    shape, module = setting.shape, model.model.layers[0].self_attn
    sizes = [(shape.num_qo_heads, queries), (shape.num_kv_heads, keys), (shape.num_kv_heads, keys)]
    forwards = {"eager": eager_attention_forward, "SDPA": AttentionInterface()["sdpa"], "flex": flex_forward}

    def operand(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, shape.head_dim, device=model.device, dtype=setting.dtype)

    # A decode does little but read its keys: in turns on many caches, so that none of them waits in the processor's.
    operands = [[operand(*size) for size in sizes] for _ in range(64 if queries == 1 else 1)]

    def call() -> None:
        for q, k, v in operands:
            forwards[name](module, q, k, v, mask, scaling=module.scaling)

    call()  # compiles; and libraries choose their kernels on a first call, which cannot be captured
    if model.device.type == "cpu":
        return seconds(call, model.device) / len(operands)
    # The host takes longer to launch a small kernel than the device to run it: all calls become one CUDA graph.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return seconds(graph.replay, model.device) / len(operands)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    return min(timing.measure(call, runs=RUNS, warmup=1, device=device.type).runs)


def time_row(figure: str, value: float, cost: Cost, machine: Machine, case: dict[str, results.Setting]) -> results.Row:
    source = "bytes / bandwidth" if cost.is_memory_bound(machine) else "FLOPs of visible pairs / FLOP rate"
    return results.Row(figure, value, "s", cost.seconds(machine), source, case)


def difference(a: Tensor, b: Tensor) -> float:
    return (a.float() - b.float()).abs().max().item()


def difference_row(setting: Setting, value: float, **case: results.Setting) -> results.Row:
    """The largest difference of two sets of logits, which must be rounding and no more."""
    assert value <= setting.tolerance, f"logits differ by {value}: {case}"
    return results.Row("logits", value, "logits", None, f"asserted: rounding, at most {setting.tolerance}", case)


def without_mask_row(setting: Setting, device: torch.device) -> results.Row:
    """How wrong the logits are where only the attention was registered, and no mask function: nothing warns."""
    model, length = build_model(setting, False, device), setting.lengths[0]
    token_ids = torch.randint(setting.shape.vocab_size, (1, length), device=device)
    logits = []
    for implementation in ("sdpa", UNMASKED):
        model.set_attn_implementation(implementation)
        logits.append(model(token_ids, use_cache=False).logits)
    case: dict[str, results.Setting] = {"mask": "none registered", "compared": "flex, SDPA"}
    why = "none: every query sees every key, and nothing warns"
    return results.Row("logits", difference(*logits), "logits", None, why, case)


def prefill(
    setting: Setting, model: Qwen3ForCausalLM, machine: Machine, mask: str, name: str, token_ids: Int[Tensor, "1 T"]
) -> tuple[Float[Tensor, "1 R V"], list[results.Row]]:
    """Some tokens' logits, and the times of one layer's attention, of its mask and of the whole model."""
    device, length = token_ids.device, token_ids.shape[1]
    positions = positions_of(mask, length, setting.span, device)
    model.set_attn_implementation(ATTENTIONS[name])

    def forward(keep: int | Tensor = 1) -> Tensor:
        # transformers tells documents apart by their positions only where no cache is kept.
        return model(token_ids, position_ids=positions, use_cache=False, logits_to_keep=keep).logits

    logits = forward(torch.linspace(0, length - 1, CHECKED, device=device).long())
    attention = attention_seconds(setting, model, name, mask_of(model, mask, positions), length, length)
    building = seconds(lambda: mask_of(model, mask, positions), device)
    whole = seconds(forward, device)
    case: dict[str, results.Setting] = {"mask": mask, "attention": name, "tokens": length}
    return logits, [
        time_row("attention", attention, attention_bound(setting, mask, length), machine, case),
        results.Row("mask", building, "s", None, "none: one serves all layers of a step", case),
        time_row("prefill", whole, prefill_bound(setting, mask, length), machine, case),
    ]


def prefill_rows(setting: Setting, device: torch.device, machine: Machine, mask: str) -> list[results.Row]:
    """Equal logits, then all times at each length."""
    model, rows = build_model(setting, mask == "sliding window", device), []
    worst: dict[str, float] = {}
    for length in setting.lengths:
        token_ids = torch.randint(setting.shape.vocab_size, (1, length), device=device)
        names = [name for name in ATTENTIONS if name != "eager" or length <= setting.eager_longest]
        logits = {}
        for name in names:
            logits[name], times = prefill(setting, model, machine, mask, name, token_ids)
            rows += times
        for name in names:
            worst[name] = max(worst.get(name, 0.0), difference(logits[name], logits["SDPA"]))
    checks = [difference_row(setting, worst[n], mask=mask, compared=f"{n}, SDPA") for n in ("flex", "eager")]
    return checks + rows


def decode(
    setting: Setting, model: Qwen3ForCausalLM, machine: Machine, name: str, token_ids: Int[Tensor, "1 N"]
) -> tuple[Float[Tensor, "1 1 V"], list[results.Row]]:
    """The logits of one more token, and the times of one layer's attention, of its mask and of the whole model."""
    shape, device, keys = setting.shape, token_ids.device, token_ids.shape[1]
    fixed = StaticCache(config=model.config, max_cache_len=setting.capacity) if name in ATTENTIONS else None
    cache = DynamicCache() if fixed is None else fixed
    model.set_attn_implementation("sdpa")
    model(token_ids, past_key_values=cache, logits_to_keep=1)
    model.set_attn_implementation(ATTENTIONS.get(name, "sdpa"))

    def step() -> Tensor:
        return model(token_ids[:, :1], past_key_values=cache).logits

    case: dict[str, results.Setting] = {"attention": name, "keys": keys}
    rows = []
    if fixed is not None:
        position = torch.full((1, 1), keys, device=device)
        mask = mask_of(model, "causal", position, fixed)
        attention = attention_seconds(setting, model, name, mask, 1, setting.capacity)
        building = seconds(lambda: mask_of(model, "causal", position, fixed), device)
        heads = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim
        bound = attention_cost(1, keys + 1, *heads, setting.dtype.itemsize)
        rows.append(time_row("decode attention", attention, bound, machine, case))
        rows.append(results.Row("decode mask", building, "s", None, "none: one serves all layers of a step", case))
    logits = step()
    bound = model_step_cost(shape, 1, keys + 1, setting.dtype.itemsize)
    return logits, [*rows, time_row("decode step", seconds(step, device), bound, machine, case)]


def decode_rows(setting: Setting, device: torch.device, machine: Machine) -> list[results.Row]:
    """Equal logits and all times over a cache of fixed size, and those of SDPA over one that grows."""
    model, rows = build_model(setting, False, device), []
    for keys in setting.decodes:
        token_ids = torch.randint(setting.shape.vocab_size, (1, keys), device=device)
        logits = {}
        for name in (*ATTENTIONS, "SDPA, growing cache"):
            logits[name], times = decode(setting, model, machine, name, token_ids)
            rows += times
        worst = difference(logits["flex"], logits["SDPA"])
        rows.append(difference_row(setting, worst, step="decode", keys=keys, compared="flex, SDPA"))
    return rows


def round_of(setting: Setting, device: torch.device, machine: Machine) -> list[results.Row]:
    prefills = [row for mask in MASKS for row in prefill_rows(setting, device, machine, mask)]
    return prefills + decode_rows(setting, device, machine)


def draw_gain(result: results.Result) -> Axes:
    """How many times faster one layer's attention is with flex than with SDPA, for each mask and length."""
    lengths = sorted({int(row.case["tokens"]) for row in result.rows if row.figure == "attention"})

    def gain(mask: str, length: int) -> float:
        sdpa, flex = (result.find("attention", mask=mask, attention=a, tokens=length).value for a in ("SDPA", "flex"))
        return sdpa / flex

    axes = figures.draw_lines(
        lengths,
        {mask: [gain(mask, length) for length in lengths] for mask in MASKS},
        xlabel="tokens of the prefill",
        ylabel="times faster than SDPA",
        log=True,
        title="One layer's attention with flex",
    )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    return axes


# --- prediction -------------------------------------------------------------------------------------------------------

BLOCK = 128  # queries, and keys, of a block: the default of create_block_mask


def visible_blocks(mask: str, length: int, span: int) -> int:
    """Count the blocks that contain a visible pair of query and key: for each block of queries, those from the first
    key that it sees to its last query.
    """
    queries = range(0, length, BLOCK)  # the first of each block
    first_keys = {
        "causal": [0 for _ in queries],
        "sliding window": [max(0, query - span + 1) for query in queries],
        "documents": [query // span * span for query in queries],
    }[mask]
    return sum(query // BLOCK - key // BLOCK + 1 for query, key in zip(queries, first_keys, strict=True))


def block_predictions(setting: Setting) -> dict[str, str]:
    """Derive the blocks of the longest prefill, and SDPA's time over flex's if every pair costs both the same."""
    length = setting.lengths[-1]
    every = (length // BLOCK) ** 2
    counts = {mask: visible_blocks(mask, length, setting.span) for mask in MASKS}
    return {
        f"{setting.model}, {length:,} tokens, {mask}": f"{count:,} of {every:,} blocks, {every / count:.1f} times"
        for mask, count in counts.items()
    }


def predictions() -> str:
    """Derive what the README predicts for both devices. It assumes no rates: all times are compared with SDPA's."""
    shape, size, length = CPU.shape, CPU.dtype.itemsize, CPU.lengths[-1]

    def products(num_tokens: int) -> Cost:
        costs = decoder_layer_costs(shape, num_tokens, length, size)
        return sum((cost for name, cost in costs.items() if name.endswith("_proj")), Cost(0, 0))

    heads = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, size
    flops, attention = products(length).flops, attention_cost(length, length, *heads, causal=False).flops
    kept = min(visible_blocks(mask, length, CPU.span) for mask in MASKS) / (length // BLOCK) ** 2
    # Without tokens, what is left of a product's bytes is its weight.
    weights = products(0) * shape.num_layers + linear_cost(0, shape.hidden_size, shape.vocab_size, size)
    slots = CPU.capacity // BLOCK
    few, many = (keys // BLOCK + 1 for keys in CPU.decodes)  # and the new token
    causal = attention_bound(GPU, "causal", GPU.lengths[-1]).flops
    return predicted(
        block_predictions(CPU)
        | {
            "prefill: products of a layer": f"{flops / 1e9:.1f} GFLOP",
            "prefill: attention of a layer": f"{attention / 1e9:.1f} GFLOP if no pair is skipped",
            "prefill: pairs that flex skips": f"at most {1 - kept:.1%}, and the pass is at most "
            f"{(flops + attention) / (flops + kept * attention):.1f} times faster",
            f"decode after {CPU.decodes[0]:,} keys": f"{few} of {slots} blocks, {few / slots:.2f} of SDPA's time",
            f"decode after {CPU.decodes[1]:,} keys": f"{many} of {slots} blocks, {many / slots:.2f} of SDPA's time",
            "decode: weights": quantity(weights.bytes, "B"),
        }
        | block_predictions(GPU)
        | {f"{GPU.model}: causal attention of a layer": f"{causal / 1e12:.1f} TFLOP"}
    )


def main() -> None:
    arguments = command_line(__doc__, predictions).parse_args()
    device = torch.device(arguments.device)
    setting = GPU if device.type == "cuda" else CPU
    # glibc's malloc returns large blocks to the system on every free, and the next one is cleared page by page. Freeing
    # one block of 31 MiB raises the threshold: operators reuse memory, as in a program that has run for a while.
    torch.empty(31 * 2**20, dtype=torch.uint8)
    with torch.inference_mode():
        rows = [without_mask_row(setting, device)]
        rows += in_rounds(partial(round_of, setting, device), device, setting.dtype, ROUNDS)[1]
    dtype = str(setting.dtype).removeprefix("torch.")
    parameters: dict[str, results.Setting] = {"model": setting.model, "dtype": dtype}
    parameters |= {"window and documents": setting.span, "places of the fixed cache": setting.capacity}
    result = results.new_result(EXPERIMENT, rows, parameters, arguments.device)
    record(result, arguments.out, {"logits", "attention", "decode attention", "decode step"})


if __name__ == "__main__":
    main()
