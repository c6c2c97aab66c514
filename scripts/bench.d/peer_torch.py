"""PyTorch's side of the benchmark: a worker that times one case on request.

Usage: peer_torch.py CASE THREADS eager|compile|import

Protocol (the same for every worker, see scripts/bench.d/main.lua): it prints "ready KEY=VALUE ..." or
"missing REASON", then answers each line of its input with one line: "run N" with the seconds of N
runs, "stats" with KEY=VALUE pairs; it ends at the end of its input. f32 throughout, no autocast.
"""

import os
import resource
import sys
import time

PROTOCOL = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what libraries print must not mix with the answers


def say(*words):
    PROTOCOL.write(" ".join(str(word) for word in words) + "\n")


def gpt_model(torch, layers, heads, d, T, vocab):
    """GPT-2: learned positions, pre-norm blocks, tanh gelu, head tied to the embedding, no dropout."""
    nn, F = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

        def forward(self, x):
            B, T, _ = x.shape
            q, k, v = self.qkv(self.ln_1(x)).split(d, dim=2)
            q, k, v = (t.view(B, T, heads, d // heads).transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(B, T, d))
            return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(T, d)
            self.h = nn.ModuleList(Block() for _ in range(layers))
            self.ln_f = nn.LayerNorm(d)
            self.register_buffer("position", torch.arange(T))
            for name, p in self.named_parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.02)
                elif name.endswith("bias"):
                    nn.init.zeros_(p)

        def forward(self, ids, targets):
            x = self.wte(ids) + self.wpe(self.position[: ids.shape[1]])
            for block in self.h:
                x = block(x)
            logits = F.linear(self.ln_f(x), self.wte.weight)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return GPT()


def gpt_step(layers, heads, d, T, B, vocab):
    """A training step: forward, backward, clipping by the global norm, AdamW."""

    def case(torch, mode):
        torch.manual_seed(1)
        model = gpt_model(torch, layers, heads, d, T, vocab)
        forward = torch.compile(model) if mode == "compile" else model
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
        ids = torch.randint(vocab, (B, T + 1))
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

        def step():
            loss = forward(inputs, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.item()

        return step

    return case


def tiny_add(torch, mode):
    """x + y of 4 floats, 10000 times; main.lua divides."""
    x, y = torch.randn(4), torch.randn(4)

    def run():
        for _ in range(10000):
            x + y

    return run


def tiny_mlp(torch, mode):
    """Forward and backward of a 3-layer MLP on 8 values, 1000 times."""
    nn = torch.nn
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    if mode == "compile":
        model = torch.compile(model)
    x = torch.randn(1, 8)

    def run():
        for _ in range(1000):
            model(x).sum().backward()
            model.zero_grad(set_to_none=True)

    return run


ELEMENTS = 64 << 20  # 256 MB of f32
ROW = 1024


def rows(torch):
    return torch.randn(ELEMENTS // ROW, ROW), torch.empty(ELEMENTS // ROW, ROW)


def softmax(torch, mode):
    x, out = rows(torch)
    return lambda: torch.softmax(x, dim=1, out=out)


def layer_norm(torch, mode):
    x, _ = rows(torch)
    gain, bias = torch.ones(ROW), torch.zeros(ROW)

    # The out= form exists only as an overload of the operator; it spares the allocation.
    outputs = torch.empty_like(x), torch.empty(len(x), 1), torch.empty(len(x), 1)

    def run():
        torch.ops.aten.native_layer_norm.out(
            x, [ROW], gain, bias, 1e-5, out0=outputs[0], out1=outputs[1], out2=outputs[2]
        )

    return run


def gelu(torch, mode):
    x, out = rows(torch)
    return lambda: torch.ops.aten.gelu.out(x, approximate="tanh", out=out)


def adamw(torch, mode):
    p = torch.nn.Parameter(torch.randn(ELEMENTS) * 0.02)
    p.grad = torch.randn(ELEMENTS)
    optimizer = torch.optim.AdamW([p], lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return optimizer.step


CASES = {
    "gpt": gpt_step(layers=6, heads=6, d=384, T=256, B=8, vocab=256),
    "gpt2": gpt_step(layers=12, heads=12, d=768, T=64, B=4, vocab=50257),
    "add": tiny_add,
    "mlp": tiny_mlp,
    "softmax": softmax,
    "layer_norm": layer_norm,
    "gelu": gelu,
    "adamw": adamw,
}


def serve(run):
    result = None
    for line in sys.stdin:
        words = line.split()
        if words[0] == "run":
            seconds = []
            for _ in range(int(words[1])):
                start = time.perf_counter()
                result = run()
                seconds.append(time.perf_counter() - start)
            say(*(f"{s:.9f}" for s in seconds))
        elif words[0] == "stats":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            loss = f"loss={result:.4f}" if isinstance(result, float) else ""
            say(f"peak_bytes={peak}", loss)
        else:
            say("unknown", line)


def main():
    name, threads, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    try:
        import torch
    except ImportError as reason:
        say("missing", str(reason).splitlines()[0])
        return
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    try:
        run = CASES[name](torch, mode)
        run()  # compiles, and takes what is taken once
    except Exception as reason:  # a compiler that does not work shows itself here
        say("missing", type(reason).__name__, str(reason).splitlines()[0])
        return
    say(f"ready version={torch.__version__}")
    serve(run)


if __name__ == "__main__":
    main()
