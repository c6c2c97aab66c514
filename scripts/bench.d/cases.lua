-- cases - what is measured. Each case names its sides; the first is Rille, the others its peers.
--
--   name     --only's word         what    its line in the table
--   per      runs inside one "run" (its seconds are divided by it)
--   repeats  rounds, each of one run of every side; quick: with --quick
--   flops    multiply-adds x 2 of one run, for the share of the FMA peak
--   bytes    that must move at least once, for the share of the copy bandwidth
--   goals    what the project promises: for a peer, at least how many times as fast
--   tokens   of one run, for tokens/s
--   memory_goal  at most this share of PyTorch's peak;  limit  at most so many seconds
local ELEMENTS = 64 << 20 -- 256 MB of f32

-- Matrix products: 2 flops a weight and token in forward, 4 in backward. Attention: two products of
-- half a T x T matrix in forward, five in backward (one of them recomputes the probabilities).
local function gpt_flops(o)
  local weights = 12 * o.layers * o.d * o.d + o.vocab * o.d
  local tokens = o.B * o.T
  return 6 * weights * tokens + 7 * o.layers * tokens * o.T * o.d
end

local function gpt(o, name, what, peers, goals, repeats, memory_goal)
  return {
    name = name, what = what, peers = peers, goals = goals, repeats = repeats, quick = 3,
    flops = gpt_flops(o), shape = o, memory = true, memory_goal = memory_goal,
    unit = "ms",
  }
end

local small = { layers = 6, heads = 6, d = 384, T = 256, B = 8, vocab = 256 }
local gpt2 = { layers = 12, heads = 12, d = 768, T = 64, B = 4, vocab = 50257 }

local M <const>, RANKS <const> = 8, 2 -- microbatches a step; ranks of one thread each

-- A step over several ranks.
local function ranks(name, how, what, peers, goals)
  return {
    name = name, how = how, what = what, peers = peers, goals = goals, repeats = 9, quick = 3,
    flops = gpt_flops(small), shape = small, microbatches = M, ranks = RANKS, unit = "ms",
    tokens = small.B * small.T,
    only_threads = RANKS,
  }
end

local function array(name, what, arrays)
  return {
    name = name, what = what, peers = { "eager" }, goals = {}, repeats = 7, quick = 3,
    bytes = arrays * 4 * ELEMENTS, shape = { rows = ELEMENTS // 1024, columns = 1024 }, unit = "ms",
  }
end

return {
  gpt(small, "gpt", "training step, GPT 6 x 384, B 8, T 256, V 256", { "eager", "compile" },
    { eager = 1.25, compile = 1 }, 15, 0.5),
  gpt(gpt2, "gpt2", "training step, GPT-2 124M, B 4, T 64", { "eager", "compile", "llm.c" },
    { eager = 1, ["llm.c"] = 2 }, 9),
  { name = "add", what = "x + y of 4 floats", peers = { "eager" }, goals = {}, per = 10000,
    repeats = 15, quick = 5, unit = "us", limit = 0.5e-6, only_threads = 1 },
  { name = "mlp", what = "forward + backward, 3-layer MLP, 8 values",
    peers = { "eager", "compile" }, goals = { eager = 5 }, per = 1000, repeats = 15, quick = 5,
    unit = "us", only_threads = 1 },
  ranks("pipeline", "pp", "the same step, 8 microbatches, over a pipeline of 2 ranks, 1F1B",
    { "halves", "eager" }, {
      halves = 0.95 * M / (M + RANKS - 1), -- times what the bubble leaves
      eager = 1.4,
    }),
  ranks("interleaved", "pp2", "the same, interleaved 1F1B, 2 stages a rank",
    { "eager", "1f1b" }, { ["1f1b"] = 1.4 }),
  ranks("zero_bubble", "zb", "the same, zb-h1 (PyTorch: interleaved zero bubble, 2 stages a rank)",
    { "eager", "1f1b" }, { ["1f1b"] = 1.4 }),
  ranks("replicas", "dp", "the same step, 2 replicas", { "eager" }, { eager = 1.2 }),
  ranks("tensor", "tp", "the same step, its layers cut over 2 ranks", { "eager" },
    { eager = 1.2 }),
  array("softmax", "softmax, 65536 x 1024 (256 MB)", 2),
  array("layer_norm", "layer_norm, 65536 x 1024 (256 MB)", 2),
  array("gelu", "gelu (tanh), 256 MB", 2),
  array("adamw", "AdamW, 256 MB of weights", 7),
  { name = "schedule", what = "interleaved, p 64, v 4, m 1024: made, checked, lowered, simulated",
    peers = {}, goals = {}, repeats = 7, quick = 3, unit = "ms", limit = 2, only_threads = 1 },
  { name = "start", what = "rille -e 'return 1' / import torch", peers = { "eager" }, goals = {},
    repeats = 9, quick = 3, unit = "ms", limit = 30e-3, spawn = true, only_threads = 1 },
}
