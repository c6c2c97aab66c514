-- split - which units of a model make which stage of the pipeline: evenly, by parameters, by
-- measured time, or as listed; and the split as a table to print.
--
--     local s = split.choose { names = names, params = params, sched = sched, by = "parameters" }
--     print(s.text)     -- stage 0 (rank 0): wte, h.0, h.1 | 1.2 M params | 31%
--     s.first           -- {0, 3, 6, 8}: stage k has the units s.first[k + 1] .. s.first[k + 2] - 1
local rille = require "rille"
local core = rille.core
local fail = require "rille.fail"
local known = require "rille.known"

local split = {}

local option_names = {
  "names", "params", "by", "sched", "stages", "ranks", "holder", "costs", "kept", "state", "limit",
}

local NAMES_SHOWN <const> = 6

-- ---- words

-- 1234567 -> "1.23 M"
local function short(n)
  for _, scale in ipairs { { 1e9, "G" }, { 1e6, "M" }, { 1e3, "k" } } do
    if n >= scale[1] then return ("%.3g %s"):format(n / scale[1], scale[2]) end
  end
  return ("%d"):format(n)
end

-- "wte, h.0, h.1", "h.0 .. h.11 (12 units)", "no units"
local function unit_words(names, from, to)
  if from == to then return "no units" end
  if to - from > NAMES_SHOWN then
    return ("%s .. %s (%d units)"):format(names[from + 1], names[to], to - from)
  end
  return table.concat(names, ", ", from + 1, to)
end

local function sum(list, from, to)
  local total = 0
  for i = from + 1, to do total = total + list[i] end
  return total
end

--- The split in words, a line a stage: its rank, its units, their parameters, and their share of
--- the whole (of the time, where costs are known, else of the parameters).
---@param s table names, first, holder, params, cost
---@return string
function split.words(s)
  local lines = {}
  local weights = s.cost or s.params
  local total = sum(weights, 0, #weights)
  for stage = 0, #s.first - 2 do
    local from, to = s.first[stage + 1], s.first[stage + 2]
    lines[#lines + 1] = ("stage %d (rank %d): %s | %s params | %.0f%%%s"):format(stage,
      s.holder[stage + 1], unit_words(s.names, from, to), short(sum(s.params, from, to)),
      total > 0 and 100 * sum(weights, from, to) / total or 0, s.cost and " of the time" or "")
  end
  return table.concat(lines, "\n")
end

-- ---- choosing

local function holders(o)
  if o.sched then
    local holder = {}
    for stage = 0, o.sched:stages() - 1 do holder[stage + 1] = o.sched:holder(stage) end
    return holder, o.sched:ranks()
  end
  local holder = o.holder
  if not holder then
    holder = {}
    for stage = 0, o.stages - 1 do holder[stage + 1] = stage % (o.ranks or o.stages) end
  end
  return holder, o.ranks or o.stages
end

-- Seconds of a microbatch of each unit, from {F, I, W} or plain numbers.
local function unit_costs(o)
  if not o.costs then
    fail("split by time needs the measured costs of each unit, {{F, I, W}, ...} in seconds")
  end
  if #o.costs ~= #o.names then
    fail("split: %d costs for %d units", #o.costs, #o.names)
  end
  local cost = {}
  for i, c in ipairs(o.costs) do
    cost[i] = type(c) == "table" and (c[1] or c.F) + (c[2] or c.I) + (c[3] or c.W) or c
  end
  return cost
end

local ways = { "uniform", "parameters", "time" }

local function way_of(by)
  if type(by) == "table" then return "given" end
  for _, way in ipairs(ways) do
    if by == way then return way end
  end
  fail.usage("split = %s: it must be \"uniform\", \"parameters\", \"time\" or a list with the "
    .. "number of units of each stage%s", type(by) == "string" and ("%q"):format(by)
    or tostring(by), type(by) == "string" and rille.did_you_mean(by, ways) or "")
end

--- Chooses a split.
---   names    of the units, in order
---   params   the number of parameters of each
---   by       "uniform" (default), "parameters", "time", or a list: the number of units of each
---            stage (0: an empty stage)
---   sched    gives stages, ranks, who holds which stage, and how many microbatches it keeps; or
---            stages, ranks, holder (the rank of each stage)
---   costs    by time: {{F, I, W}, ...}, seconds of a microbatch of each unit, also of embedding
---            and head
---   kept     bytes that a microbatch keeps of each unit; state: bytes of parameters, gradients
---            and optimizer of each; limit: bytes that a rank may keep
---@param o table
---@return table split {first, counts, holder, names, params, cost, figures, text}
function split.choose(o)
  known("split", o, option_names)
  local way = way_of(o.by == nil and "uniform" or o.by)
  local holder, ranks = holders(o)
  local result = { names = o.names, params = o.params, holder = holder, way = way }
  local cost = way == "parameters" and o.params or nil
  if way == "time" or o.costs then result.cost = unit_costs(o) end
  if way == "time" then cost = result.cost end
  result.first, result.figures = core.partition {
    kind = cost and "balanced" or way, units = #o.names, stages = #holder, ranks = ranks,
    holder = holder, cost = cost or result.cost or o.params, kept = o.kept, state = o.state,
    live = o.sched and o.sched:live() or nil, limit = o.limit,
    counts = way == "given" and o.by or nil,
  }
  result.counts = {}
  for stage = 1, #holder do
    result.counts[stage] = result.first[stage + 1] - result.first[stage]
  end
  result.text = split.words(result)
  return result
end

return split
