"""The command line: real answers, one sentence and exit code 2 for a mistake, whatever the terminal and its input."""

import io
import json
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from cyclopts import App

from mini_engine import cli, defaults
from mini_engine.cli_options import load_served
from mini_engine.llm import LLM
from tests.helpers import save_tiny_model

ROOT = Path(__file__).parent.parent
HOSTILE = "\x1b]0;PWNED\x1b\\\x1b[2J\x9b2J\x07"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A model that writes nonsense, in words w0 to w60."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, [f"w{i}" for i in range(61)])
    return str(folder)


@pytest.fixture(scope="module")
def hostile_model(tmp_path_factory) -> str:
    """A model whose every word sets the title and clears the screen of a terminal that obeys it."""
    folder = tmp_path_factory.mktemp("hostile")
    save_tiny_model(folder, [f"{HOSTILE}{i}" for i in range(61)])
    return str(folder)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command line with lines of input; returns exit code, output and errors."""

    def run_(*arguments: str, lines: str | bytes | None = "") -> tuple[int, str, str]:
        data = lines.encode() if isinstance(lines, str) else lines
        stdin = None if data is None else io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "argv", ["mini-engine", *arguments])
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return exit_.value.code or 0, captured.out, captured.err

    return run_


@pytest.fixture
def conversations(monkeypatch):
    """The messages of every prompt."""
    seen: list[list[str]] = []
    original = LLM.chat_prompt

    def chat_prompt(self, messages, **options):
        seen.append([f"{message['role']}: {message['content']}" for message in messages])
        return original(self, messages, **options)

    monkeypatch.setattr(LLM, "chat_prompt", chat_prompt)
    return seen


# --- commands --------------------------------------------------------------------------------------------------------


def test_generate_answers_and_says_what_it_cost(run):
    code, out, _ = run(
        "generate", "What is the capital of France?", "-n", "12", "--dtype", "float32", "--num-pages", "2"
    )
    assert code == 0
    assert "The capital of France is Paris." in out
    for quantity in ("time to first token", "tokens/s", "weights read per token", "keys and values", "bandwidth used"):
        assert quantity in out


def test_generate_is_greedy_unless_it_is_told_otherwise(run, model):
    def answer(*arguments: str) -> str:
        code, out, _ = run("generate", "w5 w6", "--raw", "-m", model, "-n", "16", "--ignore-eos", *arguments)
        assert code == 0
        return re.search(r"─\n(.*?)\n\n", out, re.DOTALL)[1]

    greedy = answer()
    assert greedy == answer("--seed", "5") and len(greedy.split()) == 16
    assert answer("-t", "5", "--seed", "5") == answer("-t", "5", "--seed", "5") != greedy
    word = greedy.split()[3]
    assert answer("--stop", word).split() == greedy.split()[: greedy.split().index(word)]


def test_a_file_of_options_and_the_command_line_over_it(run, model, tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("num_pages: 2\npage_size: 8\nattn_backend: chunked\n")
    ask = ("generate", "w5 " * 20, "--raw", "-m", model, "-n", "2", "--config", str(file))
    code, out, err = run(*ask)
    assert code == 2 and "chunked" in out and "pages" in err
    code, out, _ = run(*ask, "--num-pages", "9", "-b", "torch")
    assert code == 0 and "attention backend torch" in " ".join(out.split())  # a long path wraps the line


def test_parts_of_a_module_replace_the_engines(run, model, tmp_path, monkeypatch):
    (tmp_path / "sevens.py").write_text(
        "from dataclasses import replace\nimport torch\nfrom mini_engine.parts import Parts\n"
        "parts = replace(Parts(), sample=lambda logits, batch: torch.full((len(logits),), 7))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, out, _ = run("generate", "w5", "--raw", "-m", model, "-n", "3", "--parts", "sevens:parts")
    assert code == 0 and "w7 w7 w7" in out


def test_other_prompts_are_answered_where_one_is_refused(run, model):
    code, out, err = run("generate", "w5", "w6 " * 200, "--raw", "-m", model, "-n", "3")
    assert code == 2 and len(re.findall(r"^ ?w\d+ w\d+ w\d+$", out, re.MULTILINE)) == 1
    assert err.startswith("error: prompt 2: ") and "shorten" in err and err.count("\n") == 1


def test_chat_remembers_and_ends_at_an_empty_line(run, model, conversations):
    code, out, _ = run("chat", "--system", "w3", "-m", model, "-n", "3", "-t", "0", lines="w4\nw5\n \nw6\n")
    assert code == 0
    system, user, assistant, again = conversations[1]
    assert conversations[0] == [system, user] == ["system: w3", "user: w4"]
    assert re.fullmatch(r"assistant:  ?w\d+ w\d+ w\d+", assistant) and again == "user: w5"
    assert len(conversations) == 2 and assistant.removeprefix("assistant: ") in out


def test_chat_ends_where_the_input_ends(run, model):
    code, out, _ = run("chat", "-m", model, "-n", "3", lines="w4")
    assert code == 0 and out.endswith("\n")


def test_chat_goes_on_after_a_message_that_is_refused(run, model, conversations):
    code, out, err = run("chat", "-m", model, "-n", "3", lines=f"w4\n{'w5 ' * 200}\nw6\n")
    assert code == 0
    assert err.startswith("error: ") and "shorten" in err and err.count("\n") == 1
    assert [message.partition(":")[0] for message in conversations[-1]] == ["user", "assistant", "user"]
    assert conversations[-1][0] == "user: w4" and conversations[-1][2] == "user: w6"
    assert out.count("tokens/s") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "empty"),
        (["generate", "w1", "--temperature", "-1"], "temperature"),
        (["generate", "w1", "--top-p", "nan"], "top_p"),
        (["generate", "w1", "--top-k", "-5"], "top_k"),
        (["generate", "w1", "--model", "no/such-model"], "no/such-model"),
        (["generate", "w1", "--attn-backend", "magic"], "choose one of"),
        (["generate", "w1", "--chat-template", "missing.jinja"], "missing.jinja"),
        (["generate", "w1", "--config", "missing.yaml"], "missing.yaml"),
        (["generate", "w1", "--parts", "missing:parts"], "missing"),
        (["generate", "w1 " * 9000], "shorten"),
        (["generate", "half \udcff", "--raw"], "cannot be tokenized"),
        (["generate", "w1", "--num-pages", "1000000000000"], "lower"),
        (["generate", "w1", "--num-pages", "1" + "0" * 30], "num_pages"),
        (["generate", "w1", "--page-size", str(2**40)], "lower page_size"),
        (["generate", "w1", "--watch", "--num-pages", str(10**14)], "lower"),
        (["chat", "--max-batch-size", str(2**40)], "max_batch_size"),
        (["chat", "--watch", "--num-pages", "0"], "num_pages is 0"),
        (["bench", "--workload", "everything"], "choose one of"),
        (["bench", "--peer", "nobody"], "choose one of"),
        (["bench", "--prompt-tokens", "1000000000"], "fewer prompt tokens"),
        (["trace", "--out", "no/such/folder/run.json"], "choose another path"),
        (["trace", "--out", "run.json", "--page-size", "0"], "page_size is 0"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(run, model, arguments, message):
    code, _, err = run(*arguments, *([] if "--model" in arguments else ["--model", model]))
    assert code == 2
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_a_trace_is_saved_although_a_prompt_is_refused(run, model, tmp_path):
    path = tmp_path / "run.json"
    code, _, err = run("trace", "--model", model, "--max-model-len", "10", "--out", str(path))
    assert code == 2 and "shorten" in err
    assert "traceEvents" in json.loads(path.read_text())


def test_a_trace_that_cannot_be_written_is_refused_before_a_step(run, model, monkeypatch):
    monkeypatch.setattr(LLM, "stream", lambda *_: pytest.fail("a step ran"))
    code, _, err = run("trace", "--model", model, "--out", "no/such/folder/run.json")
    assert code == 2 and "choose another path" in err


@pytest.mark.parametrize("number", ["1" + "0" * 5000, "x", "1.5"])
def test_numbers_that_are_none_are_refused(run, number):
    code, _, err = run("generate", "hi", "--num-pages", number)
    assert code == 2 and "--num-pages" in err


def test_a_gguf_file_that_is_none_is_refused(run, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    code, _, err = run("generate", "hi", "--model", str(path))
    assert code == 2
    assert "model.gguf" in err


@pytest.mark.parametrize(
    ("options", "tokens"),
    [({}, 64), ({"max_num_batched_tokens": 48}, 48), ({"max_num_seqs": 96}, 96), ({"max_num_seqs": 8}, 64)],
)
def test_a_server_has_a_default_of_its_own_for_the_tokens_of_a_step(model, monkeypatch, options, tokens):
    monkeypatch.setattr(defaults, "SERVED_STEP_TOKENS", 64)
    config = load_served({"model": model, "device": "cpu", "num_pages": 64, "page_size": 8, **options}).config
    assert config.max_num_batched_tokens == tokens


def test_bench_measures_beside_a_peer(run, model):
    code, out, _ = run(
        "bench", "--peer", "transformers", "--batch-size", "2", "--dtype", "float32", "--prompt-tokens", "4",
        "--max-tokens", "3", "--rounds", "1", "--json", "-m", model,
    )  # fmt: skip
    assert code == 0
    engines = [json.loads(line)["engine"] for line in out.splitlines()]
    assert engines == ["mini_engine", "transformers"]


def test_the_package_is_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "mini_engine", "generate", ""], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert (done.returncode, done.stderr) == (2, "error: prompt 1 is empty; give it some text\n")


# --- terminals -------------------------------------------------------------------------------------------------------


def obeyed(text: str) -> list[str]:
    """The controls in a text."""
    return [c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\t"]


@pytest.mark.parametrize("arguments", [["generate", "x", "--raw"], ["generate", "x", "--raw", "--watch"], ["chat"]])
def test_the_model_cannot_control_the_terminal(run, hostile_model, arguments):
    code, out, _ = run(*arguments, "-n", "3", "-m", hostile_model, lines=f"x {HOSTILE}\n")
    assert code == 0 and not obeyed(out)
    assert r"\x1b]0;PWNED\x1b\\x1b[2J\x9b2J\x07" in "".join(out.split())


def test_names_and_prompts_cannot_control_the_terminal(run, model):
    code, _, err = run("generate", "x", "-m", f"./{HOSTILE}")  # a long path would be cut
    assert code == 2 and r"\x1b]0;PWNED" in err and not obeyed(err)
    code, out, _ = run("generate", f"w5 {HOSTILE}", "[bold]w5[/bold][/]", "--raw", "-n", "2", "-m", model)
    assert code == 0 and r"\x1b]0;PWNED" in out and "[bold]w5[/bold][/]" in out and not obeyed(out)


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "ascii"])
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_terminals_that_are_not_utf_8(run, model, monkeypatch, encoding, command):
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("FORCE_COLOR", "1")  # for rich, both are terminals
    arguments = ["generate", "été 你好", "--raw"] if command == "generate" else ["chat"]
    code, _, _ = run(*arguments, "-m", model, "-n", "2", lines="été 你好\n")
    assert code == 0
    assert err.buffer.getvalue() == b""
    assert "été 你好".encode(encoding, "replace") in out.buffer.getvalue()


# --- standard streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [None, b"w4\n\xff\xfe\n"], ids=["closed", "not UTF-8"])
def test_input_that_cannot_be_read_is_one_sentence(run, model, lines):
    code, _, err = run("chat", "-m", model, "-n", "2", lines=lines)
    assert code == 2
    assert err.startswith("error: cannot read standard input") and err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("arguments", [["generate", "w5", "--raw", "-n", "2"], ["--help"]])
def test_a_full_output_is_one_sentence(model, arguments):
    arguments += ["-m", model] if arguments != ["--help"] else []
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mini_engine", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=300,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


def test_errors_of_files_are_no_errors_of_the_output():
    app = App()

    @app.default
    def broken() -> None:
        raise FileNotFoundError(2, "No such file or directory", "some/file")

    with pytest.raises(FileNotFoundError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mini-engine"])
        cli.main(app)
