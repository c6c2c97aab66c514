-- profile - what each unit of a model costs, by running one microbatch a few times, unit by unit.
--
-- A unit's parameters are placed for its own runs alone, so that a model that is larger than one
-- rank can be measured on one. Nothing of the model is changed: buffers stay, gradients are zeroed.
local rille = require "rille"
local core = rille.core
local nn = require "rille.nn"

local REPEATS <const> = 3

local function milestones()
  local times = { core.clock() }
  return times, function() table.insert(times, core.clock()) end
end

-- Gradients for the outputs that want one.
local function seeds_of(values)
  local outs, seeds = {}, {}
  for i = 1, values.n do
    local t = values[i]
    if rille.is_tensor(t) and t:requires_grad() then
      table.insert(outs, t)
      table.insert(seeds, rille.ones({ t:shape() }, { dtype = t:dtype() }))
    end
  end
  return outs, seeds
end

-- Leaves with the values of the unit before, as a stage gets them.
local function leaves_of(values, named)
  local leaves, again = { n = values.n }, {}
  local function leaf(t)
    if not rille.is_tensor(t) then return t end
    local wants = t:requires_grad()
    local own = core.data(t:detach())
    return wants and own:requires_grad_() or own
  end
  for i = 1, values.n do leaves[i] = leaf(values[i]) end
  for name, t in pairs(named) do again[name] = leaf(t) end
  return leaves, again
end

-- One run of a unit: seconds of F, I, W, bytes kept, what it gave.
local function run(unit, values, named, finish)
  local inputs, named_now = leaves_of(values, named)
  core.begin_microbatch(0, 0, inputs[1]:size(0))
  local before = core.arena_bytes()
  local times, mark = milestones()
  local function call(m, ...) return core.scope(m, ...) end
  local results = nn.call_unit(call, unit, inputs, named_now)
  if finish then results = table.pack(finish(results)) end
  mark()
  local after = core.arena_bytes()
  local outs, seeds = seeds_of(results)
  local wgrad = #outs > 0 and core.backward(outs, seeds, "I")
  mark()
  if wgrad then wgrad:run() end
  mark()
  core.end_microbatch()
  return { times[2] - times[1], times[3] - times[2], times[4] - times[3],
    kept = after.I + after.W - before.I - before.W }, results, named_now
end

-- The least of each number over a few runs, the first of which does not count.
local function measure(unit, values, named, finish)
  local best, results, named_now
  run(unit, values, named, finish)
  for _ = 1, REPEATS do
    local cost
    cost, results, named_now = run(unit, values, named, finish)
    best = best or cost
    for i = 1, 3 do best[i] = math.min(best[i], cost[i]) end
  end
  return best, results, named_now
end

--- Costs of units: a list of {F, I, W, kept =}: seconds of a microbatch and bytes that backward
--- keeps. The last unit's include the loss.
---@param units rille.Module[]
---@param loss any as of the Trainer
---@param x rille.Tensor a microbatch's inputs
---@param y rille.Tensor? and targets
return function(units, loss, x, y)
  local costs, values, named = {}, table.pack(x), {}
  local outer = nn.staged_updates
  local _ <close> = setmetatable({}, { __close = function() nn.staged_updates = outer end })
  nn.staged_updates = {} -- what forward passes would change in buffers: thrown away
  for u, unit in ipairs(units) do
    local placed = {}
    for _, entry in ipairs(unit:used_parameters()) do
      placed[entry[2]] = core.is_placed(entry[2])
    end
    local finish = u == #units and function(results) return (loss(results[1], y)) end or nil
    costs[u], values, named = measure(unit, values, named, finish)
    for p, was_placed in pairs(placed) do
      if was_placed then p:zero_grad() else core.unplace(p) end
    end
  end
  return costs
end
