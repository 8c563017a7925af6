"""A notebook shows a StepBatch as a table."""

import numpy as np
import pytest

from book import batch_html
from mini_engine.batch import StepBatch

BATCH = StepBatch.build(token_ids=np.arange(101), num_new=[1, 100], kv_lens=[3, 100], pages=range(1, 27), page_size=4)


def test_it_shows_every_array_and_cuts_long_ones():
    html = batch_html.render(BATCH)
    for name in ("token_ids", "slot_mapping", "qo_indptr", "kv_page_indptr", "kv_page_indices", "kv_last_page_len"):
        assert name in html
    assert "53 more" in html
    assert "101 tokens of 2 requests, 1 decode; pages of 4 tokens" in html


def test_a_notebook_knows_it_after_setup():
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactiveshell.InteractiveShell.instance()
    try:
        batch_html.register()
        shown, _ = shell.display_formatter.format(BATCH)
    finally:
        interactiveshell.InteractiveShell.clear_instance()
    assert shown["text/html"] == batch_html.render(BATCH)


def test_without_a_notebook_nothing_happens():
    batch_html.register()
