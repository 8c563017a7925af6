"""`--homework`: the engine on the reader's parts, compared with the reference."""

import io
import re
import sys
from dataclasses import replace

import pytest
from torch import Tensor

from book.grading import engine
from book.grading.engine import homework_options
from mini_engine import cli
from mini_engine.attention.levels import chunk_levels
from mini_engine.attention.state import AttentionState
from mini_engine.kv_cache.page_table import PageTable
from mini_engine.models.gpt2 import gpt2_weights
from mini_engine.models.layers import qk_norm, rms_norm
from mini_engine.parts import Parts
from tests.helpers import save_tiny_model


def right_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps)


def wrong_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps).roll(1, -1)


def own_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return gpt2_weights(tensors)


def own_qk_norm(q_and_k: Tensor, q_weight: Tensor, k_weight: Tensor, num_qo_heads: int, eps: float) -> Tensor:
    return qk_norm(q_and_k, q_weight, k_weight, num_qo_heads, eps)


class OwnTable(PageTable):
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, [f"w{i}" for i in range(61)])
    return str(folder)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a command line of a reader who has finished some parts; returns exit code, output and errors."""

    def run_(*arguments: str, **finished: object) -> tuple[int, str, str]:
        monkeypatch.setattr(engine, "ROOT", tmp_path)  # where the speed is kept
        monkeypatch.setattr(engine, "finished_parts", lambda: finished)
        monkeypatch.setattr(engine, "changed_since", dict)
        monkeypatch.setattr(sys, "stdin", io.StringIO("w5\n"))
        monkeypatch.setattr(sys, "argv", ["mini-engine", *arguments])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run_


def test_right_parts_give_the_tokens_of_the_reference(run, model, tmp_path):
    code, out, _ = run(
        "generate", "w5 w6", "w7", "--raw", "-n", "40", "-m", model, "--homework",
        rms_norm=right_norm, page_table=OwnTable, gpt2_weights=own_weights, qk_norm=own_qk_norm,
    )  # fmt: skip
    assert code == 0
    # A long path wraps the line.
    assert "Every token equals the reference's." in out and "attention backend torch" in " ".join(out.split())
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") == 4}
    assert "yours" in rows["RMSNorm"] and "03_language_model" in rows["RMSNorm"] and "yours" in rows["Page table"]
    assert "not used by this model" in rows["Weight map"] and "not used by this model" in rows["QK-norm"]
    assert "Sampler" not in rows
    assert re.search(r"yours [\d.]+ \([\d.]+ to [\d.]+\) tokens/s, the reference [\d.]+ \(", out)
    assert (tmp_path / ".progress" / "speed.json").exists()


def test_steps_that_fail_are_reported_although_every_token_is_right(run, model):
    calls = []

    def fails_once(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        calls.append(len(x))
        if len(calls) == 1:
            raise KeyError("page_positions")
        return rms_norm(x, weight, eps)

    code, out, _ = run("generate", "w5 w6", "--raw", "-n", "5", "-m", model, "--homework", rms_norm=fails_once)
    assert code == 0
    assert "raised an error: 1." in " ".join(out.split()) and "Every token equals" not in out


def test_wrong_parts_do_not(run, model):
    code, out, _ = run("generate", "w5 w6", "w7", "--raw", "-n", "9", "-m", model, "--homework", rms_norm=wrong_norm)
    assert code == 0 and "Answer 1 differs from the reference's" in out and "Every token" not in out


def test_stop_strings_run_on_the_readers_part(run, model):
    arguments = "generate", "w5 w6", "--raw", "-n", "9", "-m", model, "--homework"
    code, out, _ = run(*arguments, scan_stop=lambda text, stop: scan_stop(text, stop))
    assert code == 0 and "yours, with --stop" in out and "Every token equals the reference's." in " ".join(out.split())
    code, out, _ = run(*arguments, "--stop", "w", scan_stop=lambda text, stop: (text, "", False))
    assert code == 0 and "Answer 1 differs from the reference's" in out


def test_levels_of_chunks_serve_a_request_over_chunks(run, model):
    def moved(contexts, num_new, page_size):
        order, levels = chunk_levels(contexts, num_new, page_size)
        return order, [level._replace(query_offsets=level.query_offsets + 9) for level in levels]

    arguments = "generate", "w5 w6 w9", "w7 w3", "w8", "--raw", "-n", "5", "-m", model, "--homework"
    code, out, _ = run(*arguments, chunk_levels=lambda *args: chunk_levels(*args))
    assert code == 0 and "After two chunks, in both orders, every token equals the reference's." in " ".join(
        out.split()
    )
    code, out, _ = run(*arguments, chunk_levels=moved)
    assert code == 0 and "Every token equals the reference's." in out and "look at chunk_levels" in out
    code, out, _ = run(*arguments, "--attn-backend", "torch", chunk_levels=moved)
    assert code == 0 and "After two chunks" not in out and "not used by torch" in out


def test_without_parts_there_is_nothing_to_compare(run, model):
    code, out, _ = run("generate", "w5", "--raw", "-n", "2", "-m", model, "--homework")
    assert code == 0 and "No part is yours yet" in out and "reference" not in out


def test_homework_and_other_parts_exclude_each_other(run, model):
    code, _, err = run("generate", "w5", "--homework", "--parts", "mini_engine.parts:Parts", "-m", model)
    assert code == 2 and "give one of them" in err


def test_chat_runs_on_the_readers_parts_too(run, model):
    class Called(Exception):
        pass

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        raise Called

    code, _, err = run("chat", "-n", "2", "-m", model, "--homework", rms_norm=norm)
    assert code == 0 and "Called" in err


def test_without_homework_the_commands_are_the_engines(run, model):
    code, out, _ = run("generate", "w5", "--raw", "-n", "2", "-m", model, rms_norm=wrong_norm)
    assert code == 0 and "What it cost" in out and "reference" not in out and "Next:" not in out
    assert run("generate", "w5", "--top-p", "2", "-m", model)[0] == 2
    assert run("bench", "--peer", "nobody", "-m", model)[0] == 2


def test_options_give_parts_something_to_do():
    def merge(a: AttentionState, b: AttentionState) -> AttentionState:
        return a

    def options(**parts: object) -> dict[str, object]:
        return homework_options(replace(Parts(), **parts))

    plain = {"attn_backend": "torch", "dtype": "float32", "enable_prefix_caching": False}
    assert options() == options(rms_norm=right_norm) == plain
    assert options(merge_states=merge) == plain | {"attn_backend": "chunked"}
    assert options(merge_states=merge, classify_blocks=merge) == plain | {"attn_backend": "flex"}
    assert options(plan_work=merge, classify_blocks=merge) == plain | {"attn_backend": "split_kv"}
    assert options(chunk_levels=merge) == plain | {"attn_backend": "cascade"}
    assert options(find_levels=merge) == plain | {"attn_backend": "cascade", "enable_prefix_caching": True}
    assert options(pages_to_evict=merge) == plain | {"sliding_window": engine.WINDOW}
    assert options(pad_decodes=merge) == plain | {"cuda_graph_batch_sizes": (engine.GRAPH_SIZE,)}
    assert options(match_prefix=merge) == options(copy_on_write=merge) == plain | {"enable_prefix_caching": True}
