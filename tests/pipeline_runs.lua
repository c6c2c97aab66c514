-- pipeline_runs - whole runs over pipelines and replicas: evaluation, sampling, checkpoints,
-- schedules of one's own, and what is refused.
--
--     rille -n 4 tests/pipeline_runs.lua
local rille <const> = require "rille"
local check <const> = require "tests.check"
local pipelines <const> = require "tests.pipelines"
local core <const> = rille.core
local nn <const> = rille.nn

local world <const> = core.comm_world()

-- A trainer of a small model over a group. o: model, trainer = fields of either.
local function trainer_of(comm, layout, o)
  o = o or {}
  local parallel = { comm = comm }
  for key, value in pairs(layout or {}) do parallel[key] = value end
  local spec = { model = pipelines.model { units = o.units or 8, dropout = o.dropout or 0.1,
    tied = o.tied }, loss = nn.cross_entropy, optimizer = { "adamw", lr = 0.01, clip = 1 },
    batch = { global = 8, micro = 2 }, seed = 2, log = 0, parallel = parallel }
  for key, value in pairs(o.trainer or {}) do spec[key] = value end
  return rille.Trainer(spec)
end

local function step(trainer, k) return trainer:step(pipelines.batch(8, k, true)) end

local loader = {}
function loader.batch(_, k, n) return pipelines.batch(n, 100 + k, true) end
function loader.n_batches() return 7 end

-- ---- evaluation, prediction, sampling

for _, layout in ipairs { { pp = 4, pipeline = "zb-h1" }, { pp = 2, pipeline = "zbv" },
  { pp = 2, dp = 2 }, { dp = 4 } } do
  local n = (layout.pp or 1) * (layout.dp or 1)
  local words = ("pp %d, dp %d, %s"):format(layout.pp or 1, layout.dp or 1,
    layout.pipeline or "1f1b")
  pipelines.test("evaluation before, between and after steps (" .. words .. ")", n,
    function(team, alone)
      local here, one = trainer_of(team, layout), trainer_of(alone)
      local plain = trainer_of(team, layout)
      local tolerance = layout.dp and 1e-6 or 0
      local found = {}
      -- negative: an evaluation of so many batches; positive: a step
      for i, what in ipairs { -7, -3, 1, -1, -2, 2, 3, -7 } do
        if what < 0 then
          found[i] = { here:evaluate(loader, -what), one:evaluate(loader, -what) }
        else
          found[i] = { step(here, what).loss, step(one, what).loss }
          step(plain, what)
        end
      end
      for i, pair in ipairs(found) do
        check.near(pair[1], pair[2], i <= 2 and 0 or tolerance * pair[2], "number " .. i)
      end
      check.equal(here:fingerprint(), plain:fingerprint(), "evaluation changes no weight")
      local losses = team:all_gather(("<d"):pack(found[8][1]))
      for rank, text in ipairs(losses) do
        check.equal(("<d"):unpack(text), found[8][1], "the loss on rank " .. rank - 1)
      end
    end)

  pipelines.test("prediction and sampling are those of one process (" .. words .. ")", n,
    function(team, alone)
      local here, one = trainer_of(team, layout, { tied = true }), trainer_of(alone, nil,
        { tied = true })
      local x = pipelines.batch(3, 5)[1]
      local have, want = here:predict(x), one:predict(x)
      local options = { temperature = 0.8, top_k = 5, seed = 4 }
      local ids, expected = rille.sample(here, { 1, 2 }, 6, options),
        rille.sample(one, { 1, 2 }, 6, options)
      step(here, 1)
      check.equal(have:tolist(), want:tolist())
      check.equal(ids, expected)
    end)
end

-- ---- initial weights, uneven shares

pipelines.test("initial weights do not depend on the layout, nor on what was made before", 4,
  function(team, alone)
    local want = trainer_of(alone):fingerprint()
    rille.randn { 3 + team:rank() } -- ranks that have drawn differently
    for _, layout in ipairs { { pp = 4 }, { pp = 2, dp = 2, pipeline = "zbv" }, { dp = 4 },
      { pp = 4, pipeline = "interleaved", stages_per_rank = 2 } } do
      check.equal(trainer_of(team, layout):fingerprint(), want)
    end
  end)

for _, sizes in ipairs { { 7, 2 }, { 5, 1 }, { 9, 2 }, { 3, 4 }, { 2, 1 } } do
  local n, micro = sizes[1], sizes[2]
  for _, pipeline in ipairs { "1f1b", "zbv", "gpipe" } do
    pipelines.test(("%d samples by %d over two replicas, %s"):format(n, micro, pipeline), 4,
      function(team, alone)
        pipelines.check(team, alone, {
          model = function() return pipelines.model { units = 6, dropout = 0.1, tied = true } end,
          loss = nn.cross_entropy, global = n, micro = micro,
          batch = function(k) return pipelines.batch(n, k, true) end,
          layout = { pp = 2, dp = 2, pipeline = pipeline },
        })
      end)
  end
end

for _, group in ipairs { 4, 5, 8 } do
  pipelines.test("interleaved in groups of " .. group, 4, function(team, alone)
    pipelines.check(team, alone, {
      model = function() return pipelines.model { units = 9, dropout = 0.1 } end,
      loss = nn.cross_entropy, global = 15, micro = 2,
      batch = function(k) return pipelines.batch(15, k, true) end,
      layout = { pp = 4, pipeline = "interleaved", stages_per_rank = 2, group = group },
    })
  end)
end

-- ---- optimizers

for _, entry in ipairs {
  { "the largest gradient as the norm", { "sgd", lr = 0.1, clip = 1e-3, clip_norm = "inf" } },
  { "groups of parameters", { "adamw", lr = 0.01, groups = { { match = "wte", lr = 0.1 },
    { match = "bias", weight_decay = 0 }, { weight_decay = 0.2 } } } },
  { "a schedule of rates", { "sgd", lr = 0.1, momentum = 0.9, nesterov = true,
    schedule = { "cosine", warmup = 2, total = 4 } } },
  { "weights in bf16", { "adamw", lr = 0.01 }, "bf16" },
} do
  for _, layout in ipairs { { pp = 4, pipeline = "zb-h1" },
    { pp = 2, dp = 2, pipeline = "zbv" } } do
    local is_half = entry[3] ~= nil
    if not (is_half and layout.dp) then
      pipelines.test(("%s (dp %d)"):format(entry[1], layout.dp or 1), 4, function(team, alone)
        pipelines.check(team, alone, {
          model = function()
            return pipelines.model { units = 7, tied = true, dtype = entry[3] }
          end,
          loss = nn.cross_entropy, global = 8, micro = 2, optimizer = entry[2], steps = 4,
          batch = function(k) return pipelines.batch(8, k, true) end, layout = layout,
        })
      end)
    end
  end
end

pipelines.test("a step that is not finite on one rank is skipped by all", 4, function(team, alone)
  local function run(comm, layout)
    local model = nn.Sequential { nn.Linear { 8, 8 }, nn.Linear { 8, 8 }, nn.Linear { 8, 8 },
      nn.Linear { 8, 8 } }
    local parallel, skipped = { comm = comm }, {}
    for key, value in pairs(layout) do parallel[key] = value end
    local trainer = rille.Trainer { model = model, loss = nn.mse, optimizer = "adamw", seed = 1,
      log = 0, nonfinite = "skip", batch = { global = 4, micro = 1 }, parallel = parallel }
    for k = 1, 3 do
      local x = rille.arange(32):to("f32"):view(4, 8) * (0.1 * k)
      if k == 2 then x[3][0] = 1 / 0 end -- the last sample: on one replica alone
      skipped[k] = trainer:step { x, x }.skipped
    end
    return skipped, trainer:fingerprint()
  end
  local want, fingerprint = run(alone, {})
  check.equal(want, { false, true, false })
  for _, layout in ipairs { { pp = 4 }, { pp = 2, dp = 2 }, { dp = 4 } } do
    local have, print_here = run(team, layout)
    check.equal(have, want)
    if layout.pp == 4 then check.equal(print_here, fingerprint) end
    for _, other in ipairs(team:all_gather(print_here)) do check.equal(other, print_here) end
  end
end)

-- ---- random masks

-- What goes into the loss: the output of dropout on ones.
pipelines.test("every sample of every step has a mask of its own, the same under every layout", 4,
  function(team, alone)
    local Masked = nn.class "Masked"
    function Masked:init()
      self.lin = nn.Linear { 32, 32 }
      self.drop = nn.Dropout(0.5)
    end
    function Masked:forward(x) return self.drop(x * 0 + 1) + self.lin(x) * 0 end
    local Plain = nn.class "Plain"
    function Plain:init() self.lin = nn.Linear { 32, 32 } end
    function Plain:forward(x) return x + self.lin(x) * 0 end
    local function masks_of(comm, layout)
      local seen, n = {}, 0
      local spec = { comm = comm }
      for key, value in pairs(layout) do spec[key] = value end
      local trainer = rille.Trainer { parallel = spec, seed = 6, log = 0, optimizer = { "sgd" },
        model = nn.Sequential { Masked(), Plain(), Plain(), Plain() },
        batch = { global = 8, micro = 2 },
        loss = function(y)
          for i = 0, y:size(0) - 1 do
            local words = {}
            for k, value in ipairs(y:slice(0, i, i + 1):view(-1):tolist()) do
              words[k] = value > 0 and "1" or "0"
            end
            seen[table.concat(words)] = true
          end
          return y:sum(), y:numel()
        end }
      for _ = 1, 3 do trainer:step { rille.ones { 8, 32 } } end
      local list = {}
      for words in pairs(seen) do table.insert(list, words .. "\n") end
      for _, text in ipairs(comm:all_gather(table.concat(list))) do
        for words in text:gmatch "%d+" do
          if seen[words] ~= 0 then seen[words], n = 0, n + 1 end
        end
      end
      local all = {}
      for words in pairs(seen) do table.insert(all, words) end
      table.sort(all)
      return n, table.concat(all, " ")
    end
    local n, want = masks_of(alone, {})
    check.equal(n, 24, "three steps of eight samples")
    for _, layout in ipairs { { pp = 4 }, { pp = 2, dp = 2 }, { dp = 4 } } do
      local _, have = masks_of(team, layout)
      check.ok(have == want, "other masks")
    end
  end)

-- ---- checkpoints

local directory <const> = world:broadcast(world:rank() == 0 and os.tmpname() or "", 0) .. ".d"

local function path(name) return directory .. "/" .. name end
if world:rank() == 0 then core.make_directory(directory) end
world:barrier()

local K <const>, N <const> = 3, 6

local function steps(trainer, from, to)
  local r
  for k = from, to do r = step(trainer, k) end
  return r
end

-- What a trainer writes at step K, and what it is at step N.
local function write(team, layout, name)
  local trainer = trainer_of(team, layout, { tied = true })
  steps(trainer, 1, K)
  local saved = trainer:save(path(name))
  local at_k = trainer:fingerprint()
  local last = steps(trainer, K + 1, N)
  return saved, at_k, trainer:fingerprint(), last.loss
end

local grid <const> = { pp = 2, dp = 2, pipeline = "zbv" }

pipelines.test("k steps, resume, N - k steps are N steps, bit for bit", 4, function(team)
  local saved, at_k, at_n, loss = write(team, grid, "same.safetensors")
  local again = trainer_of(team, grid, { tied = true })
  check.equal(again:resume(saved), K)
  check.equal(again:fingerprint(), at_k)
  check.equal(steps(again, K + 1, N).loss, loss)
  check.equal(again:fingerprint(), at_n)
end)

pipelines.test("a checkpoint of pp 2 x dp 2 goes on under other layouts", 4, function(team, alone)
  local saved, at_k, _, loss = write(team, grid, "other.safetensors")
  local finals = {}
  for i, layout in ipairs { { pp = 4 }, { dp = 4 }, { pp = 2, dp = 2, pipeline = "gpipe" },
    { pp = 4, pipeline = "interleaved", stages_per_rank = 2 } } do
    local other = trainer_of(team, layout, { tied = true })
    check.equal(other:resume(saved), K)
    check.equal(other:fingerprint(), at_k, "layout " .. i)
    check.near(steps(other, K + 1, N).loss, loss, 1e-5, "layout " .. i)
    finals[i] = other:fingerprint()
  end
  local one = trainer_of(alone, nil, { tied = true })
  one:resume(saved)
  check.equal(one:fingerprint(), at_k)
  steps(one, K + 1, N)
  check.equal({ finals[1], finals[4] }, { one:fingerprint(), one:fingerprint() },
    "pipelines give the bits of one process")
end)

pipelines.test("a checkpoint of one process goes on under pp 2 x dp 2", 4, function(team, alone)
  local name = ("alone-%d.safetensors"):format(team:rank())
  local saved, at_k, _, loss = write(alone, {}, name)
  local other = trainer_of(team, grid, { tied = true })
  saved = team:broadcast(saved, 0)
  other:resume(saved)
  check.equal(other:fingerprint(), at_k)
  check.near(steps(other, K + 1, N).loss, loss, 1e-5)
end)

-- ---- schedules of one's own

-- The last microbatch's backward first would be refused as out of order; this one runs forwards in
-- pairs: F0 F1 B0 B1 F2 F3 ...
local paired <const> = rille.schedule {
  name = "paired",
  order = function(r, _, m)
    local list = {}
    for first = 0, m - 1, 2 do
      for _, kind in ipairs { "F", "B" } do
        for mb = first, math.min(first + 1, m - 1) do table.insert(list, r .. kind .. mb) end
      end
    end
    return list
  end,
}

-- Backward of late microbatches first: allowed, but the sum is another one.
local backwards <const> = rille.schedule {
  name = "backwards",
  order = function(r, _, m)
    local list = {}
    for mb = 0, m - 1 do table.insert(list, r .. "F" .. mb) end
    for mb = m - 1, 0, -1 do table.insert(list, r .. "B" .. mb) end
    return list
  end,
}

local function check_own(pipeline, layout, tolerance)
  return function(team, alone)
    local here = trainer_of(team, { pp = 4, pipeline = pipeline, stages_per_rank = layout })
    local one = trainer_of(alone)
    for k = 1, 3 do
      check.near(step(here, k).loss, step(one, k).loss, tolerance)
    end
    if tolerance == 0 then check.equal(here:fingerprint(), one:fingerprint()) end
  end
end

pipelines.test("a schedule of one's own runs, bit for bit", 4, check_own(paired, nil, 0))
pipelines.test("one whose backwards descend runs, to rounding", 4, check_own(backwards, nil, 1e-5))

if world:rank() == 0 then
  local sched = rille.schedule "zbv":build { pp = 4, microbatches = 4 }
  local file = assert(io.open(path "zbv.csv", "w"))
  file:write(sched:csv())
  file:close()
end
world:barrier()
pipelines.test("a schedule from a file runs", 4, check_own(path "zbv.csv", 2, 0))

-- ---- what is refused, in the words of the script's options, on every rank, before any message

local function refuses(claim, layout, o, ...)
  local patterns = { ... }
  pipelines.test("refused: " .. claim, 4, function(team)
    check.raises(function() trainer_of(team, layout, o) end, table.unpack(patterns))
    team:barrier() -- nothing is under way
  end)
end

refuses("more stages than units", { pp = 4, stages_per_rank = 3, pipeline = "interleaved" }, nil,
  "12 stages for 8 units", "pp", "stages_per_rank")
refuses("a group that deadlocks", { pp = 4, stages_per_rank = 3, pipeline = "interleaved",
  group = 3 }, { units = 12, trainer = { batch = { global = 14, micro = 2 } } }, "group = 3",
  "microbatches = 7", "pp = 4", "good values are 7")
refuses("fewer samples than replicas", { dp = 4 }, { trainer = { batch = { global = 3 } } },
  "batch.global = 3", "dp = 4")
refuses("a schedule that does not exist", { pp = 4, pipeline = "1fb1" }, nil, '"1fb1"', '"1f1b"')
refuses("stages a rank that the schedule has not", { pp = 4, pipeline = "zbv",
  stages_per_rank = 3 }, nil, "stages_per_rank = 3", "zbv", "interleaved")
refuses("ranks that do not fit", { pp = 3 }, nil, "pp 3", "4")
refuses("a split that loses a unit", { pp = 4, split = { 2, 2, 2, 1 } }, nil, "places 7 units",
  "8")
refuses("a split for other stages", { pp = 4, split = { 4, 4 } }, nil, "2 stages", "4")
refuses("an option that does not exist", { pp = 4, stages = 2 }, nil, '"stages"')
refuses("a schedule for other sizes", { pp = 2, dp = 2, pipeline = path "zbv.csv" }, nil,
  "pp = 2", "pp = 4")
refuses("an order that deadlocks", { pp = 4, pipeline = rille.schedule {
  name = "wrong", order = function(r, _, m)
    local list = {}
    for mb = 0, m - 1 do
      table.insert(list, r .. "F" .. mb)
      if r % 2 == 0 then table.insert(list, r .. "B" .. mb) end
    end
    for mb = 0, r % 2 == 1 and m - 1 or -1 do table.insert(list, r .. "B" .. mb) end
    return list
  end } }, nil, "wrong", "refused")

pipelines.test("a model without units is refused with words that show how", 4, function(team)
  local Whole = nn.class "Whole"
  function Whole:init() self.lin = nn.Linear { 4, 4 } end
  check.raises(function()
    rille.Trainer { model = Whole(), loss = nn.mse, optimizer = "adamw", log = 0,
      batch = { global = 8, micro = 2 }, parallel = { comm = team, pp = 4 } }
  end, "Whole", "units%(%)")
end)

world:barrier()
if world:rank() == 0 then os.execute(("rm -r '%s'"):format(directory)) end
check.done()
