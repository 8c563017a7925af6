"""Opening folders of every kind, and loading what is in them."""

from __future__ import annotations

import json
import os
import pickle
import resource
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mini_engine.models.safetensors_file import open_safetensors
from mini_engine.models.tensors import LazyTensor, LazyTensors
from mini_engine.models.weights import load_model, load_tokenizer, open_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mini_engine.errors import ModelLoadError, WeightFileError
from mini_engine.models.config import ModelConfig
from mini_engine.parts import Parts
from tests.models.families import FAMILIES, our_model, transformers_model
from tests.models.limits import memory_limit


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
    """Every tensor is read when its turn comes, and let go before the turn after the next."""
    transformers_model("llama").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    alive: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()
    most_alive: dict[str, int] = {}

    def watched(name: str, entry: LazyTensor) -> LazyTensor:
        def read() -> torch.Tensor:
            alive[name] = tensor = entry.read()
            most_alive[name] = len(alive)
            return tensor

        return replace(entry, read=read)

    entries = open_safetensors(tmp_path / "model.safetensors")
    tensors = LazyTensors({name: watched(name, entry) for name, entry in entries.items()})
    load_model(replace(checkpoint, tensors=tensors), Parts(), torch.float32)
    assert most_alive.keys() == entries.keys() and max(most_alive.values()) <= 2


def test_the_tokenizer_and_its_template_come_along(folder: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert tokenizer("abba").input_ids == [0, 1, 1, 0]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    assert type(tokenizer) is type(AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(7, 8, (7,)), ([7, 9], 8, (7, 9)), (None, 8, (8,)), (None, [3, 4], (3, 4)), (None, None, (2,))],
)
def test_the_end_of_a_text_is_known(generation: Any, config: Any, expected: tuple[int, ...], folder: Path) -> None:
    """The generation configuration wins, then the configuration, then the tokenizer."""
    edit(folder / "generation_config.json", eos_token_id=generation)
    edit(folder / "config.json", eos_token_id=config)
    assert open_checkpoint(folder).eos_token_ids == expected


def test_without_a_tokenizer_a_model_still_opens(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "config.json", eos_token_id=None)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.eos_token_ids == ()
    with pytest.raises(ModelLoadError, match=r"no tokenizer: add its tokenizer\.json"):
        load_tokenizer(checkpoint)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": 1}', '{"model": {"type": "BPE"}}', "\x00" * 50])
@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "LlamaTokenizer", "NoSuchTokenizer"])
def test_a_broken_tokenizer_is_a_typed_error(content: str, named: str, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(content)
    edit(folder / "tokenizer_config.json", tokenizer_class=named)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(open_checkpoint(folder))


def test_a_tokenizer_that_panics_is_a_typed_error(folder: Path) -> None:
    """The library is written in Rust: an index out of range there is no Exception in Python."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] |= {"continuing_subword_prefix": "much longer", "merges": [["a", "b"]]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match="no usable tokenizer"):
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
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin, a pickle.*convert it to safetensors"):
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
        with pytest.warns(UserWarning, match="code of its own"):
            checkpoint = open_checkpoint(folder)
        load_model(checkpoint, Parts(), torch.float32)
        try:
            load_tokenizer(checkpoint)
        except ModelLoadError:
            assert name == "T"
    assert not (tmp_path / "boom").exists()


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    (folder / "model.safetensors").rename(secret)
    (folder / "model.safetensors").symlink_to(secret)
    with pytest.raises(WeightFileError, match="link out of its folder"):
        open_checkpoint(folder)


def test_an_index_cannot_lead_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    for target in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        index = {"weight_map": dict.fromkeys(tensors, target)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(WeightFileError, match="no safetensors file in its folder"):
            open_checkpoint(folder)


def test_a_linked_folder_and_a_link_inside_are_fine(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "model.safetensors").symlink_to("weights.safetensors")
    (tmp_path / "link").symlink_to(folder)
    load_model(open_checkpoint(tmp_path / "link"), Parts(), torch.float32)


def test_one_file_of_another_name_will_do_but_not_two(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    load_model(open_checkpoint(folder), Parts(), torch.float32)
    save_file({"x": torch.ones(1)}, folder / "more.safetensors")
    with pytest.raises(ModelLoadError, match=r"2 safetensors files.*index\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["no/such/model", "nothing-here", "", "/no/such/folder", "../x", "a b/c", "-x/y"])
def test_a_model_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=r"smollm2-135m-instruct|config\.json") as caught:
        open_checkpoint(name)
    assert "\n" not in str(caught.value)


def test_what_is_no_model_says_what_is_missing(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no \.gguf file: give the folder"):
        open_checkpoint(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no safetensors file"):
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


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a": 1, "a": 2}', b'{"a": NaN}']
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_damaged_json_is_refused(content: bytes, name: str, folder: Path) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(WeightFileError, match=name):
        open_checkpoint(folder)


def test_a_huge_configuration_is_not_read(folder: Path) -> None:
    os.truncate(folder / "config.json", 2**34)
    with memory_limit(2**26), pytest.raises(WeightFileError, match="JSON has"):
        open_checkpoint(folder)


def test_a_generation_configuration_with_bad_ids_is_refused(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[1, "x"])
    with pytest.raises(WeightFileError, match="eos_token_id"):
        open_checkpoint(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
