-- split_test - units to stages from Lua: ways to split, what is printed, what is refused.
local check <const> = require "tests.check"
local rille <const> = require "rille"
local split <const> = rille.split

local names <const> = { "wte", "h.0", "h.1", "h.2", "h.3", "h.4", "ln_f", "head" }
local params <const> = { 4000, 1000, 1000, 1000, 1000, 1000, 10, 4000 }

local function choose(o)
  o.names, o.params = names, params
  if not o.sched then o.stages = o.stages or 4 end
  return split.choose(o)
end

check.test("uniform, by parameters, by time, as listed", function()
  check.equal(choose {}.first, { 0, 2, 4, 6, 8 })
  check.equal(choose { by = "parameters" }.counts, { 1, 3, 3, 1 })
  local costs = {}
  for i = 1, 8 do costs[i] = { 1, 1, 1 } end
  costs[1], costs[7], costs[8] = { 0.1, 0, 0.1 }, { 0.1, 0.1, 0.1 }, { 2, 2, 2 }
  local s = choose { by = "time", costs = costs }
  check.equal(s.counts, { 3, 2, 2, 1 })
  check.near(s.figures.stage_cost, 6.2, 1e-12)
  check.equal(choose { by = { 1, 0, 6, 1 } }.first, { 0, 1, 1, 7, 8 })
end)

check.test("the table names ranks, units, parameters, shares", function()
  local s = choose { by = { 1, 0, 6, 1 } }
  check.equal(s.text, table.concat({
    "stage 0 (rank 0): wte | 4 k params | 31%",
    "stage 1 (rank 1): no units | 0 params | 0%",
    "stage 2 (rank 2): h.0, h.1, h.2, h.3, h.4, ln_f | 5.01 k params | 39%",
    "stage 3 (rank 3): head | 4 k params | 31%",
  }, "\n"))
  check.ok(choose { stages = 1 }.text:find("wte .. head (8 units) | 13 k params | 100%", 1, true))
  check.ok(choose { costs = { 1, 1, 1, 1, 1, 1, 1, 1 } }.text:find("25% of the time", 1, true))
end)

check.test("a schedule gives the placement: the stages of a rank count together", function()
  local sched = rille.schedule "zbv":build { pp = 2, microbatches = 4 }
  local s = choose { sched = sched, by = "time", costs = { 1, 1, 1, 1, 1, 1, 1, 3 } }
  check.equal(s.holder, { 0, 1, 1, 0 })
  check.near({ s.figures.rank_cost, s.figures.stage_cost }, { 5, 3 }, 1e-12)
  check.ok(s.figures.is_optimal)
  check.ok(s.text:find("stage 3 (rank 0)", 1, true))
end)

check.test("a memory limit moves units to the stages that keep fewer microbatches", function()
  local sched = rille.schedule "1f1b":build { pp = 4, microbatches = 8 }
  check.equal(sched:live(), { 4, 3, 2, 1 })
  local ones, kept = {}, {}
  for i = 1, 8 do ones[i], kept[i] = 1, 10 end
  local free = choose { sched = sched, by = "time", costs = ones, kept = kept }
  check.equal(free.counts, { 2, 2, 2, 2 })
  local s = choose { sched = sched, by = "time", costs = ones, kept = kept, limit = 60 }
  check.equal({ s.counts[1], s.counts[2], s.figures.stage_cost }, { 1, 2, 3.0 })
  check.ok(s.figures.bytes <= 60)
  check.raises(function()
    choose { sched = sched, by = "time", costs = ones, kept = kept, limit = 30 }
  end, "split_test.lua:%d+: no split keeps every rank within", "hint: more ranks")
end)

check.test("wrong splits are refused with the split", function()
  check.raises(function() choose { by = { 3, 3, 3, 3 } } end, "split_test.lua:%d+: ",
    "split = {3, 3, 3, 3} places 12 units; the model has 8")
  check.raises(function() choose { by = { 4, 4 } } end, "is for 2 stages; there are 4")
  check.raises(function() choose { by = { 4, 5, -1, 0 } } end, "stage 2 cannot have %-1 units")
  check.raises(function() choose { stages = 12 } end, "12 stages for 8 units", "hint: fewer ranks")
  check.raises(function() choose { by = "params" } end, 'split = "params": it must be "uniform"')
  check.raises(function() choose { by = "unifrom" } end, 'did you mean "uniform"')
  check.raises(function() choose { by = "time" } end, "needs the measured costs")
  check.raises(function() choose { by = "time", costs = { 1 } } end, "1 costs for 8 units")
  check.raises(function() choose { by = { 4, 4.5, 0, 0 } } end, "counts")
end)

check.done()
