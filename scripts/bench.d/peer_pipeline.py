"""PyTorch's side of the benchmarks of several ranks: torch.distributed over gloo, 1 thread a rank.

Usage: peer_pipeline.py pp|pp2|zb|dp|tp LAYERS HEADS D T B VOCAB M RANKS

pp: torch.distributed.pipelining, 1F1B, the same split; pp2: interleaved 1F1B, two stages a rank;
zb: interleaved zero bubble, two stages a rank (PyTorch has none of one stage a rank);
dp: DistributedDataParallel; tp: peer_tensor.py.
The first rank answers (scripts/bench.d/worker.lua has the protocol); the others are started by it.
"""

import os
import sys
import tempfile
import time

from peer_tensor import tensor_step
from peer_torch import gpt_model, say


def make_optimizer(torch, module):
    matrices = [p for p in module.parameters() if p.dim() > 1]
    vectors = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)


def stage_model(torch, model, index, stages):
    """A stage's layers as a module: embedding first, norm and head last (a weight of its own).

    The layers are cut as Rille cuts them: embedding and head count as one layer each.
    """
    nn, F = torch.nn, torch.nn.functional
    layers = len(model.h)

    def first_of(stage):
        return min(layers, max(0, stage * (layers + 2) // stages - 1))

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = nn.ModuleList(model.h[first_of(index) : first_of(index + 1)])
            if index == 0:
                self.wte, self.wpe = model.wte, model.wpe
                self.register_buffer("position", model.position)
            if index == stages - 1:
                self.ln_f = model.ln_f
                self.head = nn.Linear(model.wte.embedding_dim, model.wte.num_embeddings, bias=False)

        def forward(self, x):
            if index == 0:
                x = self.wte(x) + self.wpe(self.position[: x.shape[1]])
            for block in self.h:
                x = block(x)
            return self.head(self.ln_f(x)) if index == stages - 1 else x

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Part(), loss


def pipeline_step(torch, shape, rank, ranks, per_rank=1, name="Schedule1F1B"):
    """Clipping is by the norm of a rank's own layers: PyTorch has no global one for a pipeline."""
    from torch.distributed import pipelining

    layers, heads, d, T, B, vocab, M = shape
    torch.manual_seed(1)
    model, stages = gpt_model(torch, layers, heads, d, T, vocab), []
    modules = torch.nn.ModuleList()
    for index in range(rank, ranks * per_rank, ranks):
        module, loss = stage_model(torch, model, index, ranks * per_rank)
        modules.append(module)
        stages.append(pipelining.PipelineStage(module, index, ranks * per_rank, torch.device("cpu")))
    make = getattr(pipelining, name)
    schedule = make(stages if per_rank > 1 else stages[0], M, loss_fn=loss)
    optimizer = make_optimizer(torch, modules)
    ids = torch.randint(vocab, (B, T + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step():
        if rank == 0:
            schedule.step(inputs)
        elif rank == ranks - 1:
            schedule.step(target=targets)
        else:
            schedule.step()
        torch.nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def interleaved_step(torch, shape, rank, ranks):
    return pipeline_step(torch, shape, rank, ranks, 2, "ScheduleInterleaved1F1B")


def zero_bubble_step(torch, shape, rank, ranks):
    return pipeline_step(torch, shape, rank, ranks, 2, "ScheduleInterleavedZeroBubble")


def replica_step(torch, shape, rank, ranks):
    layers, heads, d, T, B, vocab, _ = shape
    torch.manual_seed(1)
    model = gpt_model(torch, layers, heads, d, T, vocab)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(torch, model)
    ids = torch.randint(vocab, (B, T + 1))[rank::ranks]
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step():
        replica(inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def serve(run, torch, rank):
    """The first rank reads a line; the number of runs goes to all, 0 at the end."""
    from torch import distributed as dist

    while True:
        words = sys.stdin.readline().split() if rank == 0 else []
        if words and words[0] == "stats":
            say("ranks=", dist.get_world_size())
            continue
        n = torch.tensor([int(words[1]) if words else 0])
        dist.broadcast(n, 0)
        if n.item() == 0:
            return
        seconds = []
        for _ in range(n.item()):
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        if rank == 0:
            say(*(f"{s:.9f}" for s in seconds))


def work(rank, what, shape, ranks, meeting):
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=ranks)
    steps = {
        "pp": pipeline_step,
        "pp2": interleaved_step,
        "zb": zero_bubble_step,
        "dp": replica_step,
        "tp": tensor_step,
    }
    run = steps[what](torch, shape, rank, ranks)
    run()
    if rank == 0:
        say(f"ready version={torch.__version__}")
    serve(run, torch, rank)
    dist.destroy_process_group()


def main():
    what, numbers = sys.argv[1], [int(word) for word in sys.argv[2:]]
    shape, ranks = tuple(numbers[:7]), numbers[7]
    try:
        import torch
    except ImportError as reason:
        say("missing", str(reason).splitlines()[0])
        return
    context = torch.multiprocessing.get_context("spawn")
    meeting = tempfile.mktemp()
    others = [
        context.Process(target=work, args=(rank, what, shape, ranks, meeting), daemon=True)
        for rank in range(1, ranks)
    ]
    for process in others:
        process.start()
    try:
        work(0, what, shape, ranks, meeting)
    except Exception as reason:
        say("missing", type(reason).__name__, str(reason).splitlines()[0])
    for process in others:
        process.terminate()


if __name__ == "__main__":
    main()
