#!/usr/bin/env bash
# torch 2.13.0 (CPU, Linux): operations that use all cores are slower on one thread of a program than on another. OpenMP
# keeps a pool of workers for each thread that has computed, and libgomp lets workers sleep, instead of spin, between two
# operations as soon as all pools together have more threads than there are cores. A pool ends with its thread.
# Expected: the same speed on every thread, since only one computes at a time.
# Seen with 2 cores: 0 sleeps for 3,000 additions on the main thread and 15 us each; 5,980 sleeps and 70 us each on
# another thread while the main one has a pool; 0 and 15 us again if what came before ran on a thread that has ended.
# Remedy: load a model on a thread that ends, if another thread than the main one computes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$folder/sleeps.py" <<'PY'
import os, resource, sys, threading, time
import torch


def work(found, count=3000):
    """Add numbers on all cores, and append how often the threads slept, and the microseconds of an addition."""
    x = torch.ones(100_000 * torch.get_num_threads())
    for _ in range(50):
        x.add(1.0)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, time.perf_counter()
    for _ in range(count):
        x.add(1.0)
    seconds = time.perf_counter() - start
    found.append((resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before, 1e6 * seconds / count))


def on_another_thread():
    found = []
    thread = threading.Thread(target=work, args=(found,))
    thread.start()
    thread.join()
    return found[0]


found = []
if sys.argv[1] == "main":  # the main thread computes first, then another one
    work(found)
    found.append(on_another_thread())
else:  # a thread that ends computes first, then another one
    found = [on_another_thread(), on_another_thread()]
for name, (sleeps, microseconds) in zip(("first", "second"), found):
    print(f"  {sys.argv[1]:>4} first: {name:6} {sleeps:6} sleeps, {microseconds:5.1f} us")
print(f"  torch {torch.__version__}, {os.cpu_count()} cores", file=sys.stderr)
many = found[1][0] > 1000
assert found[0][0] < 300 and many == (sys.argv[1] == "main"), "the behavior has changed, or other programs use the cores"
PY
"$folder/venv/bin/python" "$folder/sleeps.py" main
"$folder/venv/bin/python" "$folder/sleeps.py" apart
