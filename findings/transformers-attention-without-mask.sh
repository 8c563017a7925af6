#!/usr/bin/env bash
# transformers 5.23.0: an attention function that is registered under a name of its own, without a mask function under
# the same name, is called without any mask. A decoder then attends to later tokens, and no message says so.
# Expected: a causal mask, or an error. Remedy: AttentionMaskInterface.register(name, eager_mask) as well.
# Seen: when only later tokens change, the first token's logits change by 0.5 without a registered mask function, and by
# 0 with one and with sdpa.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PY'
import torch, transformers
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import eager_mask

masks = []

def own_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    masks.append(attention_mask)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ value).transpose(1, 2), None

def logits(name, tokens):
    model.set_attn_implementation(name)
    with torch.inference_mode():
        return model(tokens).logits[0, 0]

torch.manual_seed(0)
shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
tokens = torch.tensor([[1, 2, 3, 4]])
later = torch.tensor([[1, 2, 30, 40]])  # the first two tokens are the same

AttentionInterface.register("own", own_attention)
seen = {"sdpa": (logits("sdpa", tokens) - logits("sdpa", later)).abs().max().item()}
seen["own, no mask registered"] = (logits("own", tokens) - logits("own", later)).abs().max().item()
got_no_mask = all(mask is None for mask in masks)
AttentionMaskInterface.register("own", eager_mask)
masks.clear()
seen["own, eager_mask registered"] = (logits("own", tokens) - logits("own", later)).abs().max().item()

print(f"transformers {transformers.__version__}, torch {torch.__version__}")
print("change of the first token's logits when only later tokens change:")
for way, change in seen.items():
    print(f"  {way:27} {change:.1e}")
print("masks passed without a registered mask function:", "none" if got_no_mask else "some")
unmasked, masked = seen["own, no mask registered"], seen["own, eager_mask registered"]
assert seen["sdpa"] < 1e-5 and masked < 1e-5 and got_no_mask and unmasked > 1e-3, "the behavior has changed"
PY
