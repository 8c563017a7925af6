"""Opening folders of every kind, and loading what is in them."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mini_engine.detokenizer import special_ids
from mini_engine.errors import ModelLoadError, WeightFileError
from mini_engine.loading import checkpoint as loading
from mini_engine.loading.checkpoint import StoredTensors, load_model, load_tokenizer, open_checkpoint
from mini_engine.models.config import ModelConfig
from mini_engine.parts import Parts
from mini_engine.sampling_params import SamplingParams
from tests.models.families import FAMILIES, our_model, transformers_model


@pytest.fixture(scope="module")
def llama() -> Any:
    return transformers_model("llama")


@pytest.fixture
def folder(llama: Any, tmp_path: Path) -> Path:
    """A tiny model as transformers saves it, with a tokenizer of two letters."""
    llama.save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "<e>": 2}, []))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    fast.chat_template = "{{ messages[0]['content'] }}"
    fast.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) if path.exists() else {}
    content = {key: value for key, value in (content | changes).items() if value is not None}
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("shard", [None, "20KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers_loads(family: str, shard: str | None, tmp_path: Path) -> None:
    theirs = transformers_model(family)
    theirs.save_pretrained(tmp_path, **({"max_shard_size": shard} if shard else {}))
    assert (tmp_path / "model.safetensors").exists() == (shard is None)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config == ModelConfig.from_hf(
        theirs.config.to_dict() | {"architectures": [type(theirs).__name__]}
    )
    assert checkpoint.dtype == torch.float32 and checkpoint.path == tmp_path
    ours, expected = load_model(checkpoint, Parts(), torch.float32), our_model(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), expected.parameters(), strict=True))
    half = load_model(checkpoint, Parts(), torch.bfloat16)
    for a, b in zip(half.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2**-8, atol=0)  # each rounded once


def test_loading_holds_one_copy_and_one_tensor(tmp_path: Path) -> None:
    """Each tensor is read when it is needed, and released before the tensor after the next is read."""
    transformers_model("llama").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    alive: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
    most_alive: dict[str, int] = {}

    def read(name: str) -> torch.Tensor:
        alive[name] = tensor = checkpoint.tensors[name]
        most_alive[name] = len(alive)
        return tensor

    headers = checkpoint.tensors.headers
    load_model(replace(checkpoint, tensors=StoredTensors(headers, read)), Parts(), torch.float32)
    assert most_alive.keys() == headers.keys() and max(most_alive.values()) <= 2


def test_the_tokenizer_and_its_template_come_along(folder: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert tokenizer("abba").input_ids == [0, 1, 1, 0]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    assert type(tokenizer) is type(AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(7, 8, (7, 8)), ([7, 9], 7, (7, 9)), (None, 8, (8,)), (None, [3, 4], (3, 4)), (None, None, ())],
)
def test_the_end_of_a_text_is_known(generation: Any, config: Any, expected: tuple[int, ...], folder: Path) -> None:
    """Every file that names an end counts."""
    edit(folder / "generation_config.json", eos_token_id=generation)
    edit(folder / "config.json", eos_token_id=config)
    assert open_checkpoint(folder).eos_token_ids == expected


def test_without_a_tokenizer_a_model_still_opens(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "config.json", eos_token_id=None)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.eos_token_ids == ()
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json: save one there"):
        load_tokenizer(checkpoint)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": 1}', '{"model": {"type": "BPE"}}', "\x00" * 50])
@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "LlamaTokenizer", "NoSuchTokenizer"])
def test_a_broken_tokenizer_is_a_typed_error(content: str, named: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(content)
    edit(folder / "tokenizer_config.json", tokenizer_class=named)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(open_checkpoint(folder))


def test_a_tokenizer_that_panics_is_a_typed_error(folder: Path) -> None:
    """The library is written in Rust: an index out of range there does not raise an Exception in Python."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] |= {"continuing_subword_prefix": "much longer", "merges": [["a", "b"]]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(open_checkpoint(folder))


def test_an_interrupt_is_not_swallowed(folder: Path) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(replace(open_checkpoint(folder), build_tokenizer=interrupted))


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_is_refused_unread(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "boom")))
    with pytest.raises(ModelLoadError, match=r"pickles, which can run code.*convert them with save_pretrained"):
        open_checkpoint(folder)
    assert not (tmp_path / "boom").exists()


def test_code_in_a_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'boom')!r}).touch()\nclass T: pass\n"
    for name in ("modeling_x.py", "tokenization_x.py", "configuration_x.py"):
        (folder / name).write_text(code)
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.T", "AutoConfig": "configuration_x.T"})
    for name in ("PreTrainedTokenizerFast", "T"):
        edit(
            folder / "tokenizer_config.json",
            auto_map={"AutoTokenizer": ["tokenization_x.T", "tokenization_x.T"]},
            tokenizer_class=name,
        )
        with pytest.warns(UserWarning, match="its own code"):
            checkpoint = open_checkpoint(folder)
        load_model(checkpoint, Parts(), torch.float32)
        try:
            load_tokenizer(checkpoint)
        except ModelLoadError:
            assert name == "T"
    assert not (tmp_path / "boom").exists()


def test_an_index_cannot_lead_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    for target in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        index = {"weight_map": dict.fromkeys(tensors, target)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(WeightFileError, match="each tensor a safetensors file in its folder"):
            open_checkpoint(folder)


@pytest.mark.parametrize("as_dict", [True, False])
def test_special_tokens_and_named_templates_are_those_that_transformers_reads(as_dict: bool, folder: Path) -> None:
    """Older files describe a token by an object and list several templates."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    token = {"content": "<e>", "special": True, "__type": "AddedToken"} if as_dict else "<e>"
    templates = [{"name": "default", "template": "a"}, {"name": "tools", "template": "b"}]
    edit(folder / "tokenizer_config.json", eos_token=token, pad_token=token, chat_template=templates)
    ours, theirs = load_tokenizer(open_checkpoint(folder)), AutoTokenizer.from_pretrained(folder)
    assert ours.special_tokens_map == theirs.special_tokens_map and ours.eos_token_id == 2
    assert ours.chat_template == theirs.chat_template == {"default": "a", "tools": "b"}
    assert ours("ab<e>").input_ids == theirs("ab<e>").input_ids


def test_a_token_that_the_configuration_names_is_special(folder: Path) -> None:
    """A script that calls `add_tokens` and then sets `eos_token` leaves its flag unset in tokenizer.json."""
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1}, [])))
    fast.add_tokens(["<e>", "<f>"])
    fast.eos_token = "<e>"
    fast.save_pretrained(folder)
    assert not any(token["special"] for token in json.loads((folder / "tokenizer.json").read_text())["added_tokens"])
    ours, theirs = load_tokenizer(open_checkpoint(folder)), AutoTokenizer.from_pretrained(folder)
    ids = theirs("a<e>b<f>").input_ids
    assert ours("a<e>b<f>").input_ids == ids == [0, 2, 1, 3]
    assert ours.backend_tokenizer.decode(ids) == theirs.backend_tokenizer.decode(ids)
    assert special_ids(ours.backend_tokenizer) == {2}


def test_the_hub_is_not_asked_about_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks about a vocabulary of over 100,000 tokens if a folder's name may be that of a model."""
    words = {f"w{i}": i for i in range(100_001)}
    fast = Tokenizer(models.WordLevel(words, unk_token="w0"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.save(str(folder / "tokenizer.json"))
    asked = []
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda api, name, *args, **kwargs: asked.append(name))
    monkeypatch.chdir(folder.parent)
    folder.rename("models")
    assert load_tokenizer(open_checkpoint("models")).vocab_size == 100_001
    assert asked == []


def chatml(folder: Path, **settings: Any) -> None:
    """A tokenizer of bytes, whose tokenizer.json has none of the tokens that the other files name."""
    names = list(bytes_to_unicode().values())
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | settings))


MARKER = {"content": "<|im_start|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"256": MARKER | {"single_word": False}}},
        {"additional_special_tokens": ["<|im_start|>"]},
        {"extra_special_tokens": {"turn": "<|im_start|>"}},
        {"extra_special_tokens": ["<|im_start|>"]},
        {"eos_token": "<|im_start|>"},
        {"eos_token": MARKER | {"__type": "AddedToken"}},
        {},
    ],
)
@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "GPT2TokenizerFast"])
def test_tokens_are_those_of_transformers_wherever_they_are_named(
    settings: dict[str, Any], named: str, folder: Path
) -> None:
    """In tokenizer_config.json, or in added_tokens.json. A marker that is split would be a different prompt."""
    chatml(folder, **settings, tokenizer_class=named)
    if not settings:
        (folder / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 256}))
    ours, theirs = load_tokenizer(open_checkpoint(folder)), AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>user é"
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.decode(ours(text).input_ids, skip_special_tokens=True) == theirs.decode(
        theirs(text).input_ids, skip_special_tokens=True
    )
    assert type(ours) is type(theirs) and ours.special_tokens_map == theirs.special_tokens_map
    assert special_ids(ours.backend_tokenizer) == special_ids(theirs.backend_tokenizer)


@pytest.mark.parametrize("token_id", [10**7, 10**8, 2**31, 2**40])
@pytest.mark.parametrize("place", ["vocab", "added_tokens", "added_tokens_decoder", "added_tokens.json"])
def test_a_huge_token_id_is_refused_before_a_library_makes_room_for_it(
    place: str, token_id: int, folder: Path, memory_limit: Any
) -> None:
    chatml(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    if place == "vocab":
        content["model"]["vocab"]["zz"] = token_id
    elif place == "added_tokens":
        content["added_tokens"].append(MARKER | {"id": token_id, "single_word": False})
    elif place == "added_tokens_decoder":
        edit(folder / "tokenizer_config.json", added_tokens_decoder={str(token_id): MARKER})
    else:
        (folder / "added_tokens.json").write_text(json.dumps({"<x>": token_id}))
    (folder / "tokenizer.json").write_text(json.dumps(content))
    checkpoint = open_checkpoint(folder)
    with memory_limit(2**27), pytest.raises(WeightFileError, match="token id"):
        load_tokenizer(checkpoint)


def test_links_that_lead_nowhere_are_typed_errors(tmp_path: Path, folder: Path) -> None:
    loop = tmp_path / "loop"
    loop.mkdir()
    (loop / "self").symlink_to("self")
    for model in (loop, loop / "self"):
        with pytest.raises(ModelLoadError):
            open_checkpoint(model)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["a/" * 3000, "~nosuchuser/x", "x" * 6000, "a\0b", "o/" + "x" * 5000])
def test_a_name_that_cannot_be_a_path_is_a_typed_error(name: str) -> None:
    with pytest.raises(ModelLoadError, match="was not found") as caught:
        open_checkpoint(name)
    assert len(str(caught.value)) < 400


def test_what_is_no_name_is_a_typed_error() -> None:
    code = """
from mini_engine.errors import ModelLoadError
from mini_engine.loading.checkpoint import open_checkpoint
for model in (None, 5, b"smollm2-135m-instruct", ["a"]):
    try:
        open_checkpoint(model)
    except ModelLoadError as error:
        assert "give its name or path" in str(error)
    else:
        raise AssertionError(model)
"""
    command = [sys.executable, "-c", code]  # without the type checker of the tests
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_hostile_names_are_cut_in_messages(folder: Path) -> None:
    edit(folder / "config.json", architectures=["a" * 5000])
    with pytest.raises(ModelLoadError, match="unknown architecture") as caught:
        open_checkpoint(folder)
    assert len(str(caught.value)) < 500
    edit(folder / "config.json", architectures=["LlamaForCausalLM"], hidden_act="b" * 5000)
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(folder)
    assert len(str(caught.value)) < 400


def test_a_damaged_file_says_how_to_get_another(folder: Path) -> None:
    """A converted folder that lacks a file is converted again; see test_hub."""
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"write it again; if this engine converted it, delete it"):
        load_tokenizer(open_checkpoint(folder))
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 8)
    with pytest.raises(ModelLoadError, match=r"write it again; if this engine converted it, delete it"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_k": 20, "do_sample": True}, {"temperature": 0.6, "top_k": 20}),
        ({"min_p": 0.1, "repetition_penalty": 1.1}, {"min_p": 0.1, "repetition_penalty": 1.1}),
        ({"do_sample": True}, {}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"max_new_tokens": 5, "num_beams": 4}, {}),
    ],
)
def test_default_parameters_are_those_of_the_file(given: dict[str, Any], expected: Any, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps(given))
    assert open_checkpoint(folder).default_params == SamplingParams(**expected)


IMPOSSIBLE = """
import json, sys
from mini_engine.errors import ModelLoadError
from mini_engine.loading.checkpoint import open_checkpoint
folder = sys.argv[1]
for name, value in [
    ("temperature", -1), ("temperature", "hot"), ("temperature", float("nan")), ("temperature", "x" * 5000),
    ("top_k", 1.5), ("top_k", -2), ("top_p", 0), ("top_p", 10**400), ("min_p", True), ("repetition_penalty", []),
    ("do_sample", "no"), ("do_sample", 0),
]:
    with open(folder + "/generation_config.json", "w") as file:
        json.dump({name: value}, file)
    try:
        open_checkpoint(folder)
    except ModelLoadError as error:
        assert f"generation_config.json: {name} is " in str(error) and len(str(error)) < 400 + len(folder), error
    else:
        raise AssertionError(f"accepted {name} = {value!r}")
"""


def test_impossible_generation_defaults_are_refused(folder: Path) -> None:
    command = [sys.executable, "-c", IMPOSSIBLE, str(folder)]  # without the type checker of the tests
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_files_that_cannot_be_read_are_typed_errors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(folder)

    def read(name: str) -> torch.Tensor:
        if name == "model.norm.weight":
            raise OSError(5, "Input/output error", "model.safetensors")
        return checkpoint.tensors[name]

    tensors = StoredTensors(checkpoint.tensors.headers, read)
    with pytest.raises(WeightFileError, match=r"model\.safetensors cannot be read \(Input/output error\)"):
        load_model(replace(checkpoint, tensors=tensors), Parts(), torch.float32)

    def denied(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(loading, "read_json", denied)
    with pytest.raises(WeightFileError, match=r"config\.json cannot be read \(Permission denied\)"):
        open_checkpoint(folder)


def test_a_linked_folder_and_a_link_inside_are_fine(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "model.safetensors").symlink_to("weights.safetensors")
    (tmp_path / "link").symlink_to(folder)
    load_model(open_checkpoint(tmp_path / "link"), Parts(), torch.float32)


def test_a_model_may_have_a_folder_named_snapshots(folder: Path) -> None:
    (folder / "snapshots").mkdir()
    assert open_checkpoint(folder).path == folder


def test_weights_may_be_links(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    load_model(open_checkpoint(folder), Parts(), torch.float32)


def test_a_folder_may_hold_only_a_gguf_file(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
        with pytest.raises(
            ModelLoadError, match=r"a\.gguf is damaged" if name == "a.gguf" else r"not exactly one \.gguf"
        ):
            open_checkpoint(tmp_path)


def test_a_family_that_llm_does_not_know_names_inference(folder: Path) -> None:
    edit(folder / "config.json", architectures=["OlmoForCausalLM"], model_type="olmo")
    with pytest.raises(ModelLoadError, match="Inference"):
        open_checkpoint(folder)


def test_one_file_of_another_name_will_do_but_not_two(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    load_model(open_checkpoint(folder), Parts(), torch.float32)
    save_file({"x": torch.ones(1)}, folder / "more.safetensors")
    with pytest.raises(ModelLoadError, match=r"2 safetensors files and no model.*index\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["no/such/model", "nothing-here", "", "/no/such/folder", "../x", "a b/c", "-x/y"])
def test_a_model_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=r"smollm2-135m-instruct|config\.json") as caught:
        open_checkpoint(name)
    assert "\n" not in str(caught.value)


def test_a_path_is_not_looked_up_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", lambda *args, **kwargs: pytest.fail("asked the network"))
    with pytest.raises(ModelLoadError, match="was not found"):
        open_checkpoint(Path("org/name"))


def test_what_is_no_model_says_what_is_missing(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"was not found .* a folder with config\.json"):
        open_checkpoint(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="0 safetensors files"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": 64}, "shape"),
        ({"vocab_size": 62}, "shape"),
        ({"num_hidden_layers": 4}, "no tensor"),
        ({"num_hidden_layers": 2}, "no place"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_a_configuration_of_another_model_is_refused(change: dict[str, Any], problem: str, folder: Path) -> None:
    edit(folder / "config.json", **change)
    with pytest.raises(ModelLoadError, match=problem):
        load_model(open_checkpoint(folder), Parts(), torch.float32)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_json_is_refused(content: bytes, name: str, folder: Path) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(WeightFileError, match=name):
        open_checkpoint(folder)


@pytest.mark.parametrize("content", [b'{"a": 1, "a": 2}', b'{"a": NaN}', b'{"hidden_size": NaN}'])
def test_json_without_a_model_is_refused(content: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match="unknown architecture"):
        open_checkpoint(folder)


def test_a_huge_configuration_is_not_read(folder: Path, memory_limit: Any) -> None:
    os.truncate(folder / "config.json", 2**34)
    with memory_limit(2**26), pytest.raises(WeightFileError, match="more than 8388608"):
        open_checkpoint(folder)


def test_a_huge_tokenizer_is_not_read(folder: Path, memory_limit: Any) -> None:
    os.truncate(folder / "tokenizer.json", 2**34)
    checkpoint = open_checkpoint(folder)
    with memory_limit(2**28), pytest.raises(WeightFileError, match="more than 67108864"):
        load_tokenizer(checkpoint)


def test_a_sparse_tensor_of_the_wrong_shape_is_not_read(folder: Path) -> None:
    """A file of 8 GiB that takes no space on the disk: its header is enough to refuse it."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, size = json.loads(raw[8 : 8 + length]), len(raw) - 8 - length
    header["lm_head.weight"] = {"dtype": "F32", "shape": [2**21, 1024], "data_offsets": [size, size + 2**33]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        file.truncate(8 + len(text) + size + 2**33)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError):
        load_model(open_checkpoint(folder), Parts(), torch.float32)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


def test_a_generation_configuration_with_bad_ids_is_refused(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[1, "x"])
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        open_checkpoint(folder)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_a_damaged_folder_loads_or_is_refused(folder: Path, data: st.DataObject) -> None:
    """One value of a JSON file replaced by any other: a model or a typed error."""
    name = data.draw(st.sampled_from(["config.json", "generation_config.json"]))
    original = (folder / name).read_bytes()
    content = json.loads(original)
    number = st.one_of(st.integers(-2, 70), st.sampled_from([2**17, 2**31, 2**63, 10**400]), st.floats())
    value = st.recursive(
        st.one_of(number, st.text(max_size=5), st.booleans(), st.none()),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
        max_leaves=4,
    )
    content[data.draw(st.sampled_from(sorted(content)))] = data.draw(value)
    (folder / name).write_text(json.dumps(content))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # A model may reserve what its configuration asks for, within limits; it touches no more than the files hold.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load_model(open_checkpoint(folder), Parts(), torch.float32)
    except ModelLoadError:
        pass
    finally:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (folder / name).write_bytes(original)
    assert peak - before < 2**18  # KiB


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_in_one_byte_are_refused(dtype: torch.dtype, folder: Path) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(ModelLoadError, match=r"stored as torch.*scales"):
        load_model(checkpoint, Parts(), checkpoint.dtype)
