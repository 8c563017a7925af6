"""How a notebook shows a `StepBatch`: its arrays, each entry in the color of the request that it belongs to."""

import sys
from collections.abc import Sequence

from mini_engine.batch import StepBatch

# Light colors under dark text, distinguishable by color-blind readers (after Okabe and Ito).
COLORS = ("#bfe3f7", "#fbd9a5", "#bfe8d7", "#f5cfe2", "#f7ef9f", "#c9d3f2", "#f6c8b6", "#dcdcdc")
MOST_CELLS = 48  # longer arrays are cut in the middle


def register() -> None:
    """Let the notebook that runs this show every `StepBatch` as a table; outside a notebook, do nothing."""
    ipython = sys.modules.get("IPython")
    if ipython and (shell := ipython.get_ipython()):
        shell.display_formatter.formatters["text/html"].for_type(StepBatch, render)


def render(batch: StepBatch) -> str:
    """Return an HTML table of the batch: one row per array, one cell per entry, one color per request."""
    lens = batch.qo_indptr.diff().tolist()
    page_counts = batch.kv_page_indptr.diff().tolist()
    requests = list(range(batch.num_sequences))
    tokens = [b for b in requests for _ in range(lens[b])]
    pages = [b for b in requests for _ in range(page_counts[b])]
    bounds = [*requests, None]
    owners_of_rows = [tokens[row] for row in batch.logit_rows.tolist()]
    rows = [
        _row("token_ids", "T", batch.token_ids.tolist(), tokens),
        _row("positions", "T", batch.positions.tolist(), tokens),
        _row("slot_mapping", "T", batch.slot_mapping.tolist(), tokens),
        _row("logit_rows", "R", batch.logit_rows.tolist(), owners_of_rows),
        _row("qo_indptr", "B+1", batch.qo_indptr.tolist(), bounds),
        _row("kv_lens", "B", batch.kv_lens.tolist(), requests),
        _row("kv_page_indptr", "B+1", batch.kv_page_indptr.tolist(), bounds),
        _row("kv_page_indices", "P", batch.host_page_indices.tolist(), pages),
        _row("kv_last_page_len", "B", batch.kv_last_page_len.tolist(), requests),
    ]
    if batch.page_positions is not None:
        rows.insert(-1, _row("page_positions", "P", batch.page_positions.tolist(), pages))
    counts = {"token": batch.num_tokens, "request": batch.num_sequences, "decode": batch.num_decodes}
    tokens_of, of_requests, decodes = (f"{n} {noun}{'s' * (n != 1)}" for noun, n in counts.items())
    caption = f"{tokens_of} of {of_requests}, {decodes}; pages of {batch.page_size} tokens"
    legend = " ".join(_cell(f"request {b}", b, tag="span") for b in requests[: len(COLORS)])
    return (
        f'<div class="step-batch" style="overflow-x:auto"><p>{caption} &nbsp; {legend}</p>'
        '<table style="border-collapse:separate;border-spacing:2px;font-family:monospace">'
        f"{''.join(rows)}</table></div>"
    )


def _row(name: str, shape: str, values: Sequence[int], owners: Sequence[int | None]) -> str:
    cells = [_cell(str(value), owner) for value, owner in zip(values, owners, strict=True)]
    if len(cells) > MOST_CELLS:
        half = MOST_CELLS // 2
        cells = [*cells[:half], _cell(f"… {len(cells) - 2 * half} more …", None), *cells[-half:]]
    return f'<tr><th style="text-align:left">{name}&nbsp;[{shape}]</th>{"".join(cells)}</tr>'


def _cell(text: str, owner: int | None, tag: str = "td") -> str:
    color = "#ffffff" if owner is None else COLORS[owner % len(COLORS)]
    style = f"background:{color};color:#1a1a1a;padding:1px 6px;text-align:right;border-radius:3px"
    return f'<{tag} style="{style}">{text}</{tag}>'
