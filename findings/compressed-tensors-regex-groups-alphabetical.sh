#!/usr/bin/env bash
# compressed-tensors 0.20.0: when the regular expressions of two groups match a module, the expression that comes first
# in the alphabet counts. The order of the groups in the configuration has no effect.
# Expected: the first or the last group of the configuration, or an error. Remedy: expressions that do not overlap.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 compressed-tensors==0.20.0
"$folder/venv/bin/python" - <<'PY'
import compressed_tensors, torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from transformers import LlamaConfig, LlamaForCausalLM


def bits_of(patterns):
    """The bits of up_proj and down_proj, with a group for each pattern."""
    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=32)
    model, groups = LlamaForCausalLM(LlamaConfig(**shape)), {}
    for index, pattern in enumerate(patterns):
        weights = {"num_bits": 4 if "mlp" in pattern else 8, "type": "int", "strategy": "channel"}
        groups[f"group_{index}"] = {"targets": [pattern], "weights": weights}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups))
    mlp = model.model.layers[0].mlp
    return [module.quantization_scheme.weights.num_bits for module in (mlp.up_proj, mlp.down_proj)]


patterns = ["re:.*mlp.*", "re:.*up_proj.*", "re:.*down_proj.*"]
print(f"compressed-tensors {compressed_tensors.__version__}; mlp: 4 bits, up_proj and down_proj: 8 bits")
found = [bits_of(patterns), bits_of(patterns[::-1])]
for order, (up, down) in zip(("mlp first", "mlp last"), found):
    print(f"  {order:9}: up_proj has {up} bits, down_proj {down}")
assert found == [[4, 8], [4, 8]], "the behavior has changed"
PY
