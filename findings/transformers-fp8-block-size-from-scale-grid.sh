#!/usr/bin/env bash
# transformers 5.23.0, without a GPU: a model in FP8 with a scale for each block of 128 x 128 (as DeepSeek's) is
# dequantized with blocks of rows / scales, not of weight_block_size. With 192 rows and 2 scales these are blocks of 96
# rows, so rows 96 to 127 get the second scale, and no message says so.
# Expected: blocks of weight_block_size, the last one smaller. Remedy: dequantize such weights yourself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
FOLDER=$folder "$folder/venv/bin/python" - <<'PY'
import json, os, pathlib, torch, transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
folder = pathlib.Path(os.environ["FOLDER"], "model")
shape = dict(hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=4, vocab_size=32)
model = LlamaForCausalLM(LlamaConfig(**shape))
model.save_pretrained(folder)
tensors, wanted = {}, {}
for name, weight in model.state_dict().items():
    tensors[name] = weight.contiguous()
    if "_proj" in name:
        rows, columns = (-(-size // 128) for size in weight.shape)
        scales = 10.0 ** -torch.arange(1.0, rows * columns + 1).reshape(rows, columns)
        tensors[name] = torch.randn_like(weight).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
        wanted[name] = tensors[name].float() * spread
save_file(tensors, folder / "model.safetensors", {"format": "pt"})
config = json.loads((folder / "config.json").read_text())
method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
(folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))

loaded = LlamaForCausalLM.from_pretrained(folder).state_dict()
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
wrong = {}
for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight"):
    close = torch.isclose(loaded[name].float(), wanted[name], rtol=0.02, atol=0)
    rows = [row for row, is_close in enumerate(close.all(1).tolist()) if not is_close]
    wrong[len(close)] = rows
    print(f"  {name}, {len(close)} rows: wrong rows", f"{rows[0]} to {rows[-1]}" if rows else "none")
assert wrong == {128: [], 192: list(range(96, 128))}, "the behavior has changed"
PY
