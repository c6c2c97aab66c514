-- train_gpt - trains a GPT on a text and writes some. Options: rille scripts/train_gpt.lua --help
local rille = require "rille"
local nn = rille.nn
local gpt = require "models.gpt"

local o = rille.options {
  help = "Trains a GPT on the bytes of a text file, then samples from it.",
  { "text", "runs/kjv.txt", "any text file" },
  { "out", nil, "directory for metrics and checkpoints", type = "string" },
  { "resume", nil, "go on from a checkpoint file or run directory", type = "string" },
  { "steps", 1000, "training steps", min = 0 },
  { "style", "gpt2", "kind of blocks", choices = { "gpt2", "llama" } },
  { "layers", 6, "blocks", min = 1 },
  { "heads", 6, "attention heads", min = 1 },
  { "kv-heads", 0, "key heads, shared by groups of heads (0: one each)", min = 0 },
  { "d", 384, "width", min = 1 },
  { "T", 256, "bytes of context", min = 1 },
  { "dropout", 0.0, "dropout probability", min = 0, max = 0.99 },
  { "global", 32, "samples a step, over all ranks", min = 1 },
  { "micro", 8, "samples a microbatch", min = 1 },
  { "lr", 1e-3, "highest learning rate", min = 0 },
  { "min-lr", 0.1, "last learning rate, as a share of the highest", min = 0 },
  { "warmup", 50, "steps of warm-up", min = 0 },
  { "schedule", "cosine", "learning-rate schedule",
    choices = { "constant", "linear", "cosine", "wsd" } },
  { "weight-decay", 0.1, "of matrices", min = 0 },
  { "clip", 1.0, "largest gradient norm", min = 0 },
  { "recompute", "none", "what is run again in backward instead of being kept",
    choices = { "none", "attention", "blocks" } },
  { "eval-every", 200, "steps between evaluations on held-out text (0: only at the end)", min = 0 },
  { "eval-batches", 20, "microbatches of an evaluation", min = 1 },
  { "save-every", 0, "steps between checkpoints (0: none)", min = 0, needs = "out" },
  { "sample", 400, "bytes to write at the end", min = 0 },
  { "prompt", "In the beginning", "what the sample begins with" },
  { "temperature", 0.8, "of sampling", min = 0 },
  { "top-k", 0, "sample from the k likeliest bytes only (0: all)", min = 0 },
  { "top-p", 0.95, "sample from the likeliest bytes that make up this probability",
    min = 0.0, max = 1.0 },
  { "log", 10, "steps between progress lines", min = 0 },
  { "timeline", nil, "an SVG of the last step: the schedule's promise above what was measured",
    type = "string" },
  { "export", nil, "write the whole model to one safetensors file at the end", type = "string" },
  { "seed", 0, "of weights, dropout, data order" },
  parallel = true,
}

local data = rille.data.text { o.text, T = o.T, seed = o.seed }
local model = gpt {
  vocab = data.vocab, T = o.T, d = o.d, layers = o.layers, heads = o.heads,
  kv_heads = o.kv_heads > 0 and o.kv_heads or nil, style = o.style, dropout = o.dropout,
}
local trainer = rille.Trainer {
  model = model, loss = nn.cross_entropy, seed = o.seed, out = o.out, steps = o.steps, log = o.log,
  optimizer = { "adamw", lr = o.lr, betas = { 0.9, 0.95 }, weight_decay = o.weight_decay,
    clip = o.clip, schedule = { o.schedule, warmup = o.warmup, min = o.min_lr } },
  batch = { global = o.global, micro = o.micro }, parallel = o.parallel,
  recompute = o.recompute == "blocks" or o.recompute == "attention" and "attention",
  checkpoint = { every = o.save_every }, example = data.train:batch(0, o.micro),
}
-- n bytes after the prompt. Options that cannot be are told now, not after the training.
local function write(n)
  local ids = rille.sample(trainer, data.encode(o.prompt), n, {
    temperature = o.temperature, top_k = o.top_k, top_p = o.top_p, seed = o.seed, context = o.T,
  })
  return o.prompt .. data.decode(ids)
end
if o.sample > 0 then write(0) end

local has_timeline = o.timeline and trainer:check_timeline(o.timeline)
if o.timeline and not has_timeline then print "no pipeline, no timeline" end
if o.export then trainer:check_export(o.export) end

if o.resume then print(("resumed at step %d"):format(trainer:resume(o.resume))) end
print(("GPT (%s): %d blocks, d %d, %d heads, %.1f M parameters; %d samples of %d bytes a step")
  :format(o.style, o.layers, o.d, o.heads, model:n_parameters() / 1e6, o.global, o.T))

for step, batch in trainer:steps(data.train, o.steps) do
  trainer:step(batch)
  if step == o.steps or (o.eval_every > 0 and step % o.eval_every == 0) then
    trainer:say("step %d | held-out loss %.4f nats per byte", step,
      trainer:evaluate(data.val, o.eval_batches))
  end
end
if o.out then trainer:save() end
if o.export then trainer:export(o.export) end
if has_timeline then print(trainer:timeline(o.timeline) or "no timeline: no step was run") end

if o.sample > 0 then print("\n" .. write(o.sample)) end
