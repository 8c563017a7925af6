"""Run attention of one layer once between the profiler's start and stop, for `ncu --profile-from-start off`.

python experiments/07_cascade_vs_flat/one_layer.py flat|cascade REQUESTS SHARED OWN
"""

import sys

import torch
from run import CASCADE, FLAT, SETTINGS, Case, Step


def main(way: str, *tokens: str) -> None:
    step = Step(Case(*map(int, tokens)), SETTINGS["cuda"], torch.device("cuda"), page_size=16)
    name, batch = {FLAT: ("flashinfer", step.flat), CASCADE: ("cascade", step.cascade)}[way]
    run = step.backend(name, batch)
    run()  # kernels are loaded at their first launch
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    main(*sys.argv[1:])
