"""On a GPU: guarded norms of codes, trees of them, and 8-bit products, checked and timed. PYTHONPATH=<worktree> python gpu_quantrest.py"""
import torch
from torch.nn.functional import linear
from fdora.functional import (dora_linear, dora_merge_quantized, dora_norm, dora_norm_state, dora_norm_tree,
                              dora_norm_tree_state)
from fdora.quant import quantize

torch.manual_seed(0)
dev, bf = "cuda", torch.bfloat16


def us(fn, n=20):
    fn(); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n):
            fn()
    g.replay(); torch.cuda.synchronize()
    a, b = torch.cuda.Event(True), torch.cuda.Event(True)
    times = []
    for _ in range(7):
        a.record(); g.replay(); b.record(); b.synchronize(); times.append(1e3 * a.elapsed_time(b) / n)
    return sorted(times)[3]


print("guarded norm, us: plain | changed | unchanged   (dense W: changed, unchanged)")
for N, K, r in ((4096, 4096, 16), (14336, 4096, 64), (8192, 8192, 64), (8192, 8192, 384)):
    D = (torch.randn(N, K, device=dev) / K**0.5).to(bf)
    for kind, how in (("nf4", {"nested": True}), ("fp8", {"block": (128, 128)}), ("int8", {})):
        W = quantize(D, kind, **how)
        for t in (bf, torch.float32):
            A, B = torch.randn(r, K, device=dev, dtype=t) / K**0.5, torch.randn(N, r, device=dev, dtype=t) / 50
            empty, dense_empty = dora_norm_state(W), dora_norm_state(D)
            state, dense_state = dora_norm(W, A, B, s=2.0, state=empty), dora_norm(D, A, B, s=2.0, state=dense_empty)
            assert torch.equal(state.c, dora_norm(W, A, B, s=2.0))
            poison = state._replace(c=state.c + 1)
            assert torch.equal(dora_norm(W, A, B, s=2.0, state=poison).c, poison.c)
            print(N, K, r, kind, str(t)[6:], *(f"{us(f):.1f}" for f in (
                lambda: dora_norm(W, A, B, s=2.0), lambda: dora_norm(W, A, B, s=2.0, state=empty),
                lambda: dora_norm(W, A, B, s=2.0, state=state), lambda: dora_norm(D, A, B, s=2.0, state=dense_empty),
                lambda: dora_norm(D, A, B, s=2.0, state=dense_state))))

weights = {str(i): quantize(torch.randn(1024, 4096, device=dev).to(bf) / 64, "nf4", nested=True) for i in range(28)}
params = {k: (torch.randn(16, 4096, device=dev) / 64, torch.randn(1024, 16, device=dev) / 50) for k in weights}
state = dora_norm_tree(weights, params, s=2.0, state=dora_norm_tree_state(weights))
print("tree of 28, us: computed", f"{us(lambda: dora_norm_tree(weights, params, s=2.0), 2):.0f}",
      "unchanged", f"{us(lambda: dora_norm_tree(weights, params, s=2.0, state=state), 2):.0f}")

print("8-bit products, us: fp8 layer | bf16 layer on decoded W | F.linear bf16 | _scaled_mm rowwise alone; error against bf16")
for M, N, K, r in ((4096, 4096, 4096, 16), (4096, 14336, 4096, 64), (8192, 8192, 8192, 64), (16, 4096, 4096, 16), (1, 14336, 4096, 16)):
    D = (torch.randn(N, K, device=dev) / K**0.5).to(bf)
    A, B = torch.randn(r, K, device=dev, dtype=bf) / K**0.5, torch.randn(N, r, device=dev, dtype=bf) / 50
    x = torch.randn(M, K, device=dev, dtype=bf)
    for block in ("row", (128, 128), None):
        W = quantize(D, "fp8", block=block)
        m = dora_norm(W, A, B, s=2.0).to(bf)
        c, dense = dora_norm(W, A, B, s=2.0), W.dequantize()
        with torch.no_grad():
            y, e, want = (dora_linear(x, W, A, B, m, s=2.0, norm=c, compute=h, backend=b) for h, b in
                          (("fp8", "triton"), ("fp8", "eager"), (None, "auto")))
            assert (y - e).float().norm() / e.float().norm() < 3e-3
            x8, one = x.to(torch.float8_e4m3fn), torch.ones((M, 1), device=dev)
            ws = torch.ones((1, N), device=dev)
            codes = W.tensors[0]
            try:
                alone = us(lambda: torch._scaled_mm(x8, codes.t(), scale_a=one, scale_b=ws, out_dtype=bf))
            except Exception as error:
                alone = float("nan")
            print(M, N, K, r, block, *(f"{us(f):.1f}" for f in (
                lambda: dora_linear(x, W, A, B, m, s=2.0, norm=c, compute="fp8"),
                lambda: dora_linear(x, dense, A, B, m, s=2.0, norm=c), lambda: linear(x, dense))), f"{alone:.1f}",
                f"{((y - want).float().norm() / want.float().norm()).item():.4f}")

W = quantize(torch.randn(4096, 4096, device=dev).to(bf) / 64, "nf4", nested=True)
A, B = torch.randn(16, 4096, device=dev) / 64, torch.randn(4096, 16, device=dev) / 50
merged, error = dora_merge_quantized(W, A, B, 1.1 * dora_norm(W, A, B, s=2.0), s=2.0)
print("merge", merged, error.item())
