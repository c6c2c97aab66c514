-- pipeline_memory - what ranks keep while a step runs, counted and in bytes, and in which order
-- they work.
--
--     rille -n 4 tests/pipeline_memory.lua
local rille <const> = require "rille"
local check <const> = require "tests.check"
local pipelines <const> = require "tests.pipelines"
local core <const> = rille.core
local nn <const> = rille.nn

local WIDTH <const> = 16

-- ---- what happens in a step, action by action

-- All that a rank's step did: {kind, mb, live, I, W}; live counts (stage, microbatch) pairs after a
-- forward, I and W are bytes kept after the action.
local function record_step(trainer, step)
  local events, plain = {}, { backward = core.backward, finish = core.end_microbatch }
  local kind = "F"
  local function n_live()
    local n = 0
    for _, of_stage in pairs(trainer.pipeline.live) do
      for _ in pairs(of_stage) do n = n + 1 end
    end
    return n
  end
  local function record(mb, live)
    local bytes = core.arena_bytes()
    table.insert(events, { kind = kind, mb = mb, live = live, I = bytes.I, W = bytes.W })
  end
  core.backward = function(outs, seeds, half, ...)
    kind = half
    return plain.backward(outs, seeds, half, ...)
  end
  core.end_microbatch = function()
    local mb = core.place().microbatch
    plain.finish()
    record(mb, kind == "F" and n_live() or nil)
    kind = "F"
  end
  local _ <close> = setmetatable({}, { __close = function()
    core.backward, core.end_microbatch = plain.backward, plain.finish
  end })
  trainer:step(step)
  return events
end

local function model_of(pp, v)
  return function()
    local list = {}
    for i = 0, pp * v - 1 do
      table.insert(list, { "h" .. i, nn.MLP { WIDTH, 24 + 4 * (i % 3), act = "gelu" } })
    end
    return nn.Sequential(list)
  end
end

local function trainer_of(team, pipeline, v, m, recompute)
  return rille.Trainer { model = model_of(team:size(), v)(), loss = nn.mse, log = 0, seed = 1,
    optimizer = { "sgd", lr = 0.01 }, batch = { global = 2 * m, micro = 2 },
    recompute = recompute or false,
    parallel = { comm = team, pp = team:size(), pipeline = pipeline, stages_per_rank = v } }
end

-- Each microbatch has rows of its own: a view would keep the whole batch.
local Rows = {}
Rows.__index = Rows
function Rows:rows(first) return self.parts[first // 2] end
function Rows:numel() return self.n * WIDTH end

local function rows_of(m, factor)
  local parts = {}
  for mb = 0, m - 1 do
    parts[mb] = (rille.arange(2 * WIDTH):to("f32"):view(2, WIDTH) + mb) * (0.01 * factor)
  end
  return setmetatable({ n = 2 * m, parts = parts }, Rows)
end

local function batch_of(m) return { rows_of(m, 1), rows_of(m, 0.5) } end

local is_compute <const> = { F = true, I = true, B = true, W = true }

-- The compute actions of this rank.
local function row_of(trainer)
  local list = {}
  for _, action in ipairs(trainer.layout.sched:row(trainer.layout.rank)) do
    if is_compute[action.kind] then table.insert(list, action) end
  end
  return list
end

-- Bytes that a microbatch keeps of each stage, from a step of one microbatch: {I, W, left, grads}.
-- left: what of I stays until W, which is the input of a recomputed region.
local function bytes_a_microbatch(team, pipeline, v, recompute)
  -- dualpipev splits some backwards alone; zbv has its placement and splits all
  if pipeline == "dualpipev" then pipeline = "zbv" end
  local trainer = trainer_of(team, pipeline, v, 1, recompute)
  local events, kept, at, last = record_step(trainer, batch_of(1)), {}, 0, { I = 0, W = 0 }
  for _, action in ipairs(row_of(trainer)) do
    if action.kind == "W" then
      local of = kept[action.stage]
      last = { I = last.I - of.left, W = last.W - of.W - of.grads }
    else
      at = at + 1
      local now, of = events[at], kept[action.stage]
      if action.kind == "F" then
        kept[action.stage] = { I = now.I - last.I, W = now.W - last.W, left = 0,
          grads = 0 }
      elseif action.kind == "I" then
        of.left, of.grads = now.I - last.I + of.I, now.W - last.W
        check.ok(recompute or of.left == 0, "what dgrad needs is gone after it")
      end
      last = now
    end
  end
  return kept
end

-- What the formula says is kept after each action but W: nI aI, nW aW + nPending gW.
local function predict(row, kept)
  local I, W, list = 0, 0, {}
  for _, action in ipairs(row) do
    local of, kind = kept[action.stage], action.kind
    if kind == "F" then I, W = I + of.I, W + of.W
    elseif kind == "I" then I, W = I - of.I + of.left, W + of.grads
    elseif kind == "W" then I, W = I - of.left, W - of.W - of.grads
    else I, W = I - of.I, W - of.W end
    if kind ~= "W" then table.insert(list, { I = I, W = W }) end
  end
  return list
end

-- ---- tests

local cases <const> = {}
for _, t in ipairs(core.sched_types()) do
  for v = t.chunks_min, t.chunks_max == 0 and 2 or t.chunks_max, t.chunks_step do
    table.insert(cases, { t.name, v })
  end
end

for _, case in ipairs(cases) do
  local name, v = case[1], case[2]
  for _, pp in ipairs { 2, 4 } do
    local where = ("%s, %d stages a rank, pp %d"):format(name, v, pp)
    pipelines.test("the order is the list's, activations are its peak (" .. where .. ")", pp,
      function(team)
        for _, m in ipairs { 1, 3, 2 * pp + 1 } do
          local trainer = trainer_of(team, name, v, m)
          local events, most, at = record_step(trainer, batch_of(m)), 0, 0
          for _, action in ipairs(row_of(trainer)) do
            if action.kind ~= "W" then
              at = at + 1
              check.equal({ events[at].kind, events[at].mb }, { action.kind, action.mb },
                "action " .. at)
              most = math.max(most, events[at].live or 0)
            end
          end
          check.equal(#events, at)
          local peaks = trainer.layout.sched:report().peaks
          check.equal(most, peaks[team:rank() + 1], "m = " .. m)
        end
      end)

    pipelines.test("bytes kept are those of the formula (" .. where .. ")", pp, function(team)
      for _, recompute in ipairs { false, true } do
        local kept = bytes_a_microbatch(team, name, v, recompute)
        local m = 2 * pp + 1
        local trainer = trainer_of(team, name, v, m, recompute)
        local events = record_step(trainer, batch_of(m))
        for i, want in ipairs(predict(row_of(trainer), kept)) do
          check.equal({ events[i].I, events[i].W }, { want.I, want.W },
            ("action %d, recompute = %s"):format(i, recompute))
        end
        check.equal({ core.arena_bytes().I, core.arena_bytes().W }, { 0, 0 }, "nothing is left")
      end
    end)
  end
end

-- SCHEDULES' formulas for whole ranks, rank r of p, m microbatches; in chunks of v a rank.
local formulas <const> = {
  gpipe = function(_, _, m) return m end,
  ["1f1b"] = function(r, p, m) return math.min(m, p - r) end,
  ["eager-1f1b"] = function(r, p, m) return math.min(m, 2 * (p - r) - 1) end,
  ["zb-h1"] = function(_, p, m) return math.min(m, p) end,
  bfs = function(_, _, m) return 2 * m end,
  zbv = function(_, p) return 2 * p end, -- for m >= 2p - 1
}

for _, name in ipairs { "gpipe", "1f1b", "eager-1f1b", "zb-h1", "bfs", "zbv" } do
  pipelines.test("counted activations are the formula's: " .. name, 4, function(team)
    for _, m in ipairs { name == "zbv" and 7 or 4, 9, 16 } do
      local v = (name == "bfs" or name == "zbv") and 2 or 1
      local most = 0
      for _, event in ipairs(record_step(trainer_of(team, name, v, m), batch_of(m))) do
        most = math.max(most, event.live or 0)
      end
      check.equal(most, formulas[name](team:rank(), 4, m), "m = " .. m)
    end
  end)
end

local is_v <const> = { zbv = true, ["v-half"] = true, ["v-min"] = true, dualpipev = true }

for _, name in ipairs { "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zbv", "v-half", "v-min",
  "dualpipev" } do
  pipelines.test("memory does not grow with the microbatches: " .. name, 4, function(team)
    local peaks = {}
    for i, m in ipairs { 16, 32 } do
      local trainer = trainer_of(team, name, is_v[name] and 2 or 1, m)
      local batch = batch_of(m)
      trainer:step(batch)
      pipelines.tidy()
      core.reset_peaks()
      local before = core.memory().activations.current
      trainer:step(batch)
      peaks[i] = core.memory().activations.peak - before
    end
    check.near(peaks[2], peaks[1], 64 * 20, "bytes")
  end)
end

pipelines.test("spans ascend: each action begins when the one before has ended", 4, function(team)
  local trainer = trainer_of(team, "zbv", 2, 8)
  trainer:step(batch_of(8))
  local SPAN <const>, text, at = "dddddd", trainer.pipeline.exec:spans(), 1
  local last, n = 0, 0
  for _, action in ipairs(trainer.layout.sched:row(trainer.layout.rank)) do
    local start, finish
    start, finish, _, _, _, _, at = SPAN:unpack(text, at)
    if action.kind ~= "REDUCE_GRAD" then
      check.ok(start >= last and finish >= start, ("%s %d"):format(action.kind, n))
      last = finish
    end
    n = n + 1
  end
  check.equal(at, #text + 1)
end)

check.done()
