#!/usr/bin/env bash
# torch 2.13.0: on a CPU, topk(1) and argmax choose different tokens of equal logits. argmax takes the first of a tie;
# topk takes another one for some vocabulary sizes. So greedy decoding and top-k 1 can give different tokens.
# Expected: topk(1) equals argmax. Remedy: break ties yourself (argmax, or a stable sort).
# Seen: "4 tokens: argmax 1, topk(1) 2, stable sort 1"; with 64 tokens all three give 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import torch

print(f"torch {torch.__version__}; three equal largest logits, at 1, 2 and 3")
differ = 0
for size in (4, 64):
    logits = torch.zeros(size)
    logits[1:4] = 1.0
    greedy, top = int(logits.argmax()), int(logits.topk(1).indices)
    stable = int(logits.sort(descending=True, stable=True).indices[0])
    print(f"  {size:3} tokens: argmax {greedy}, topk(1) {top}, stable sort {stable}")
    assert greedy == stable == 1
    differ += greedy != top
assert differ > 0, "the behavior has changed"
PY
