"""Batch-1 decode step of Qwen3-0.6B's shape in five CUDA kernels a layer (gemv.cu, decode_attention.cu), one graph, PDL."""
import ctypes, subprocess, sys, itertools, time
from pathlib import Path
import torch
HERE = Path(__file__).parent
D, L, HQ, HK, HD, F, V = 1024, 28, 16, 8, 128, 3072, 151936
QKV = (HQ + 2 * HK) * HD
dev, bf = "cuda", torch.bfloat16
PAGE = 16

def build(src, name, *defs):
    out = f"/tmp/{name}.so"
    subprocess.run(["nvcc", "-std=c++17", "-O3", "-arch=sm_90a", "-shared", "-Xcompiler", "-fPIC", *[f"-D{d}" for d in defs], "-o", out, str(HERE / src)], check=True)
    return ctypes.CDLL(out)

class Params(ctypes.Structure):
    _fields_ = [(n, ctypes.c_void_p) for n in ("qkv", "qw", "kw", "cos", "sin", "k", "v")] + [(n, ctypes.c_int64) for n in ("ps", "ts", "hs")] + [
        (n, ctypes.c_void_p) for n in ("pages", "position", "out")] + [("hk", ctypes.c_int), ("page", ctypes.c_int), ("scale", ctypes.c_float), ("eps", ctypes.c_float)]

torch.manual_seed(0)
def mk(*s): return (torch.randn(*s, device=dev) * 0.02).to(bf)
CTX = int(sys.argv[1]) if len(sys.argv) > 1 else 384
NP = (CTX + 2 * PAGE) // PAGE + 8
perm = torch.randperm(NP, device=dev).int()
layers = [dict(n1=torch.rand(D, device=dev).to(bf) + 0.5, n2=torch.rand(D, device=dev).to(bf) + 0.5, qn=torch.rand(HD, device=dev).to(bf) + 0.5, kn=torch.rand(HD, device=dev).to(bf) + 0.5,
               qkv=mk(QKV, D), o=mk(D, HQ * HD), gu=mk(2 * F, D), dn=mk(D, F), k=torch.randn(NP, PAGE, HK, HD, device=dev).to(bf), v=torch.randn(NP, PAGE, HK, HD, device=dev).to(bf)) for _ in range(L)]
emb = mk(V, D); fn = torch.ones(D, device=dev, dtype=bf)
inv = 1e6 ** (-torch.arange(0, HD, 2, device=dev) / HD)
cos, sin = (CTX * inv).cos().float(), (CTX * inv).sin().float()
pos = torch.tensor([CTX], device=dev)
x0 = mk(D) * 50; x = x0.clone(); qkv = torch.empty(QKV, device=dev, dtype=bf); att = torch.empty(HQ * HD, device=dev, dtype=bf); act = torch.empty(F, device=dev, dtype=bf)
logits = torch.empty(V, device=dev, dtype=bf)
P = lambda t: ctypes.c_void_p(t.data_ptr())
EPS = ctypes.c_float(1e-6)

def run(g, a, only=None):
    s = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    for i, w in enumerate(layers):
        if only in (None, "qkv"): g.gemv_qkv(P(x), P(w["n1"]), EPS, P(w["qkv"]), P(qkv), QKV, s)
        if only in (None, "att"):
            p = Params(qkv.data_ptr(), w["qn"].data_ptr(), w["kn"].data_ptr(), cos.data_ptr(), sin.data_ptr(), w["k"].data_ptr(), w["v"].data_ptr(), PAGE * HK * HD, HK * HD, HD, perm.data_ptr(), pos.data_ptr(), att.data_ptr(), HK, PAGE, HD ** -0.5, 1e-6)
            assert a.launch_decode_attention(ctypes.byref(p), HD, HQ // HK, s) == 0
        if only in (None, "o"): g.gemv_o(P(att), None, EPS, P(w["o"]), P(x), D, s)
        if only in (None, "gate"): g.gemv_gate(P(x), P(w["n2"]), EPS, P(w["gu"]), P(act), F, s)
        if only in (None, "down"): g.gemv_down(P(act), None, EPS, P(w["dn"]), P(x), D, s)
    if only in (None, "head"): g.gemv_head(P(x), P(fn), EPS, P(emb), P(logits), V, s)

def ref():
    import torch.nn.functional as Fn
    def rn(t, w): return (t.float() * torch.rsqrt(t.float().pow(2).mean(-1, keepdim=True) + 1e-6)) * w.float()
    cur = x0.float()
    for w in layers:
        q, k, v = (w["qkv"].float() @ rn(cur, w["n1"])).view(-1, HD).split([HQ, HK, HK])
        def rot(t): a, b = t[..., :64], t[..., 64:]; return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        q, k = rot(rn(q, w["qn"])), rot(rn(k, w["kn"]))
        K = w["k"][perm.long()].reshape(-1, HK, HD)[:CTX].float(); Vv = w["v"][perm.long()].reshape(-1, HK, HD)[:CTX].float()
        K = torch.cat((K, k[None])).repeat_interleave(2, 1); Vv = torch.cat((Vv, v[None])).repeat_interleave(2, 1)
        p = (torch.einsum("hd,nhd->hn", q, K) * HD ** -0.5).softmax(-1)
        cur = cur + w["o"].float() @ torch.einsum("hn,nhd->hd", p, Vv).flatten()
        g, u = (w["gu"].float() @ rn(cur, w["n2"])).split(F)
        cur = cur + w["dn"].float() @ (Fn.silu(g) * u)
    return cur, emb.float() @ rn(cur, fn)

def bench(g, a, only=None):
    st = torch.cuda.Stream()
    with torch.cuda.stream(st): run(g, a, only)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): run(g, a, only)
    for _ in range(20): graph.replay()
    torch.cuda.synchronize()
    b, e = torch.cuda.Event(True), torch.cuda.Event(True); best = 1e9
    for _ in range(5):
        b.record()
        for _ in range(50): graph.replay()
        e.record(); torch.cuda.synchronize(); best = min(best, b.elapsed_time(e) / 50 * 1e3)
    return best

t0 = time.time(); a = build("decode_attention.cu", "att"); g = build("gemv.cu", "gemv0"); print(f"compiled in {time.time() - t0:.1f} s", flush=True)
want, wl = ref()
x.copy_(x0); run(g, a); torch.cuda.synchronize()
print("hidden rel err", ((x.float() - want).norm() / want.norm()).item(), "logits", ((logits.float() - wl).norm() / wl.norm()).item(), flush=True)
bytes_ = sum(t.nbytes for w in layers for n, t in w.items() if n in ("qkv", "o", "gu", "dn")) + emb.nbytes + L * 2 * CTX * HK * HD * 2
print(f"bytes {bytes_ / 1e9:.3f} GB, bound at 4.3 TB/s {bytes_ / 4.3e12 * 1e6:.0f} us", flush=True)
print({n: round(bench(g, a, n) / (1 if n == "head" else L), 2) for n in ("qkv", "att", "o", "gate", "down", "head")}, flush=True)
us = bench(g, a); print(f"base {us:.1f} us {1e6 / us:.0f} tok/s", flush=True)
if len(sys.argv) > 2:
    for warps, q, o, ga, d, h in ((4, 2, 1, 1, 1, 4), (4, 4, 1, 2, 1, 8), (8, 4, 1, 2, 1, 4), (8, 2, 1, 1, 1, 4), (2, 4, 2, 2, 2, 4), (4, 2, 2, 2, 2, 4), (4, 4, 2, 4, 2, 4), (1, 4, 2, 2, 1, 4), (2, 2, 1, 1, 1, 4)):
        try:
            g = build("gemv.cu", f"gemv_{warps}{q}{o}{ga}{d}{h}", f"GEMV_WARPS={warps}", f"R_QKV={q}", f"R_O={o}", f"R_GATE={ga}", f"R_DOWN={d}", f"R_HEAD={h}")
            us = bench(g, a); print(f"warps {warps} qkv {q} o {o} gate {ga} down {d} head {h}: {us:.1f} us {1e6 / us:.0f} tok/s", flush=True)
        except Exception as e: print(warps, q, o, ga, d, type(e).__name__, str(e)[:200], flush=True)
