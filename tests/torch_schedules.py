#!/usr/bin/env python3
"""Holds Rille's schedules against torch.distributed.pipelining.

usage: torch_schedules.py COMMAND...       COMMAND: what runs `rille schedule`, as words,
                                           like: build/release/rille schedule

Ours there: every CSV that COMMAND writes is read by torch's own loader, validated and lowered by it,
and run by its simulator. Theirs here: torch's generators write CSV files to tests/golden/torch/, which
tests/test_sched_text.c reads, and COMMAND must accept each and find our schedule of the same name in
it, action for action. The result, with versions, is written to tests/golden/torch/RESULT.

Needs torch 2.9 or newer; it is no dependency of Rille and CI does not run this.
"""
import csv
import os
import shutil
import subprocess
import sys
import tempfile

from unittest import mock

import torch
from torch.distributed.pipelining import schedules as ts

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden", "torch")


class Stage:
    """As much of a pipeline stage as torch's schedules ask for while they make a list."""

    def __init__(self, index, stages, rank, ranks):
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = rank, ranks
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.submod, self.has_backward = None, True
        self.stage_index_to_group_rank = None
        self.p2p_per_edge = False


def ours(command, name, p, v, m):
    words = command + [name, "-p", str(p), "-m", str(m), "--format", "csv"]
    if v:
        words += ["-v", str(v)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def load_in_torch(text, p, m):
    """Reads one of our CSV texts with torch's loader, and runs what it is lowered to."""
    rows = list(csv.reader(text.splitlines()))
    actions = [ts._Action.from_str(cell) for row in rows for cell in row]
    stages = 1 + max(s.stage_index for a in actions for s in (a.sub_actions or (a,)))
    # Which stages are whose does not matter here: torch infers the placement.
    mine = [Stage(s, stages, 0, p) for s in range(0, stages, p)]
    runtime = ts._PipelineScheduleRuntime(mine, m, loss_fn=lambda y, t: y)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(text)
        file.flush()
        runtime._load_csv(file.name)
    # torch's simulator knows neither pairs nor what concerns sharded parameters and reductions.
    lowered = {
        rank: [s for a in row for s in (a.sub_actions or (a,))
               if s.computation_type.value not in
               ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")]
        for rank, row in runtime.pipeline_order_with_comms.items()}
    ts._simulate_comms_compute(lowered, lambda s: runtime.stage_index_to_group_rank[s], stages)


def cases():
    for name, alias, vs in (
        ("gpipe", "GPipe", (0,)), ("1f1b", "1F1B", (0,)), ("eager-1f1b", None, (0,)),
        ("interleaved", "Interleaved1F1B", (2, 3)), ("bfs", "LoopedBFS", (2, 3)),
        ("zb-h1", "InterleavedZeroBubble", (1,)), ("zb-h2", None, (0,)), ("zbv", "ZBVZeroBubble", (2,)),
        ("v-half", None, (2,)), ("v-min", None, (2,)), ("1f1b-v", None, (2,)),
        ("dualpipev", "DualPipeV", (2,)), ("hanayo", None, (2, 4)),
    ):
        for v in vs:
            for p in (1, 2, 3, 4, 8):
                for m in sorted({1, p, 2 * p, 2 * p + 1, 3 * p, 16}):
                    yield name, alias, p, v, m


def recorded(cls, p, m):
    """What the schedules with one stage a rank run, by rank: their lists are for display only, and
    1F1B's names a microbatch on the last rank that is not there."""
    rows = []
    for rank in range(p):
        row, stage = [], mock.MagicMock()
        stage.stage_index, stage.num_stages, stage.is_last = rank, p, False
        for ops in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
            getattr(stage, f"get_{ops}_ops").side_effect = lambda mb: []
        stage.forward_one_chunk.side_effect = lambda mb, *a, **k: row.append(f"{rank}F{mb}")
        stage.backward_one_chunk.side_effect = lambda mb, **k: row.append(f"{rank}B{mb}")
        schedule = cls(stage, m, loss_fn=lambda y, t: y)
        schedule._initialize_stage = lambda *a: None
        schedule._step_microbatches([()] * m, [{}] * m, [None] * m)
        rows.append(row)
    return rows


def theirs(alias, p, v, m):
    """torch's own compute actions by rank, without idle steps; None where it makes none."""
    cls = ts.get_schedule_class(alias)
    stages = p * max(v, 1)
    try:
        if issubclass(cls, ts.PipelineScheduleSingle):
            return recorded(cls, p, m)
        is_v = alias in ("ZBVZeroBubble", "DualPipeV")
        held = (0, stages - 1) if is_v else range(0, stages, p)
        order = cls([Stage(s, stages, 0, p) for s in held], m, loss_fn=lambda y, t: y).pipeline_order
    except (ValueError, RuntimeError, AssertionError, IndexError):
        return None
    return [[str(a) for a in order[r] if a is not None and a.computation_type.value in
             ("F", "I", "W", "B", "OVERLAP_F_B")] for r in sorted(order)]


def descending(text):
    """The same rows with the backwards of a stage from the last microbatch to the first."""
    rows = [row for row in csv.reader(text.splitlines())]
    m = 1 + max(int(cell.split("F")[1]) for cell in rows[0] if "F" in cell)
    return [[cell if "F" in cell else f"{cell.split('B')[0]}B{m - 1 - int(cell.split('B')[1])}"
             for cell in row] for row in rows]


def compare(command, folder):
    """Writes torch's files and RESULT to folder. Whether somebody refuses something."""
    loaded = 0
    lines, same, turned, different, refused = [], {}, {}, {}, {}
    for name, alias, p, v, m in cases():
        text = ours(command, name, p, v, m)
        where = f"{name} p={p} v={v or 1} m={m}"
        try:
            load_in_torch(text, p, m)
            loaded += 1
        except Exception as error:  # whatever torch raises is the finding
            lines.append(f"torch refuses our {where}: {type(error).__name__}: {error}"[:200])
        if not alias:
            continue
        rows = theirs(alias, p, v, m)
        if rows is None:
            refused.setdefault(name, []).append((p, v or 1, m))
            continue
        is_same = rows == [row for row in csv.reader(text.splitlines())]
        is_turned = name == "bfs" and rows == descending(text)
        kind = same if is_same else turned if is_turned else different
        kind.setdefault(name, []).append((p, v or 1, m))
        path = os.path.join(folder, f"{name}_p{p}_v{v or 1}_m{m}.csv")
        with open(path, "w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        check = subprocess.run(command + [path], capture_output=True, text=True)
        if check.returncode != 0:
            lines.append(f"we refuse torch's {where}: {check.stdout}{check.stderr}"[:300])
        keep = (p, m) in ((2, 4), (3, 6), (4, 8), (4, 9))
        if not keep:
            os.remove(path)
    with open(os.path.join(folder, "RESULT"), "w") as out:
        print(f"torch {torch.__version__}, Python {sys.version.split()[0]}", file=out)
        print(f"ours there: {loaded} loaded, validated, lowered and simulated by torch", file=out)
        for name in dict.fromkeys(n for n, *_ in cases()):
            counts = [len(d.get(name, ())) for d in (same, turned, different, refused)]
            if any(counts):
                print(f"{name}: {counts[0]} lists the same, {counts[1]} but for backwards in "
                      f"descending order, {counts[2]} different, {counts[3]} not made by torch",
                      file=out)
            if different.get(name):
                print("  different (p, v, m): " + " ".join(map(str, different[name])), file=out)
        print(*(lines or ["nothing refused on either side"]), sep="\n", file=out)
    return bool(lines)


def main(command):
    with tempfile.TemporaryDirectory() as folder:
        is_refused = compare(command, folder)
        shutil.rmtree(GOLDEN, ignore_errors=True)
        shutil.copytree(folder, GOLDEN)
    with open(os.path.join(GOLDEN, "RESULT"), encoding="utf-8") as result:
        print(result.read(), end="")
    return is_refused


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
