#!/usr/bin/env python3
"""reference_tensor - a GPT cut in two by hand as Megatron-LM cuts one (arXiv:1909.08053), for
tests/tensor_parallel.lua.

Both parts are computed here in one process, one after the other; what ranks would sum is written as a
sum. Writes tests/golden/tensor_parallel.safetensors, by style ("gelu": LayerNorm, biases, learned
positions, 2 kv heads; "swiglu": RMSNorm, rotary positions, 1 kv head, which both parts have), in f64:
whole weights, tokens, the loss, and for each rank what its layers give and its gradients. Losses and
gradients are those of the uncut model to 1e-14 of the largest, or nothing is written. By hand:
    python3 tests/reference_tensor.py
"""
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

RANKS, V, T, D, LAYERS, HEADS, HIDDEN, BATCH, IGNORED = 2, 11, 6, 8, 2, 4, 12, 3, -100
HEAD = D // HEADS
KV = {"gelu": 2, "swiglu": 1}


def weights(style, generator):
    p = {}

    def normal(name, *shape, mean=0, std=0.3):  # values that f32 has
        p[name] = (mean + torch.randn(*shape, generator=generator) * std).double()

    normal("wte.weight", V, D, std=1)
    if style == "gelu":
        normal("wte.position", T, D)
    for i in range(LAYERS):
        b = f"h.{i}."
        linears = [("attn.qkv", (HEADS + 2 * KV[style]) * HEAD, D), ("attn.proj", D, D)]
        linears += [("mlp.gate", HIDDEN, D)] if style == "swiglu" else []
        linears += [("mlp.up", HIDDEN, D), ("mlp.down", D, HIDDEN)]
        for norm in ("norm1", "norm2"):
            normal(b + norm + ".weight", D, mean=1, std=0.1)
            if style == "gelu":
                normal(b + norm + ".bias", D)
        for name, rows, columns in linears:
            normal(b + name + ".weight", rows, columns)
            if style == "gelu":
                normal(b + name + ".bias", rows)
    normal("ln_f.weight", D, mean=1, std=0.1)
    if style == "gelu":
        normal("ln_f.bias", D)
    return p


def norm_of(p, style, x, name):
    if style == "swiglu":
        return F.rms_norm(x, (D,), p[name + ".weight"], 1e-6)
    return F.layer_norm(x, (D,), p[name + ".weight"], p[name + ".bias"], 1e-5)


def rope(x):  # [B, H, T, head], pairs (i, i + head/2)
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2]).double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def attend(style, qkv, heads, kv):
    q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2)
               for t in qkv.split([heads * HEAD, kv * HEAD, kv * HEAD], -1))
    if style == "swiglu":
        q, k = rope(q), rope(k)
    k, v = (t.repeat_interleave(heads // kv, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


# ---- the whole model, in one piece


def whole_loss(p, style, ids, targets):
    linear = lambda x, n: F.linear(x, p[n + ".weight"], p.get(n + ".bias"))
    x = F.embedding(ids, p["wte.weight"])
    x = x + p["wte.position"] if style == "gelu" else x
    for i in range(LAYERS):
        b = f"h.{i}."
        qkv = linear(norm_of(p, style, x, b + "norm1"), b + "attn.qkv")
        x = x + linear(attend(style, qkv, HEADS, KV[style]), b + "attn.proj")
        h = norm_of(p, style, x, b + "norm2")
        h = F.silu(linear(h, b + "mlp.gate")) * linear(h, b + "mlp.up") if style == "swiglu" else F.gelu(
            linear(h, b + "mlp.up"))
        x = x + linear(h, b + "mlp.down")
    logits = F.linear(norm_of(p, style, x, "ln_f"), p["wte.weight"])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


# ---- the same in two parts


class CopyTo(torch.autograd.Function):
    """Megatron's f: every part gets its x; their gradients are summed, for all."""

    @staticmethod
    def forward(ctx, *parts):
        return tuple(x.clone() for x in parts)

    @staticmethod
    def backward(ctx, *grads):
        return (sum(grads),) * RANKS


class ReduceFrom(torch.autograd.Function):
    """Megatron's g: every part gets the sum; its own gradient passes."""

    @staticmethod
    def forward(ctx, *parts):
        return tuple(sum(parts).clone() for _ in parts)

    @staticmethod
    def backward(ctx, *grads):
        return grads


def runs(name, style, rank):
    """The rows (columns of proj and down) of a weight that a rank has; None: all."""
    if name == "wte.weight":  # 6 and 5 of 11
        return list(range(V))[rank * 6:rank * 6 + 6]
    kind = name.split(".")[-2]
    if kind == "qkv":
        q, kv = HEADS // RANKS * HEAD, max(KV[style] // RANKS, 1) * HEAD
        first = rank * kv if KV[style] > 1 else 0
        k, v = HEADS * HEAD, (HEADS + KV[style]) * HEAD
        return [*range(rank * q, (rank + 1) * q), *range(k + first, k + first + kv),
                *range(v + first, v + first + kv)]
    if name.endswith(("proj.weight", "down.weight")):
        n = (D if kind == "proj" else HIDDEN) // RANKS
        return list(range(rank * n, (rank + 1) * n))
    if kind in ("up", "gate"):
        return list(range(rank * HIDDEN // RANKS, (rank + 1) * HIDDEN // RANKS))
    return None


def cut(name, tensor, style, rank):
    rows = runs(name, style, rank)
    if rows is None:
        return tensor
    return tensor[:, rows] if name.endswith(("proj.weight", "down.weight")) else tensor[rows]


def cut_losses(parts, style, ids, targets, note):
    """The loss as each rank has it; note(path, list) is told what layers give."""
    ranks = range(RANKS)

    def column(xs, name):
        return [F.linear(xs[r], parts[r][name + ".weight"], parts[r].get(name + ".bias")) for r in ranks]

    def row(hs, name):  # the bias once, behind the sum
        ys = ReduceFrom.apply(*[F.linear(hs[r], parts[r][name + ".weight"]) for r in ranks])
        ys = [ys[r] + parts[r].get(name + ".bias", 0) for r in ranks]
        note(name, ys)
        return ys

    def norm(xs, name):
        ys = [norm_of(parts[r], style, xs[r], name) for r in ranks]
        note(name, ys)
        return ys

    def look_up(r):
        w, index = parts[r]["wte.weight"], ids - r * 6
        is_own = (index >= 0) & (index < w.shape[0])
        return F.embedding(torch.where(is_own, index, 0), w) * is_own[..., None]

    xs = ReduceFrom.apply(*[look_up(r) for r in ranks])
    if style == "gelu":
        xs = [xs[r] + parts[r]["wte.position"] for r in ranks]
    note("wte", xs)
    for i in range(LAYERS):
        b = f"h.{i}."
        qkv = column(CopyTo.apply(*norm(xs, b + "norm1")), b + "attn.qkv")
        note(b + "attn.qkv", qkv)
        ys = [attend(style, t, HEADS // RANKS, max(KV[style] // RANKS, 1)) for t in qkv]
        ys = row(ys, b + "attn.proj")
        xs = [xs[r] + ys[r] for r in ranks]
        hs = CopyTo.apply(*norm(xs, b + "norm2"))
        up = column(hs, b + "mlp.up")
        if style == "swiglu":
            gate = [F.silu(t) for t in column(hs, b + "mlp.gate")]
            note(b + "mlp.gate", gate)
            note(b + "mlp.up", up)
            hs = [gate[r] * up[r] for r in ranks]
        else:
            hs = [F.gelu(t) for t in up]
            note(b + "mlp.up", hs)
        ys = row(hs, b + "mlp.down")
        xs = [xs[r] + ys[r] for r in ranks]
    hs = CopyTo.apply(*norm(xs, "ln_f"))
    logits = [F.linear(hs[r], parts[r]["wte.weight"]) for r in ranks]
    note("head", logits)
    top = torch.stack([t.detach().amax(-1) for t in logits]).amax(0)
    sums = ReduceFrom.apply(*[(t - top[..., None]).exp().sum(-1) for t in logits])

    def pick(r):
        index = targets - r * 6
        is_own = (index >= 0) & (index < logits[r].shape[-1])
        return logits[r].gather(-1, torch.where(is_own, index, 0)[..., None])[..., 0] * is_own

    right = ReduceFrom.apply(*[pick(r) for r in ranks])
    counts = targets != IGNORED
    return [((sums[r].log() + top - right[r]) * counts).sum() / counts.sum() for r in ranks]


def run(style, out):
    generator = torch.Generator().manual_seed(5)
    p = {name: t.requires_grad_() for name, t in weights(style, generator).items()}
    tokens = torch.randint(V, (BATCH, T + 1), generator=generator)
    ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    targets[torch.rand(BATCH, T, generator=generator) < 0.3] = IGNORED
    parts = [{name: cut(name, t.detach(), style, r).clone().requires_grad_() for name, t in p.items()}
             for r in range(RANKS)]

    def note(path, values):
        for r, value in enumerate(values):
            out[f"{style}.out.{r}.{path}"] = value.detach().clone().contiguous()

    losses = cut_losses(parts, style, ids, targets, note)
    torch.autograd.backward(losses)
    loss = whole_loss(p, style, ids, targets)
    loss.backward()
    largest = max(t.grad.abs().max().item() for t in p.values())
    worst = max(abs(part - loss).item() for part in losses)
    for name, t in p.items():
        for r in range(RANKS):
            grad = parts[r][name].grad
            if KV[style] < RANKS and ".qkv." in name:  # what both have is summed over them
                shared = sum(part[name].grad[HEADS // RANKS * HEAD:] for part in parts)
                grad = torch.cat([grad[:HEADS // RANKS * HEAD], shared])
            worst = max(worst, (grad - cut(name, t.grad, style, r)).abs().max().item() / largest)
            out[f"{style}.grad.{r}.{name}"] = grad.clone().contiguous()
        out[f"{style}.weight.{name}"] = t.detach().clone()
    assert worst < 1e-14, (style, worst)
    out.update({f"{style}.ids": ids, f"{style}.targets": targets, f"{style}.loss": loss.detach()})
    print(style, loss.item(), "largest gradient", largest, "uncut differs by", worst)


values = {}
for name in ("gelu", "swiglu"):
    run(name, values)
save_file(values, "tests/golden/tensor_parallel.safetensors", {"torch": torch.__version__})
