#!/usr/bin/env python3
"""Writes tests/golden/ops.safetensors: what PyTorch says about the ops that it has too.

    python3 tests/reference.py            (needs torch; run by hand, the file is in the repository)

For each case N the file holds its inputs N.in<j>, results N.out<k>, gradients of the results
N.dout<k> and of the inputs N.din<j>, and in its metadata "N" = "op;arguments". Inputs are f32;
PyTorch computes in f64, and what is stored is rounded once.
"""
import json
import math
import struct

import torch
import torch.nn.functional as F

torch.manual_seed(20240229)
tensors, metadata = {}, {}


def n(*shape):
    return torch.randn(*shape).double()


def p(*shape):
    return (0.5 + 1.5 * torch.rand(*shape)).double()


def i(limit, *shape):
    return torch.randint(0, limit, shape)


def put(name, t):
    t = t.detach()
    if t.is_floating_point():
        t = t.float()
    tensors[name] = t.contiguous()


def case(op, args, fn, *inputs):
    """fn(*inputs) with None for an absent input; everything floating point wants a gradient."""
    key = "%03d" % sum(1 for k in metadata if k.isdigit())
    metadata[key] = op + ";" + args
    leaves = [t if t is None or not t.is_floating_point() else t.float().double().requires_grad_()
              for t in inputs]
    out = fn(*leaves)
    out = list(out) if isinstance(out, (tuple, list)) else [out]
    outs, douts = [], []
    for k, y in enumerate(out):
        put(f"{key}.out{k}", y)
        if y.is_floating_point() and y.requires_grad:
            dy = torch.randn(y.shape).double()
            put(f"{key}.dout{k}", dy)
            outs.append(y)
            douts.append(dy.float().double())
    for j, t in enumerate(leaves):
        if t is not None:
            put(f"{key}.in{j}", t)
    if outs:
        torch.autograd.backward(outs, douts)
    for j, t in enumerate(leaves):
        if t is not None and t.grad is not None:
            put(f"{key}.din{j}", t.grad)


# ---- element-wise
for name in ("add", "sub", "mul", "maximum", "minimum"):
    case(name, "", getattr(torch, name), n(2, 3), n(3))
case("div", "", torch.div, n(2, 3), p(2, 1))
case("pow", "", torch.pow, p(2, 3), n(3))
for name in ("neg", "abs", "sign", "square", "exp", "tanh", "sigmoid", "erf", "relu"):
    case(name, "", getattr(torch, name), n(3, 4))
for name in ("reciprocal", "log", "sqrt", "rsqrt"):
    case(name, "", getattr(torch, name), p(3, 4))
case("gelu", "", F.gelu, 3 * n(4, 4))
case("gelu_tanh", "", lambda x: F.gelu(x, approximate="tanh"), 3 * n(4, 4))
case("silu", "", F.silu, 3 * n(4, 4))
case("clamp", "lo=-0.5 hi=0.75", lambda x: x.clamp(-0.5, 0.75), n(3, 4))
case("where", "", torch.where, i(2, 2, 3).bool(), n(2, 3), n(3))
case("masked_fill", "value=-1.5", lambda x, m: x.masked_fill(m, -1.5), n(2, 3), i(2, 3).bool())
for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    case(name, "", getattr(torch, name), i(3, 3, 4), i(3, 4))
for name in ("logical_and", "logical_or", "logical_xor"):
    case(name, "", getattr(torch, name), i(2, 3, 4), i(2, 4))
case("logical_not", "", torch.logical_not, i(2, 3, 4))
case("isfinite", "", torch.isfinite, torch.tensor([1.0, math.inf, -math.inf, math.nan]).double())
case("cast", "dtype=i64", lambda x: x.long(), 3 * n(3, 4))
case("cast", "dtype=bool", lambda x: x.bool(), i(2, 3, 4))

# ---- products
for a, b in (((2, 3), (3, 4)), ((2, 2, 3), (3, 4)), ((2, 1, 2, 3), (3, 3, 2)), ((3,), (3,)),
             ((2, 3), (3,)), ((3,), (2, 3, 2)), ((2, 2, 3), (3,))):
    case("matmul", "", torch.matmul, n(*a), n(*b))
acts = (lambda z: z, F.relu, F.gelu, lambda z: F.gelu(z, approximate="tanh"), F.silu)
for k, act in enumerate(acts):
    case("linear", f"act={k}", lambda x, w, b: act(F.linear(x, w, b)), n(2, 3, 4), n(5, 4), n(5))
case("linear", "", lambda x, w: F.linear(x, w), n(3, 4), n(5, 4))

# ---- reductions
for dims, args in (((0, 1, 2), ""), ((1,), "dims=1"), ((0, 2), "dims=0,-1 keepdim=true")):
    keep = "keepdim" in args
    case("sum", args, lambda x: x.sum(dims, keepdim=keep), n(2, 3, 4))
    case("mean", args, lambda x: x.mean(dims, keepdim=keep), n(2, 3, 4))
    case("var", args, lambda x: x.var(dims, keepdim=keep), n(2, 3, 4))
    case("max", args, lambda x: x.amax(dims, keepdim=keep), n(2, 3, 4))
    case("min", args, lambda x: x.amin(dims, keepdim=keep), i(4, 2, 3, 4).double())  # ties
    case("logsumexp", args, lambda x: torch.logsumexp(x, dims, keepdim=keep), 4 * n(2, 3, 4))
case("var", "dims=1 correction=0", lambda x: x.var(1, correction=0), n(2, 5))
case("sum", "dims=0", lambda x: x.sum(0), i(2, 3, 4).bool())
case("argmax", "dims=1", lambda x: x.argmax(1), n(3, 5))
case("argmin", "", lambda x: x.argmin(), n(3, 5))
case("any", "dims=1", lambda x: x.any(1), i(2, 5, 2).bool())
case("all", "dims=0 keepdim=true", lambda x: x.all(0, keepdim=True), i(2, 2, 5).bool())
case("cumsum", "dim=1", lambda x: x.cumsum(1), n(3, 5))

# ---- rows of the last dimension
case("softmax", "", lambda x: x.softmax(-1), 3 * n(3, 5))
case("softmax", "dim=1", lambda x: x.softmax(1), 3 * n(2, 3, 4))
case("log_softmax", "", lambda x: x.log_softmax(-1), 3 * n(3, 5))
case("log_softmax", "dim=0", lambda x: x.log_softmax(0), 3 * n(3, 4))
case("layer_norm", "", lambda x, w, b: F.layer_norm(x, (5,), w, b), n(2, 3, 5), n(5), n(5))
case("layer_norm", "eps=0.01", lambda x: F.layer_norm(x, (5,), eps=0.01), n(3, 5))
case("rms_norm", "", lambda x, w: F.rms_norm(x, (5,), w, 1e-6), n(3, 5), n(5))


def cross_entropy(ignore=-100, smoothing=0.0, z=0.0):
    def fn(x, t):
        loss = F.cross_entropy(x, t, reduction="none", ignore_index=ignore,
                               label_smoothing=smoothing)
        return loss + z * torch.logsumexp(x, -1) ** 2 * (t != ignore)
    return fn


case("cross_entropy_each", "", cross_entropy(), 2 * n(4, 6), i(6, 4))
case("cross_entropy_each", "ignore_index=2", cross_entropy(2), 2 * n(6, 4),
     torch.tensor([0, 2, 1, 2, 3, 0]))
case("cross_entropy_each", "ignore_index=1 label_smoothing=0.1", cross_entropy(1, 0.1),
     2 * n(6, 4), torch.tensor([0, 1, 1, 2, 3, 0]))
case("cross_entropy_each", "label_smoothing=0.2 z_loss=0.05", cross_entropy(-100, 0.2, 0.05),
     2 * n(5, 6), torch.tensor([0, -100, 5, 2, 3]))


# ---- attention: [batch, time, heads, size]; PyTorch has heads before time
def attention(causal=False, window=0, scale=None):
    def fn(q, k, v, mask=None):
        t, s = q.shape[1], k.shape[1]
        row, column = torch.arange(t)[:, None] + s - t, torch.arange(s)[None]
        seen = torch.ones(t, s, dtype=torch.bool)
        if causal:
            seen &= column <= row
        if window:
            seen &= column > row - window
            if not causal:
                seen &= column < row + window
        bias = torch.zeros(t, s, dtype=torch.double).masked_fill(~seen, -math.inf)
        if mask is not None:
            bias = bias + mask.detach()
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                           bias, scale=scale, enable_gqa=q.shape[2] != k.shape[2])
        return y.transpose(1, 2)
    return fn


case("attention", "", attention(), n(2, 3, 2, 4), n(2, 3, 2, 4), n(2, 3, 2, 4))
case("attention", "causal=true", attention(True), n(2, 4, 2, 4), n(2, 4, 2, 4), n(2, 4, 2, 4))
case("attention", "causal=true", attention(True), n(1, 2, 2, 4), n(1, 5, 2, 4), n(1, 5, 2, 4))
case("attention", "causal=true window=2", attention(True, 2), n(1, 5, 4, 4), n(1, 5, 2, 4),
     n(1, 5, 2, 4))
case("attention", "window=2 scale=0.3", attention(False, 2, 0.3), n(1, 5, 2, 4), n(1, 5, 2, 4),
     n(1, 5, 2, 4))
case("attention", "causal=true", attention(True), n(1, 3, 2, 4), n(1, 3, 1, 4), n(1, 3, 1, 4),
     n(2, 1, 3))


def packed(heads, kv_heads):
    def fn(x):
        q, k, v = x.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), 2)
        return attention(True)(q, k, v).flatten(2)
    return fn


case("attention_packed", "heads=4 kv_heads=2 causal=true", packed(4, 2), n(2, 3, 24))


# ---- rotary embedding, by its formula (RoFormer, arXiv:2104.09864 3.2)
def rope(theta=10000.0, first=0, rotated=None, interleaved=False, positions=None):
    def fn(x, at=None):
        r = rotated or x.shape[-1]
        t = at if at is not None else torch.arange(first, first + x.shape[1])
        angle = t.double()[:, None] * theta ** (-torch.arange(0, r, 2).double() / r)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        part, rest = x[..., :r], x[..., r:]
        a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        a, b = a * cos - b * sin, b * cos + a * sin
        turned = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
        return torch.cat((turned, rest), -1)
    return fn


case("rope", "", rope(), n(2, 3, 2, 4))
case("rope", "theta=100 first=7 n_rotated=4 interleaved=true", rope(100.0, 7, 4, True),
     n(1, 3, 2, 6))
case("rope", "", rope(), n(1, 3, 2, 4), torch.tensor([5, 0, 9]))

# ---- tables, movement, indices
case("embedding", "", lambda w, t: F.embedding(t, w), n(5, 3), i(5, 2, 4))
case("reshape", "shape=-1,3", lambda x: x.reshape(-1, 3), n(3, 4))
for name, args, fn in (
        ("view", "shape=2,-1", lambda x: x.view(2, -1)),
        ("flatten", "first=1", lambda x: x.flatten(1)),
        ("permute", "dims=2,0,1", lambda x: x.permute(2, 0, 1)),
        ("transpose", "dim0=0 dim1=-1", lambda x: x.transpose(0, -1)),
        ("t", "", lambda x: x.mT),
        ("slice", "dim=2 start=-3 stop=4 step=2", lambda x: x[:, :, -3:4:2]),
        ("select", "dim=1 index=-2", lambda x: x[:, -2]),
        ("unsqueeze", "dim=-2", lambda x: x.unsqueeze(-2)),
        ("diagonal", "offset=1 dim0=1 dim1=2", lambda x: x.diagonal(1, 1, 2)),
        ("flip", "dims=0,2", lambda x: x.flip(0, 2)),
        ("tile", "times=2,1,3", lambda x: x.tile(2, 1, 3)),
        ("pad", "pads=1,2,0,1 value=0.5", lambda x: F.pad(x, (1, 2, 0, 1), value=0.5)),
        ("roll", "shift=-3 dim=2", lambda x: x.roll(-3, 2)),
        ("tril", "diagonal=-1", lambda x: x.tril(-1)),
        ("triu", "diagonal=1", lambda x: x.triu(1)),
        ("sort", "dim=1 descending=true", lambda x: x.sort(1, descending=True)),
        ("argsort", "", lambda x: x.argsort(-1)),
        ("topk", "k=2 dim=1 largest=false", lambda x: x.topk(2, 1, largest=False)),
        ("contiguous", "", lambda x: x.clone())):
    case(name, args, fn, n(2, 3, 4))
case("expand", "shape=2,3,-1", lambda x: x.expand(2, 3, -1), n(3, 1))
case("squeeze", "dims=0,2", lambda x: x.squeeze((0, 2)), n(1, 3, 1, 2))
case("cat", "dim=1", lambda *xs: torch.cat(xs, 1), n(2, 3), n(2, 1), n(2, 2))
case("stack", "dim=-1", lambda *xs: torch.stack(xs, -1), n(2, 3), n(2, 3))
case("gather", "dim=1", lambda x, t: x.gather(1, t), n(4, 5), i(5, 3, 2))
case("scatter_add", "dim=0", lambda x, t, s: x.scatter_add(0, t, s), n(4, 3), i(4, 5, 3), n(5, 3))
case("index_select", "dim=1", lambda x, t: x.index_select(1, t), n(2, 4, 3), i(4, 6))
case("one_hot", "classes=5", lambda x: F.one_hot(x, 5), i(5, 2, 3))


# ---- optimizers: parameters after each of 5 steps
def optimizer(name, make, options):
    w = torch.nn.Parameter(torch.randn(7).double().float().double())
    o = make([w])
    metadata[name] = options
    put(f"{name}.p0", w)
    for step in range(1, 6):
        w.grad = torch.randn(7).float().double()
        put(f"{name}.g{step}", w.grad)
        o.step()
        put(f"{name}.p{step}", w)


optimizer("adamw", lambda w: torch.optim.AdamW(w, lr=0.01, betas=(0.9, 0.95), eps=1e-8,
                                               weight_decay=0.1), "0.01 0.9 0.95 1e-8 0.1")
optimizer("sgd", lambda w: torch.optim.SGD(w, lr=0.1), "0.1 0 0 0 0")
optimizer("sgd_momentum", lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, dampening=0.3,
                                                    weight_decay=0.01), "0.1 0.9 0.3 0.01 0")
optimizer("sgd_nesterov", lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, nesterov=True),
          "0.1 0.9 0 0 1")

# ---- the file
names = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
header, blob = {"__metadata__": metadata}, b""
for name, t in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
    raw = t.numpy().tobytes()
    header[name] = {"dtype": names[t.dtype], "shape": list(t.shape),
                    "data_offsets": [len(blob), len(blob) + len(raw)]}
    blob += raw
words = json.dumps(header).encode()
words += b" " * (-len(words) % 8)
with open("tests/golden/ops.safetensors", "wb") as f:
    f.write(struct.pack("<Q", len(words)) + words + blob)
print(len(metadata), "cases,", len(tensors), "tensors,", 8 + len(words) + len(blob), "bytes")
