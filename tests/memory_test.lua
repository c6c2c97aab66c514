-- memory_test - what training holds on to: bytes by formula, a flat resident size, a clear end.
local rille = require "rille"
local check = require "tests.check"
local nn, core = rille.nn, rille.core

local function resident_bytes()
  local f = assert(io.open("/proc/self/statm"))
  local pages = tonumber(f:read("a"):match("^%d+ (%d+)"))
  f:close()
  return pages * 4096
end

check.test("10,000 small training steps keep the resident size flat", function()
  local model = nn.Sequential { nn.Linear { 8, 16, act = "relu" }, nn.Linear { 16, 4 } }
  local trainer = rille.Trainer { model = model, loss = nn.mse, optimizer = "adamw", log = 0,
    batch = { global = 4, micro = 2 } }
  local x, y = rille.randn { 4, 8 }, rille.randn { 4, 4 }
  local first
  for step = 1, 10000 do
    trainer:step { x, y }
    if step == 2000 then first = resident_bytes() end
  end
  local grown = resident_bytes() - first
  check.equal(grown < 2 * 1024 * 1024, true, ("grew by %d bytes"):format(grown))
end)

check.test("a loop of one's own over plain tensors keeps it flat too", function()
  local model = nn.Linear { 64, 64 }
  local x = rille.randn { 64, 64 }
  local first
  for step = 1, 4000 do
    local loss = model(x):square():mean()
    loss:backward()
    model.weight:zero_grad()
    model.bias:zero_grad()
    if step == 1000 then first = resident_bytes() end
  end
  local grown = resident_bytes() - first
  check.equal(grown < 4 * 1024 * 1024, true, ("grew by %d bytes"):format(grown))
end)

-- A unit whose backward reads its input (the weight's gradient) and its pre-activation.
local function live_after_forward(recompute)
  local B, D, H = 4, 32, 64
  local Unit = nn.class "Unit"
  function Unit:init()
    self.up = nn.Linear { D, H, act = "gelu", bias = false }
    self.down = nn.Linear { H, D, bias = false }
  end
  function Unit:forward(x) return self.down(self.up(x)) end
  local live
  local model = nn.Repeat(3, Unit)
  local trainer = rille.Trainer { model = model, optimizer = { "sgd", lr = 0 }, log = 0,
    recompute = recompute, batch = { global = B, micro = B },
    loss = function(y)
      local sum = y:sum()
      live = core.memory().activations.current
      return sum, y:numel()
    end }
  local x = rille.randn { B, D }
  local before = core.memory().activations.current
  trainer:step { x, x }
  local f = 4
  -- saved a unit: up's z and result (x, the result of the unit before, is counted below)
  local saved = recompute and 0 or 3 * 2 * B * H * f
  local inputs = 2 * B * D * f -- of units 1 and 2; unit 0 reads the batch itself
  local output = B * D * f
  return live - before, saved + inputs + output
end

check.test("live activations of a step are those of the formula", function()
  local live, want = live_after_forward(false)
  check.near(live, want, 512, "beside the result's few bytes")
end)

check.test("with recompute only the inputs of units are live", function()
  local live, want = live_after_forward(true)
  check.near(live, want, 512, "beside the result's few bytes")
end)

check.test("with recompute = \"attention\" only the input of each attention is live", function()
  local B, T, d, f = 2, 16, 32, 4
  local function live_of(recompute)
    local Unit = nn.class "Unit"
    function Unit:init() self.attn = nn.Attention { d, 2, causal = true, bias = false } end
    function Unit:forward(x) return self.attn(x) end
    local live
    local trainer = rille.Trainer { model = nn.Repeat(3, Unit), optimizer = { "sgd", lr = 0 },
      log = 0, recompute = recompute, batch = { global = B, micro = B }, loss = function(y)
        live = core.memory().activations.current
        return y:sum(), y:numel()
      end }
    local x = rille.randn { B, T, d }
    local before = core.memory().activations.current
    trainer:step { x, x }
    return live - before
  end
  -- gone: q, k, v, the result of attention and its B H T logarithms
  local gone = 3 * (4 * B * T * d + B * 2 * T) * f
  check.near(live_of(false) - live_of("attention"), gone, 1024, "beside a few bytes")
end)

check.test("after a step no activation is left", function()
  local model = nn.Linear { 8, 8 }
  local trainer = rille.Trainer { model = model, loss = nn.mse, optimizer = "adamw", log = 0,
    batch = { global = 4, micro = 2 } }
  local x = rille.randn { 4, 8 }
  trainer:step { x, x }
  collectgarbage()
  local before = core.memory().activations.current
  for _ = 1, 5 do trainer:step { x, x } end
  collectgarbage()
  check.equal(core.memory().activations.current, before)
end)

check.test("a handle kept beyond its step says so; keep() holds on to the values", function()
  local loose, kept
  local Leak = nn.class "Leak"
  function Leak:init() self.lin = nn.Linear { 2, 2 } end
  function Leak:forward(x)
    loose = x * 2
    kept = (x * 3):keep()
    return self.lin(x)
  end
  local trainer = rille.Trainer { model = Leak(), loss = nn.mse, optimizer = "adamw", log = 0,
    batch = { global = 1, micro = 1 } }
  local x = rille.tensor({ 1, 2 }, { dtype = "f32" }):view(1, 2)
  trainer:step { x, x }
  check.raises(function() loose:sum() end, "belongs to step 1, microbatch 0", "keep")
  check.equal(kept:tolist(), { { 3.0, 6.0 } })
end)

check.test("out of memory: kind, sizes, what to change; the session goes on", function()
  check.raises(function() rille.zeros { 1 << 40 } end, "out of memory", "activations", "hint")
  check.equal(rille.ones { 2 }:sum():item(), 2.0)
end)

check.test("the n-th allocation of a step fails: a clean error, nothing lost", function()
  local model = nn.Sequential { nn.Linear { 4, 8, act = "gelu" }, nn.LayerNorm(8),
    nn.Linear { 8, 2 } }
  local trainer = rille.Trainer { model = model, loss = nn.mse, optimizer = "adamw", log = 0,
    batch = { global = 2, micro = 1 } }
  local x, y = rille.randn { 2, 4 }, rille.randn { 2, 2 }
  trainer:step { x, y }
  collectgarbage()
  local before = core.memory()
  local failures, n = 0, 0
  repeat
    n = n + 1
    core.fail_at(n)
    local ok, err = pcall(trainer.step, trainer, { x, y })
    core.fail_at(0)
    if not ok then
      failures = failures + 1
      check.equal(tostring(err):find("out of memory", 1, true) ~= nil, true, tostring(err))
    end
  until ok or n > 2000
  collectgarbage()
  check.equal(failures > 20, true, ("%d failures"):format(failures))
  trainer:step { x, y }
  collectgarbage()
  local after = core.memory()
  check.equal(after.activations.current, before.activations.current, "activations")
  check.equal(after.workspace.current, before.workspace.current, "workspace")
end)

check.done()
