#!/usr/bin/env python3
"""reference_gpt - losses and gradients of small GPTs as PyTorch computes them, for tests/gpt_test.lua.

Writes tests/golden/gpt_<style>.safetensors: initial weights by Rille's names, token ids, the losses of 20
steps of AdamW, the gradients of the first, and the weights after the last. Run by hand:
    python3 tests/reference_gpt.py
"""
import math
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

V, T, D, LAYERS, HEADS, KV, HIDDEN, STEPS, BATCH = 48, 12, 24, 2, 4, 2, 64, 20, 6
LR, BETAS, EPS, DECAY, CLIP = 3e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


def weights(style, generator):
    llama = style == "llama"
    kv = KV if llama else HEADS
    head = D // HEADS
    p = {}

    def normal(name, *shape, std=0.2):
        p[name] = torch.randn(*shape, generator=generator) * std

    normal("wte.weight", V, D)
    if not llama:
        normal("wte.position", T, D)
    for i in range(LAYERS):
        b = f"h.{i}."
        for norm in ("norm1", "norm2"):
            p[b + norm + ".weight"] = 1 + torch.randn(D, generator=generator) * 0.1
            if not llama:
                normal(b + norm + ".bias", D)
        linears = [("attn.qkv", (HEADS + 2 * kv) * head, D), ("attn.proj", D, D)]
        linears += [("mlp.gate", HIDDEN, D)] if llama else []
        linears += [("mlp.up", HIDDEN, D), ("mlp.down", D, HIDDEN)]
        for name, rows, columns in linears:
            normal(b + name + ".weight", rows, columns)
            if not llama:
                normal(b + name + ".bias", rows)
    p["ln_f.weight"] = 1 + torch.randn(D, generator=generator) * 0.1
    if not llama:
        normal("ln_f.bias", D)
    return p


def rope(x):  # [B, H, T, head], pairs (i, i + head/2)
    half = x.shape[-1] // 2
    freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def forward(p, style, ids, targets):
    llama = style == "llama"
    kv, head = (KV if llama else HEADS), D // HEADS
    norm = (lambda x, n: F.rms_norm(x, (D,), p[n + ".weight"], 1e-6)) if llama else (
        lambda x, n: F.layer_norm(x, (D,), p[n + ".weight"], p[n + ".bias"], 1e-5))
    linear = lambda x, n: F.linear(x, p[n + ".weight"], p.get(n + ".bias"))
    x = F.embedding(ids, p["wte.weight"])
    if not llama:
        x = x + p["wte.position"][: ids.shape[1]]
    for i in range(LAYERS):
        b = f"h.{i}."
        q, k, v = linear(norm(x, b + "norm1"), b + "attn.qkv").split(
            [HEADS * head, kv * head, kv * head], -1)
        q, k, v = (t.unflatten(-1, (-1, head)).transpose(1, 2) for t in (q, k, v))
        if llama:
            q, k = rope(q), rope(k)
            k, v = (t.repeat_interleave(HEADS // kv, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).flatten(2), b + "attn.proj")
        h = norm(x, b + "norm2")
        if llama:
            h = F.silu(linear(h, b + "mlp.gate")) * linear(h, b + "mlp.up")
        else:
            h = F.gelu(linear(h, b + "mlp.up"), approximate="tanh")
        x = x + linear(h, b + "mlp.down")
    logits = F.linear(norm(x, "ln_f"), p["wte.weight"])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def run(style):
    generator = torch.Generator().manual_seed(1)
    p = {name: t.requires_grad_() for name, t in weights(style, generator).items()}
    tokens = torch.randint(V, (STEPS, BATCH, T + 1), generator=generator)
    out = {"weight." + name: t.detach().clone() for name, t in p.items()}
    out["tokens"] = tokens
    optimizer = torch.optim.AdamW(
        [{"params": [t for t in p.values() if t.ndim >= 2], "weight_decay": DECAY},
         {"params": [t for t in p.values() if t.ndim < 2], "weight_decay": 0}],
        lr=LR, betas=BETAS, eps=EPS)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = forward(p, style, tokens[step, :, :-1], tokens[step, :, 1:])
        loss.backward()
        if step == 0:
            out.update({"grad." + name: t.grad.clone() for name, t in p.items()})
        norm = math.sqrt(sum(float((t.grad.double() ** 2).sum()) for t in p.values()))
        if norm > CLIP:
            for t in p.values():
                t.grad *= CLIP / norm
        optimizer.step()
        losses.append(loss.item())
    out["losses"] = torch.tensor(losses, dtype=torch.float64)
    save_file(out, f"tests/golden/gpt_{style}.safetensors", {"torch": torch.__version__})
    print(style, losses[0], losses[-1])


for name in ("gpt2", "llama"):
    run(name)
