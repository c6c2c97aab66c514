-- shards_run - a training run of a second over a pipeline, for tests/shards_test.sh.
local rille = require "rille"
local nn = rille.nn

local o = rille.options {
  help = "A small training run over several ranks for tests.",
  { "out", "run", "directory for metrics and checkpoints" },
  { "steps", 2, "training steps" },
  { "save-every", 0, "steps between checkpoints" },
  { "keep", 2, "checkpoints kept" },
  { "lr", 1e-2, "learning rate" },
  { "resume", nil, "go on from a checkpoint", type = "string" },
  { "timeline", nil, "an SVG of the last step", type = "string" },
  { "pause", 0.0, "seconds to wait in each step" },
  { "memory", false, "print each rank's memory limit, and nothing else" },
  parallel = true,
}

if o.memory then
  print("limit " .. rille.core.memory().limit)
  return
end

local layers = {}
for i = 1, 4 do layers[i] = nn.Linear { 8, 8, act = "gelu" } end

local loader = {}

function loader.batch(_, step, n) -- a function of the step
  local x = rille.arange(n * 8):view(n, 8):to("f32") * 0.1 + step * 0.01
  return { x, x }
end

local trainer = rille.Trainer { model = nn.Sequential(layers), loss = nn.mse, seed = 1, log = 0,
  optimizer = { "adamw", lr = o.lr }, batch = { global = 4, micro = 1 }, parallel = o.parallel,
  out = o.out, checkpoint = { every = o.save_every, keep = o.keep } }
if o.resume then
  trainer:say("resumed at step %d", trainer:resume(o.resume))
  trainer:say("loaded %s", trainer:fingerprint())
end
if o.timeline and not trainer:check_timeline(o.timeline) then trainer:say("no pipeline") end
for _, batch in trainer:steps(loader, o.steps) do
  trainer:step(batch)
  local wake = rille.core.clock() + o.pause
  while rille.core.clock() < wake do end
end
local fingerprint = trainer:fingerprint()
trainer:say("fingerprint %s", fingerprint)
