#!/usr/bin/env bash
# torch 2.13.0: on a CPU, flex_attention returns the log-sum-exp of each row when it runs eagerly, and raises
# NotImplementedError (inside InductorError) when it is compiled. So compiled calls cannot be merged there.
# Expected: the same outputs in both ways. Remedy on a CPU: eager calls, or an LSE computed beside the compiled call.
# Seen: eager, an output of (1, 2, 16, 32) and an LSE of (1, 2, 16); compiled with lse, "InductorError -
# LoweringException: NotImplementedError: torch.compile on CPU only supports inference and `return_lse` is not s[...]".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

q, k, v = torch.randn(3, 1, 2, 16, 32)
print(f"torch {torch.__version__}")
with torch.inference_mode():
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    print("eager: output", tuple(out.shape), "and lse", tuple(aux.lse.shape))
    compiled = torch.compile(flex_attention)
    print("compiled, without lse: output", tuple(compiled(q, k, v).shape))
    try:
        compiled(q, k, v, return_aux=AuxRequest(lse=True))
    except Exception as error:
        message = str(error)
        print("compiled, with lse:", type(error).__name__, "-", message.strip().splitlines()[0][:110])
        assert "NotImplementedError" in message or isinstance(error, NotImplementedError), "another error than before"
    else:
        raise SystemExit("the behavior has changed: the compiled call returned")
PY
