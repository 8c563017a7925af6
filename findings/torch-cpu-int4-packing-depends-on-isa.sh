#!/usr/bin/env bash
# torch 2.13.0: on an x86 CPU, the bytes of _convert_weight_to_int4pack_for_cpu depend on the instruction set (AVX512,
# AVX2, or neither), and _weight_int4pack_mm_for_cpu accepts bytes that were packed for another one: wrong numbers, no
# error.
# Expected: the same bytes, or an error. Remedy: pack after every start, and never store packed weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/multiply.py" <<'PY'
"""Multiply by int4 weights that this process packed, and by those that the first process packed."""
import pathlib, sys, torch

torch.manual_seed(0)
q = torch.randint(0, 16, (128, 256), dtype=torch.int32)
x = torch.randn(4, 256).bfloat16()
scales_and_offsets = torch.stack((torch.ones(8, 128), torch.zeros(8, 128)), dim=-1).bfloat16()
wanted = x.double() @ (q.double() - 8).T

def error(packed):
    y = torch._weight_int4pack_mm_for_cpu(x, packed, 32, scales_and_offsets)
    return ((y.double() - wanted).norm() / wanted.norm()).item()

path, own = pathlib.Path(sys.argv[1]), torch._convert_weight_to_int4pack_for_cpu(q, 1)
is_first = not path.exists()
if is_first:
    torch.save(own, path)
errors = error(own), error(torch.load(path))
name = torch.backends.cpu.get_cpu_capability()
print(f"  {name:7}: relative error {errors[0]:.0e} with its own bytes, {errors[1]:.0e} with those of the first process")
assert errors[0] < 0.01 and (errors[1] < 0.01) == is_first, "the behavior has changed"
PY
python="$folder/venv/bin/python"
"$python" -c 'import torch; print("torch", torch.__version__)'
for capability in default avx2; do
  ATEN_CPU_CAPABILITY=$capability "$python" "$folder/multiply.py" "$folder/packed.pt"
done
