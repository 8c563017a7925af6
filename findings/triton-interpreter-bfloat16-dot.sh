#!/usr/bin/env bash
# Triton 3.7.1: in the interpreter (TRITON_INTERPRET=1), tl.dot of bfloat16 tiles multiplies the bit patterns, so its
# result has nothing to do with the product. float32 tiles are right. No message says so.
# Expected: the product, or an error. Remedy: test kernels with tl.dot in float32 in the interpreter.
# Seen: a relative error of 6.6e-08 for float32 and of 4.2e+09 for bfloat16.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 triton==3.7.1 numpy==2.4.6
cat > "$folder/kernel.py" <<'PY'
import torch, triton
import triton.language as tl

@triton.jit
def product(a, b, out):
    index = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + index, tl.dot(tl.load(a + index), tl.load(b + index)))

print(f"triton {triton.__version__}, torch {torch.__version__}")
errors = {}
for dtype in (torch.float32, torch.bfloat16):
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 16).to(dtype)
    out = torch.empty(16, 16)
    product[(1,)](a, b, out)
    exact = a.double() @ b.double()
    errors[dtype] = float((out - exact).norm() / exact.norm())
    print(f"  {str(dtype):15} relative error {errors[dtype]:.1e}")
bits = [tile.view(torch.int16).double() % 2**16 for tile in (a, b)]  # of the bfloat16 tiles, as unsigned integers
print(f"  product of the bit patterns: relative difference {float((out / (bits[0] @ bits[1]) - 1).abs().max()):.1e}")
assert errors[torch.float32] < 1e-5 and errors[torch.bfloat16] > 1, "the behavior has changed"
PY
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/kernel.py"
