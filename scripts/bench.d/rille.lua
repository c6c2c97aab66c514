-- rille - Rille's side of the benchmark: a worker that times one case on request (worker.lua has
-- the protocol). Usage: rille scripts/bench.d/rille.lua CASE
local rille = require "rille"
local core = rille.core
local clock = core.clock

local ELEMENTS <const>, ROW <const> = 64 << 20, 1024

-- The peak of this process's resident memory, bytes.
local function peak_bytes()
  for line in io.lines("/proc/self/status") do
    local kilobytes = line:match("^VmHWM:%s*(%d+)")
    if kilobytes then return kilobytes * 1024 end
  end
  return 0
end

local cases = {}

function cases.add()
  local x, y = rille.randn(4), rille.randn(4)
  return function()
    for _ = 1, 10000 do local _ = x + y end
  end
end

function cases.softmax()
  local x = rille.randn(ELEMENTS // ROW, ROW)
  return function() return rille.softmax(x) end
end

function cases.layer_norm()
  local x = rille.randn(ELEMENTS // ROW, ROW)
  local gain, bias = rille.ones(ROW), rille.zeros(ROW)
  return function() return rille.layer_norm(x, gain, bias) end
end

function cases.gelu()
  local x = rille.randn(ELEMENTS)
  return function() return rille.gelu_tanh(x) end
end

-- Weights, gradients and both moments of one parameter, updated in one pass.
function cases.adamw()
  local w = core.param("w", { ELEMENTS })
  w:normal_(0, 0.02)
  local optimizer = rille.optim.new({ { "w", w } },
    { "adamw", lr = 3e-4, betas = { 0.9, 0.95 }, weight_decay = 0.1 })
  w:sum():backward()
  return function() optimizer:apply(1) end -- step would read the gradients for their norm first
end

function cases.mlp()
  local nn = rille.nn
  local model = nn.Sequential { nn.Linear(8, 8), nn.Activation "relu", nn.Linear(8, 8),
    nn.Activation "relu", nn.Linear(8, 1) }
  local parameters = model:named_parameters()
  local x = rille.randn(1, 8)
  return function()
    for _ = 1, 1000 do
      model(x):sum():backward()
      for _, entry in ipairs(parameters) do entry[2]:zero_grad() end
    end
  end
end

-- All that stands between a name and a list that can be run, and the step predicted.
function cases.schedule()
  local recipe = rille.schedule "interleaved"
  return function()
    local sched = recipe:build { pp = 64, stages_per_rank = 4, microbatches = 1024 }
    return sched:bubbles()
  end
end

-- The step of rille.Trainer, its scalars read back, as a training script calls it.
local function gpt_step(o)
  local gpt = require "models.gpt"
  local trainer = rille.Trainer {
    model = gpt(o), loss = rille.nn.cross_entropy, log = 0, seed = 1,
    optimizer = { "adamw", lr = 3e-4, betas = { 0.9, 0.95 }, weight_decay = 0.1, clip = 1.0 },
    batch = { global = o.B, micro = o.B },
  }
  local ids = rille.randint(0, o.vocab, { o.B, o.T + 1 })
  local batch = { ids:slice(1, 0, o.T):contiguous(), ids:slice(1, 1, o.T + 1):contiguous() }
  return function() return trainer:step(batch).loss end
end

for _, case in ipairs(require "cases") do
  if case.memory then
    cases[case.name] = function() return gpt_step(case.shape) end
  end
end

local make = cases[arg[1]]
if not make then
  print("missing no case " .. arg[1])
  os.exit(0)
end
local ok, run = pcall(make)
if not ok then
  print("missing " .. tostring(run):match("[^\n]*"))
  os.exit(0)
end
run()
collectgarbage()
print("ready version=" .. rille.version)
io.stdout:flush()
local result
for line in io.lines() do
  local n = line:match("^run (%d+)$")
  if n then
    local seconds = {}
    for i = 1, tonumber(n) do
      local start = clock()
      result = run()
      seconds[i] = ("%.9f"):format(clock() - start)
      if type(result) ~= "number" then result = nil end
      collectgarbage() -- the next run finds its output's memory free, as PyTorch's out= does
    end
    print(table.concat(seconds, " "))
  elseif line:find("^profile %d+$") then -- seconds; then what, calls, seconds, flops of each kind
    core.profile(true)
    local start, parts = clock(), {}
    for _ = 1, tonumber(line:match("%d+")) do run() end
    parts[1] = ("%.9f"):format(clock() - start)
    for _, row in ipairs(core.profile(false)) do
      table.insert(parts, ("%s,%d,%.9f,%.9g"):format(row.what, row.calls, row.seconds, row.flops))
    end
    print(table.concat(parts, ";"))
  elseif line == "stats" then
    print("peak_bytes=" .. peak_bytes() .. (type(result) == "number" and " loss=" .. result or ""))
  else
    print("unknown " .. line)
  end
  io.stdout:flush()
end
