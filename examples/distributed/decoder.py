# decoder.py
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fdora.functional import DoraLayer, dora_init, dora_linear, dora_linear_group, dora_mlp

WIDTH, HEAD, HIDDEN, VOCABULARY, RANK, S = 64, 16, 128, 32, 4, 2.0
COLUMNS = ("o", "down")  # what tensor parallelism cuts by columns; all others by rows
SHAPES = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        W = {n: torch.randn(shape) / shape[1] ** 0.5 for n, shape in SHAPES.items()}
        params = {n: dora_init(w, RANK) for n, w in W.items()}
        frozen = {n: torch.nn.Parameter(w, requires_grad=False) for n, w in W.items()}
        self.W = torch.nn.ParameterDict(frozen)
        self.A, self.B, self.m = (torch.nn.ParameterDict({n: p[i] for n, p in params.items()}) for i in range(3))
        self.norms = {}  # c of each layer, once per step; without it each call computes its own

    def forward(self, x):
        q, k, v = dora_linear_group(rms(x), self.layers("qkv"))
        (o,) = self.layers("o")
        x = x + whole(dora_linear(attention(q, k, v), *o[:4], s=o.s, norm=o.norm))
        return x + whole(dora_mlp(rms(x), *self.layers(("gate", "up", "down"))))

    def layers(self, names):
        return [DoraLayer(self.W[n], self.A[n], self.B[n], self.m[n], S, norm=self.norms.get(n)) for n in names]

    def parallelize(self, mesh):
        """Tensor parallel over ``mesh``: rows of q, k, v, gate and up, columns of o and down."""
        for kind in ("W", "A", "B", "m"):
            for n, p in (values := getattr(self, kind)).items():
                cut = {"W": Shard(1), "A": Shard(1)} if n in COLUMNS else {"W": Shard(0), "B": Shard(0), "m": Shard(0)}
                p = distribute_tensor(p.detach(), mesh, [cut.get(kind, Replicate())])
                values[n] = torch.nn.Parameter(p, requires_grad=kind != "W")


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def whole(y):
    """The sum of what the processes of tensor parallelism have."""
    return y.redistribute(placements=[Replicate()]) if isinstance(y, DTensor) else y


def attention(q, k, v):
    if isinstance(q, DTensor):  # each process has its heads
        y = attention(*(t.to_local() for t in (q, k, v)))
        return DTensor.from_local(y, q.device_mesh, q.placements)
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Decoder(torch.nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.E = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH), requires_grad=False)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, ids, tp=None):
        x = F.embedding(ids, self.E)
        x = x if tp is None else DTensor.from_local(x, tp, [Replicate()])
        for block in self.blocks:
            x = block(x)
        return F.linear(rms(x if tp is None else x.to_local()), self.E) / WIDTH**0.5


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
