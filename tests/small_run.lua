-- small_run - a training run of a second, for tests/train_test.sh.
local rille = require "rille"
local nn = rille.nn

local o = rille.options {
  help = "A small training run for tests.",
  { "out", "run", "directory for metrics and checkpoints" },
  { "steps", 20, "training steps" },
  { "every", 5, "steps between checkpoints" },
  { "resume", false, "go on from the run's last checkpoint" },
  { "pause", 0.0, "seconds to wait in each step" },
  { "nan-at", 0, "step whose data holds a NaN" },
  { "hog", false, "ask for more memory than there is, in a layer" },
}

local Net = nn.class "Net"

function Net:init()
  self.up = nn.Linear { 4, 16, act = "gelu" }
  self.drop = nn.Dropout(0.1)
  self.down = nn.Linear { 16, 2 }
end

function Net:forward(x)
  if o.hog then rille.zeros { 1 << 42 } end
  return self.down(self.drop(self.up(x)))
end

local loader = {}

function loader.batch(_, step, n) -- a function of the step
  local x = rille.arange(n * 4):view(n, 4):to("f32") * 0.1 + step * 0.01
  if step + 1 == o.nan_at then x[0][0] = 0 / 0 end
  return { x, x:slice(1, 0, 2):contiguous() }
end

local trainer = rille.Trainer { model = Net(), loss = nn.mse, optimizer = { "adamw", lr = 1e-2 },
  batch = { global = 4, micro = 2 }, out = o.out, checkpoint = { every = o.every },
  seed = 1, log = 5 }
if o.resume then print(("resumed at step %d"):format(trainer:resume(o.out))) end
for _, batch in trainer:steps(loader, o.steps) do
  trainer:step(batch)
  local wake = rille.core.clock() + o.pause
  while rille.core.clock() < wake do end
end
print("fingerprint " .. trainer:fingerprint())
