"""The command line: real answers, one sentence and exit code 2 for what cannot be."""

import re
import sys

import pytest

from mini_engine.cli import app, main


@pytest.fixture
def run(monkeypatch, capsys):
    def run_(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mini-engine", *arguments])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run_


def test_generate_answers_and_says_what_it_cost(run):
    code, out, _ = run("generate", "What is the capital of France?", "--max-tokens", "12", "--dtype", "float32")
    assert code == 0
    assert "The capital of France is Paris." in out
    for quantity in ("time to first token", "tokens/s", "weights read per token", "keys and values", "bandwidth used"):
        assert quantity in out


def test_raw_continues_the_text_and_stop_ends_it(run):
    _, out, _ = run("generate", "--raw", "One, two, three, four,", "--stop", "six", "-n", "12", "--dtype", "float32")
    assert "five" in out
    assert "six" not in out.split("What it cost")[0]


def test_chat_remembers_and_ends_at_an_empty_line(run, monkeypatch):
    lines = iter(["My name is Ada.", "What is my name?", ""])
    monkeypatch.setattr("rich.console.Console.input", lambda self, prompt: next(lines))
    code, out, _ = run("chat", "--max-tokens", "24", "--temperature", "0", "--dtype", "float32")
    assert code == 0
    assert "Ada" in out.rsplit("model", 1)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "empty"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "hi", "--top-p", "nan"], "top_p"),
        (["generate", "hi", "--model", "no/such-model"], "no/such-model"),
        (["generate", "hi", "--attn-backend", "magic"], "choose one of"),
        (["generate", "hi", "--chat-template", "missing.jinja"], "missing.jinja"),
        (["generate", "word " * 9000], "shorten"),
        (["generate", "hi", "--top-k", "-5"], "top_k"),
        (["generate", "half \udcff", "--raw"], "neither valid text"),
        (["chat", "--watch", "--num-pages", "0"], "num_pages is 0"),
        (["bench", "--prompt-tokens", "9000", "--batch-size", "1"], "choose fewer prompt tokens"),
        (["bench", "--peer", "nobody"], "choose one of"),
        (["bench", "--peer", "transformers", "--peer", "transformers-continuous"], "one peer"),
        (["bench", "--workload", "everything"], "choose batches or throughput"),
        (["bench", "--workload", "throughput", "--peer", "nobody"], "choose one of"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(run, arguments, message):
    code, _, err = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_a_gguf_file_that_is_none_is_refused(run, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    code, _, err = run("generate", "hi", "--model", str(path))
    assert code == 2
    assert "Traceback" not in err and "model.gguf" in err


@pytest.mark.parametrize("command", [[], ["generate"], ["chat"], ["bench"]])
def test_help(run, command):
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "Usage" in out


def test_bench_prints_the_ratio(run):
    code, out, _ = run(
        "bench", "--peer", "transformers", "--batch-size", "2", "--dtype", "bfloat16", "--prompt-tokens", "4",
        "--max-tokens", "3", "--rounds", "1",
    )  # fmt: skip
    assert code == 0
    assert "transformers" in out and "of the bound" in out and re.search(r"\d\.\d\dx", out)


def test_every_option_has_help():
    for command in app.registered_commands:
        assert command.callback is not None and command.callback.__doc__
