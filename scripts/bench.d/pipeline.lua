-- pipeline - Rille's side of the benchmarks of several ranks: a worker (worker.lua has the
-- protocol) whose first rank answers. Usage: rille -n 2 scripts/bench.d/pipeline.lua WHAT SHAPE...
--
--   pp       the model over a pipeline of the ranks, 1F1B
--   pp2      the same, two stages a rank, interleaved 1F1B
--   zb       the same, one stage a rank, zb-h1
--   dp       a replica on each rank
--   tp       the layers cut over the ranks, all samples at once
--   halves   each rank trains its half of the layers by itself, both at the same time: what a
--            pipeline without bubble and messages would take
local rille = require "rille"
local core = rille.core
local nn = rille.nn
local gpt = require "models.gpt"

local function number(i) return assert(math.tointeger(arg[i]), "a number is wanted") end
local what = arg[1]
local o = { layers = number(2), heads = number(3), d = number(4), T = number(5), vocab = number(7) }
local B <const>, M <const> = number(6), number(8) -- samples a step, microbatches

local world = core.comm_world()
local rank, ranks = world:rank(), world:size()
local alone = world:split(rank, 0) -- a group of this rank

-- This rank on a core of its own, as its peers choose one: the system may else pack two on one.
local function take_core()
  local cores, pid = {}, assert(io.open("/proc/self/stat")):read("n")
  for line in io.lines "/proc/self/status" do
    for first, last in (line:match "^Cpus_allowed_list:(.*)" or ""):gmatch "(%d+)%-?(%d*)" do
      for k = tonumber(first), tonumber(last) or tonumber(first) do table.insert(cores, k) end
    end
  end
  if #cores < ranks then return end
  assert(os.execute(("taskset -pc %d %d >/dev/null"):format(cores[rank + 1], pid)))
end
take_core()

local function trainer_of(model, loss, global, micro, parallel)
  return rille.Trainer {
    model = model, loss = loss, log = 0, seed = 1, parallel = parallel,
    optimizer = { "adamw", lr = 3e-4, betas = { 0.9, 0.95 }, weight_decay = 0.1, clip = 1.0 },
    batch = { global = global, micro = micro },
  }
end

local function ids_of(n)
  local ids = rille.randint(0, o.vocab, { n, o.T + 1 })
  return ids:slice(1, 0, o.T):contiguous(), ids:slice(1, 1, o.T + 1):contiguous()
end

local makers = {}

function makers.pp(per_rank, pipeline)
  local trainer = trainer_of(gpt(o), nn.cross_entropy, B, B // M,
    { pp = ranks, stages_per_rank = per_rank, pipeline = pipeline })
  local x, y = ids_of(B)
  return function() return trainer:step { x, y }.loss end, trainer.pipeline
end

function makers.pp2() return makers.pp(2) end

function makers.zb() return makers.pp(1, "zb-h1") end

function makers.dp()
  local trainer = trainer_of(gpt(o), nn.cross_entropy, B, B // ranks, { dp = ranks })
  local x, y = ids_of(B)
  return function() return trainer:step { x, y }.loss end, trainer.pipeline
end

function makers.tp()
  local trainer = trainer_of(gpt(o), nn.cross_entropy, B, B, { tp = ranks })
  local x, y = ids_of(B)
  return function() return trainer:step { x, y }.loss end, trainer.pipeline
end

-- The rank's share of the units, fed with what it would get; the end of a first half is a product
-- with a gradient, which costs next to nothing.
function makers.halves()
  local units, mine = gpt(o):units(), {}
  local first, last = rank * #units // ranks + 1, (rank + 1) * #units // ranks
  for u = first, last do
    local unit = units[u]
    rawset(unit, "_parent", nil)
    table.insert(mine, { (unit._path:gsub("%.", "_")), unit })
  end
  local x, y = ids_of(B)
  if rank > 0 then
    x = rille.randn(B, o.T, o.d)
    local head = units[#units] -- a weight of its own, where the tied one is with the other half
    head.tied = nil
    head.weight = nn.Parameter({ o.vocab, o.d }, {})
    head.weight:normal_(0, 0.02)
  end
  local function pull(out) return (out * 1e-3):sum(), out:size(0) end
  local trainer = trainer_of(nn.Sequential(mine), rank < ranks - 1 and pull or nn.cross_entropy, B,
    B // M, { comm = alone })
  return function() return trainer:step { x, y }.loss end
end

local function answer(line)
  if rank == 0 then
    io.stdout:write(line, "\n")
    io.stdout:flush()
  end
end

-- A line of the driver, on all ranks. Others than the first wait in a named pipe of the system: in
-- a message they would look for it all the time, which peers whose turn it is would feel.
local function line_reader()
  local name, pipes = world:broadcast(rank == 0 and os.tmpname() or nil, 0), {}
  if rank == 0 then
    for r = 1, ranks - 1 do assert(os.execute(("mkfifo '%s.%d'"):format(name, r))) end
  end
  world:barrier()
  if rank > 0 then
    local pipe = assert(io.open(("%s.%d"):format(name, rank), "r"))
    return function() return pipe:read("l") or "" end
  end
  for r = 1, ranks - 1 do
    pipes[r] = assert(io.open(("%s.%d"):format(name, r), "w")) -- once that rank reads
    os.remove(("%s.%d"):format(name, r))
  end
  os.remove(name)
  return function()
    local line = io.read("l") or ""
    for _, pipe in ipairs(pipes) do
      pipe:write(line, "\n")
      pipe:flush()
    end
    return line
  end
end

local next_line = line_reader()
local run, pipe = makers[what]()
run()

-- Of the seconds that "run" measured, the share in which this rank communicated or had something
-- under way, and the share in which it did nothing but wait.
local total, axis = 0.0, pipe and what ~= "pp" and what -- a pipeline's messages: see its bubble
local at_first = axis and pipe:communication()[axis]
local function shares()
  local now = pipe:communication()[axis]
  return (" busy=%.4f waited=%.4f"):format((now.busy - at_first.busy) / total,
    (now.waited - at_first.waited) / total)
end

answer("ready version=" .. rille.version)
while true do
  local line = next_line()
  local n = line:match("^run (%d+)$")
  if line == "" then break end
  if n then
    local seconds = {}
    for i = 1, math.tointeger(n) do
      world:barrier()
      local start = core.clock()
      run()
      world:barrier()
      local took = core.clock() - start
      seconds[i], total = ("%.9f"):format(took), total + took
      collectgarbage()
    end
    answer(table.concat(seconds, " "))
  else
    local words = "ranks=" .. ranks .. (axis and total > 0 and shares() or "")
    answer(line == "stats" and words or "unknown " .. line)
  end
end
