-- What two ranks see of a layout: splits, the parts of a trainer, timelines, what is elsewhere. Run
-- by tests/layout_test.sh; every rank runs the same tests, the first one prints.
local rille = require "rille"
local check = require "tests.check"
local core, nn = rille.core, rille.nn
local folder <const> = arg[1]
local rank <const> = core.rank

-- Other ranks say what failed there.
if rank > 0 then
  rawset(_G, "print", function(words)
    if not words:find("^%d+ passed") then rille.print_all(words) end
  end)
end

local function chain(n)
  local list = {}
  for i = 1, n do list[i] = nn.Linear { 6, 6, act = "gelu" } end
  return nn.Sequential(list)
end

rille.manual_seed(5)
local data <const> = { rille.randn(8, 6), rille.randn(8, 6) }
local function batch() return data end

local function trainer(parallel, more)
  local options = { model = chain(6), loss = nn.mse, seed = 1, log = 0, parallel = parallel,
    optimizer = { "sgd", lr = 0.1 }, batch = { global = 8, micro = 2 } }
  for key, value in pairs(more or {}) do options[key] = value end
  return rille.Trainer(options)
end

check.test("splits: uniform, by parameters, by time, a list with an empty stage", function()
  local t = trainer { pp = 2 }
  check.equal(t.layout.split.counts, { 3, 3 })
  check.equal(trainer { pp = 2, split = "parameters" }.layout.split.counts, { 3, 3 })
  local timed = trainer({ pp = 2, split = "time" }, { example = batch() }).layout.split
  check.equal(timed.counts[1] + timed.counts[2], 6)
  check.ok(timed.text:find("of the time", 1, true))
  local listed = trainer { pp = 2, stages_per_rank = 2, split = { 2, 0, 3, 1 } }
  check.equal(listed.layout.split.counts, { 2, 0, 3, 1 })
  local r, one = listed:step(batch()), trainer { comm = core.comm_world():split(rank, 0) }
  check.equal(r.loss, one:step(batch()).loss)
  check.equal(listed:fingerprint(), one:fingerprint())
end)

check.test("a split by time keeps within a rank's limit", function()
  local memory, one = core.memory, 16 * (6 * 6 + 6) -- bytes of a unit's weights and optimizer
  local function with_limit(bytes)
    core.memory = function() return { limit = bytes } end
    local _ <close> = setmetatable({}, { __close = function() core.memory = memory end })
    return trainer({ pp = 2, split = "time" }, { example = batch() }).layout.split.figures.bytes
  end
  local bytes = with_limit(1 << 30)
  check.ok(bytes > 3 * one)
  check.ok(with_limit(math.ceil(bytes)) <= math.ceil(bytes)) -- measured anew, it may be another
  check.raises(function() with_limit(3 * one) end, "no split keeps every rank within")
end)

check.test("wrong splits are refused with the split and the user's words", function()
  check.raises(function() trainer { pp = 2, split = { 3, 2 } } end, "5 units")
  check.raises(function() trainer { pp = 2, split = "tme" } end, "did you mean \"time\"")
  check.raises(function() trainer { pp = 2, split = "time" } end, "example = {inputs, targets}")
  check.raises(function() trainer { pp = 2, stages_per_rank = 4 } end, "8 stages")
  check.raises(function() trainer { pp = 3 } end, "pp 3")
  check.raises(function() trainer({ dp = 2 }, { batch = { global = 1 } }) end, "dp = 2")
end)

check.test("every part is in exactly one unit, or the error says which is not", function()
  local Net = nn.class "Net"
  function Net:init() self.a, self.b = nn.Linear { 6, 6 }, nn.Linear { 6, 6 } end
  function Net:forward(x) return self.b(self.a(x)) end
  check.raises(function() trainer({ pp = 2 }, { model = Net() }) end, "function Net:units()")
  function Net:units() return { self.a, self.a } end
  check.raises(function() trainer({ pp = 2 }, { model = Net() }) end, "a is there twice")
  function Net.units() return nil end
  check.raises(function() trainer({}, { model = Net() }) end,
    "units%(%) of Net must return a list of modules, got nil")
  function Net:units() return { self.a, "b" } end
  check.raises(function() trainer({}, { model = Net() }) end,
    "unit 1 must be a module, got the string \"b\"")
  function Net:units() return { self.a } end
  check.raises(function() trainer({}, { model = Net() }) end, "b.weight is in no unit")
end)

check.test("a parameter of another rank says where it is", function()
  local t = trainer { pp = 2 }
  local elsewhere = rank == 0 and "5.weight" or "0.weight"
  check.raises(function() return t.model:get(elsewhere):sum():item() end,
    elsewhere .. " is not on this rank: it belongs to stage")
end)

check.test("Pipeline: a loop of one's own gives the trainer's bits", function()
  local t = trainer { pp = 2 }
  local pipe = rille.Pipeline { model = chain(6), loss = nn.mse, seed = 1, parallel = { pp = 2 },
    batch = { global = 8, micro = 2 } }
  check.raises(function() pipe:step(batch()) end, "make the optimizer first")
  local optimizer = pipe:optimizer { "sgd", lr = 0.1 }
  for step = 1, 3 do
    local r, want = pipe:step(batch()), t:step(batch())
    optimizer:step(r.scale, nil, false, r.norms)
    check.equal({ r.loss, step }, { want.loss, want.step })
  end
  check.equal(pipe:fingerprint(), t:fingerprint())
end)

check.test("without clipping results come later, and are the same on every rank", function()
  local t, results = trainer { dp = 2 }, {}
  local loader = { batch = function() return batch() end }
  for step, given in t:steps(loader, 4) do
    results[step] = t:step(given)
    check.equal(rawget(results[step], "loss") == nil, step > 1) -- the first is waited for
  end
  local words = {}
  for step, r in ipairs(results) do
    words[step] = ("%d %.17g %.17g %d"):format(r.step, r.loss, r.grad_norm, r.count)
  end
  local text = table.concat(words, "\n")
  check.equal(core.comm_world():broadcast(text, 0), text)
  check.ok(results[4].loss < results[1].loss)
end)

check.test("losses that one stage alone adds, many a step, without clipping", function()
  local model, added = chain(6), 40
  model:on("0", function(_, out)
    for i = 1, added do rille.add_loss("l" .. i, out:square():mean(), 0.01) end
  end)
  local function losses(parallel, steps)
    local t, out = trainer(parallel, { model = model, batch = { global = 8, micro = 1 } }), {}
    for step, given in t:steps({ batch = function() return data end }, steps) do
      out[step] = t:step(given)
    end
    return out
  end
  local results = losses({ pp = 2 }, 3)
  check.ok(results[3].loss == results[3].loss and results[3].losses.l40 ~= nil)
end)

check.test("NaN without clipping: the step and module where it arose, on all ranks", function()
  for _, parallel in ipairs { { pp = 2 }, { dp = 2 } } do
    local model = chain(6)
    local t = trainer(parallel, { model = model })
    model:on("4", function(_, out)
      if core.place().step == 3 then return out * (0 / 0) end
    end)
    local ok, failure = pcall(function()
      for _, given in t:steps({ batch = function() return data end }, 6) do t:step(given) end
    end)
    check.equal(ok, false)
    check.ok(tostring(failure):find("^step 3: the loss is nan"))
    check.ok(tostring(failure):find("is that of 4 (Linear), microbatch 0", 1, true))
    check.equal(failure.code, 3)
  end
end)

check.test("ranks that would train other things are refused at once", function()
  local function other(what) return rank == 1 and what or nil end
  check.raises(function() trainer({ dp = 2 }, { optimizer = { "sgd", lr = 0.1 + rank } }) end,
    "option optimizer lr")
  check.raises(function() trainer({ dp = 2 }, { recompute = other(true) }) end, "option recompute")
  check.raises(function()
    local t = trainer { dp = 2 }
    if rank == 1 then rille.no_grad(function() t.model:get("0.weight"):zero_() end) end
    t:step(batch())
  end, "weights of fingerprint")
  check.raises(function()
    local x = rank == 1 and data[1] + 1 or data[1]
    trainer({ pp = 2 }):step { x, data[2] }
  end, "a first sample of digest")
end)

check.test("a pass cannot be begun within a pass; batches of another size are refused", function()
  local t = trainer { dp = 2 }
  t.model:on("0", function() t:predict(data[1]) end)
  check.raises(function() t:step(batch()) end, "cannot be called from within a unit")
  local pipe = rille.Pipeline { model = chain(2), loss = nn.mse, batch = { global = 8, micro = 2 } }
  pipe:optimizer { "sgd", lr = 0.1 }
  check.raises(function() pipe:step { data[1]:slice(0, 0, 4), data[2]:slice(0, 0, 4) } end,
    "the batch has 4 samples, batch.global is 8")
end)

check.test("nil among what a unit gives goes to the next stage like in one process", function()
  local Give, Take = nn.class "Give", nn.class "Take"
  function Give:init() self.linear = nn.Linear { 6, 6 } end
  function Give:forward(x) return self.linear(x), nil, x, nil end
  function Take:init() self.linear = nn.Linear { 6, 6 } end
  function Take:forward(h, none, x, ...)
    assert(none == nil and select("#", ...) == 1)
    return self.linear(h + x)
  end
  local function loss(parallel)
    return trainer(parallel, { model = nn.Sequential { Give(), Take() } }):step(batch()).loss
  end
  check.equal(loss { pp = 2 }, loss { comm = core.comm_world():split(rank, 0) })
end)

check.test("a timeline: promise and measurement, as an SVG and as text", function()
  local t = trainer { pp = 2, pipeline = "zb-h1" }
  for _ = 1, 2 do t:step(batch()) end
  local path = folder .. "/timeline.svg"
  local words = t:timeline(path)
  check.equal(words ~= nil, rank == 0)
  if words then
    check.ok(words:find("predicted, ms", 1, true) and words:find("measured, ms", 1, true))
    check.ok(words:find("warm_up", 1, true))
    check.ok(assert(io.open(path)):read("a"):find("</svg>", 1, true))
  end
  local bubble = t.pipeline:bubble(true)
  if bubble then
    local sum = 0
    for _, seconds in pairs(bubble.causes) do sum = sum + seconds end
    check.near(sum, bubble.idle, 1e-9)
  end
end)

check.done()
