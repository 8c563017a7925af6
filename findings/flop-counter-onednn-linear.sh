#!/usr/bin/env bash
# torch 2.13.0: FlopCounterMode counts 0 for a linear layer that torch.compile's freezing hands to oneDNN
# (torch.ops.mkldnn._linear_pointwise), without a warning. The same layer through F.linear is counted.
# Expected: equal counts, or a warning. Remedy: pass FlopCounterMode(custom_mapping={op: formula}).
# Seen: "F.linear 131,072" and "oneDNN's linear 0", where 2 x 8 x 64 x 128 = 131,072.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

x, weight = torch.randn(8, 64), torch.randn(128, 64)
linear = torch.ops.mkldnn._linear_pointwise.default
layers = {"F.linear": lambda: F.linear(x, weight), "oneDNN's linear": lambda: linear(x, weight, None, "none", [], "")}
counts, outputs = {}, []
for name, layer in layers.items():
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        outputs.append(layer())
    counts[name] = counter.get_total_flops()
print(f"torch {torch.__version__}; 2 x 8 x 64 x 128 = {2 * 8 * 64 * 128:,} FLOPs")
for name, count in counts.items():
    print(f"  {name:16} {count:,}")
torch.testing.assert_close(*outputs)
assert counts == {"F.linear": 2 * 8 * 64 * 128, "oneDNN's linear": 0}, "the behavior has changed"
PY
