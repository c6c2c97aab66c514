"""PyTorch's side of the benchmark of tensor parallelism: the GPT of peer_torch.py cut over the ranks of
torch.distributed by hand, as Megatron-LM does it (arXiv:1909.08053 section 3).

q, k, v by heads and the MLP's first matrix by rows; the matrices behind them by columns, their products
summed; embedding, head (tied) and cross-entropy by classes. A column product's input gradient is summed
while its weight gradient is computed. peer_pipeline.py starts it.
"""


def collectives(torch):
    """Autograd functions: (leave, column, cross_entropy)."""
    from torch import distributed as dist

    class Leave(torch.autograd.Function):
        """The sum over ranks; the gradient as it is."""

        @staticmethod
        def forward(ctx, x):
            x = x.contiguous()
            dist.all_reduce(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Column(torch.autograd.Function):
        """x[N, K] w[M, K]' (+ b[M]): the gradient of x is summed over ranks beside that of w."""

        @staticmethod
        def forward(ctx, x, w, b):
            ctx.save_for_backward(x, w)
            ctx.has_bias = b is not None
            return torch.addmm(b, x, w.t()) if ctx.has_bias else x @ w.t()

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            dx = grad @ w
            sum_of_dx = dist.all_reduce(dx, async_op=True)
            dw = grad.t() @ x
            db = grad.sum(0) if ctx.has_bias else None
            sum_of_dx.wait()
            return dx, dw, db

    class CrossEntropy(torch.autograd.Function):
        """The mean over rows of -log softmax(logits)[target]; this rank has the classes from `first`."""

        @staticmethod
        def forward(ctx, logits, target, first):
            top = logits.amax(1)
            dist.all_reduce(top, op=dist.ReduceOp.MAX)
            p = (logits - top[:, None]).exp_()
            index = target - first
            is_own = (index >= 0) & (index < logits.shape[1])
            index = torch.where(is_own, index, 0)[:, None]
            picked = torch.where(is_own, logits.gather(1, index)[:, 0] - top, 0)
            both = torch.stack([p.sum(1), picked])
            dist.all_reduce(both)
            p /= both[0][:, None]
            ctx.save_for_backward(p, index, is_own)
            return (both[0].log() - both[1]).mean()

        @staticmethod
        def backward(ctx, grad):
            p, index, is_own = ctx.saved_tensors
            p.scatter_add_(1, index, -is_own.to(p.dtype)[:, None])
            return p * (grad / p.shape[0]), None, None

    return Leave.apply, Column.apply, CrossEntropy.apply


def rows_of(weight, rank, ranks, parts=1):
    """A rank's rows: of each of `parts` equal parts its share."""
    import torch

    return torch.cat([part.chunk(ranks)[rank] for part in weight.chunk(parts)]).contiguous()


def cut_model(torch, model, heads, rank, ranks):
    """This rank's part of a whole GPT, as a module; .is_whole(name) says which parameters all have."""
    nn, F = torch.nn, torch.nn.functional
    leave, column, cross_entropy = collectives(torch)

    def by_rows(linear, parts=1):
        w, b = (rows_of(t.data, rank, ranks, parts) for t in (linear.weight, linear.bias))
        return nn.Parameter(w), nn.Parameter(b)

    def by_columns(linear):
        w = linear.weight.data.chunk(ranks, 1)[rank].contiguous()
        return nn.Parameter(w), nn.Parameter(linear.bias.data.clone())

    class Block(nn.Module):
        def __init__(self, whole):
            super().__init__()
            self.ln_1, self.ln_2 = whole.ln_1, whole.ln_2
            self.qkv_w, self.qkv_b = by_rows(whole.qkv, 3)
            self.proj_w, self.proj_b = by_columns(whole.proj)
            self.up_w, self.up_b = by_rows(whole.up)
            self.down_w, self.down_b = by_columns(whole.down)

        def forward(self, x, B, T):  # x[B*T, d]
            q, k, v = column(self.ln_1(x), self.qkv_w, self.qkv_b).view(
                B, T, 3, heads // ranks, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y.transpose(1, 2).reshape(B * T, -1)
            x = x + (leave(y @ self.proj_w.t()) + self.proj_b)
            h = F.gelu(column(self.ln_2(x), self.up_w, self.up_b), approximate="tanh")
            return x + (leave(h @ self.down_w.t()) + self.down_b)

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte_w = nn.Parameter(rows_of(model.wte.weight.data, rank, ranks))
            self.wpe = model.wpe
            self.h = nn.ModuleList(Block(block) for block in model.h)
            self.ln_f = model.ln_f
            self.register_buffer("position", model.position)

        def is_whole(self, name):
            return not name.endswith("_w") and name.split(".")[-1] not in ("qkv_b", "up_b")

        def forward(self, ids, targets):
            B, T = ids.shape
            n = self.wte_w.shape[0]
            index = ids - rank * n
            is_own = (index >= 0) & (index < n)
            x = F.embedding(torch.where(is_own, index, 0), self.wte_w) * is_own[..., None]
            x = (leave(x) + self.wpe(self.position[:T])).view(B * T, -1)
            for block in self.h:
                x = block(x, B, T)
            logits = column(self.ln_f(x), self.wte_w, None)
            return cross_entropy(logits, targets.flatten(), rank * n)

    return Part()


def clip(torch, part, rank, limit):
    """By the norm of the whole model: what all ranks have counts once."""
    squares = torch.zeros(())
    for name, p in part.named_parameters():
        if rank == 0 or not part.is_whole(name):
            squares += p.grad.square().sum()
    torch.distributed.all_reduce(squares)
    factor = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([p.grad for p in part.parameters()], factor)


def tensor_step(torch, shape, rank, ranks):
    from peer_pipeline import make_optimizer
    from peer_torch import gpt_model

    layers, heads, d, T, B, vocab, _ = shape
    torch.manual_seed(1)
    part = cut_model(torch, gpt_model(torch, layers, heads, d, T, vocab), heads, rank, ranks)
    optimizer = make_optimizer(torch, part)
    ids = torch.randint(vocab, (B, T + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step():
        loss = part(inputs, targets)
        loss.backward()
        clip(torch, part, rank, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step
