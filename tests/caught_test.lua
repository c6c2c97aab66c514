-- caught_test - a script may catch the error of an action of a step: what the step had begun is
-- gone, and the step again is the step as it would have been.
local check <const> = require "tests.check"
local rille <const> = require "rille"
local core <const> = rille.core
local nn <const> = rille.nn

local faults = {} -- what the model does wrong: {where =, mb =}

local function fault_at(where)
  if faults.where == where and core.place().microbatch == faults.mb then
    faults.where = nil
    error("a fault in " .. where, 0)
  end
end

-- A unit with all that a step keeps: random masks, a running statistic, an added loss, a gradient
-- of its own.
local Unit = nn.class "Unit"

function Unit:init(d)
  self.linear = nn.Linear { d, d }
  self.drop = nn.Dropout(0.3)
  self:buffer("seen", rille.zeros { 1 })
end

local faulty = rille.op { name = "faulty",
  forward = function(_, x) return x * 1 end,
  backward = function(_, dy)
    fault_at "backward"
    return dy * 1
  end,
}

function Unit:forward(x)
  local y = self.drop(self.linear(x))
  local mean = y:detach():mean():item()
  self:update_buffer("seen", function(old)
    if faults.where == "buffer" then
      faults.n = faults.n - 1
      if faults.n < 0 then error("a fault in a buffer", 0) end
    end
    return old * 0.5 + mean
  end)
  rille.add_loss("size", (y * y):mean(), 0.1)
  fault_at "forward"
  return faulty(y)
end

local function make(options)
  options = options or {}
  local model = nn.Sequential { { "a", Unit(4) }, { "b", Unit(4) }, { "c", nn.Linear { 4, 3 } } }
  return rille.Trainer { model = model, loss = options.loss or nn.cross_entropy, log = 0, seed = 7,
    optimizer = { "adamw", lr = 0.05, schedule = options.schedule },
    nonfinite = options.nonfinite, batch = { global = 6, micro = 2 } }, model
end

local function batch(step)
  rille.manual_seed(100 + step)
  local x, y = rille.randn { 6, 4 }, {}
  for i = 1, 6 do y[i] = (i * step) % 3 end
  rille.manual_seed(7)
  return { x, rille.tensor(y, { dtype = "i64" }) }
end

local batches <const> = { batch(1), batch(2), batch(3) }

local function state_of(trainer, model)
  local words = { trainer:fingerprint() }
  for _, entry in ipairs(model:named_buffers()) do
    table.insert(words, ("%.17g"):format(entry[2]:item()))
  end
  return table.concat(words, " ")
end

-- Three steps of which the second fails first, as `fault` says; between() runs after the failure.
local function run(fault, between)
  local trainer, model = make()
  local losses = {}
  for step, b in ipairs(batches) do
    if step == 2 and fault then
      faults = fault
      local good, words = pcall(trainer.step, trainer, b)
      check.ok(not good and tostring(words):find "a fault in", "it fails: " .. tostring(words))
      faults = {}
      if between then between(trainer, model) end
    end
    losses[step] = ("%.17g"):format(trainer:step(b).loss)
  end
  return table.concat(losses, " ") .. " " .. state_of(trainer, model)
end

local clean <const> = run()

for _, where in ipairs { "forward", "backward" } do
  for mb = 0, 2 do
    local claim = "a step that failed in %s of microbatch %d is the same step again"
    check.test(claim:format(where, mb), function()
      check.equal(run { where = where, mb = mb }, clean)
    end)
  end
end

check.test("after a failed step nothing is within a step", function()
  local function outside(trainer, model)
    check.equal(core.place().step, -1)
    check.ok(not nn.staged_updates and not nn.added_losses)
    trainer.optimizer:zero_grad()
    model:eval()
    local before = model:get("a")._buffers.seen:item()
    model(rille.ones { 2, 4 })
    check.ok(model:get("a")._buffers.seen:item() ~= before, "a buffer changes at once")
  end
  run({ where = "forward", mb = 1 }, outside)
  run({ where = "backward", mb = 1 }, outside)
end)

-- Random numbers outside steps go on where they were.
check.test("a failed step takes no random numbers of the script", function()
  local function numbers(fault)
    local trainer = make()
    trainer:step(batches[1])
    if fault then
      faults = fault
      check.ok(not pcall(trainer.step, trainer, batches[2]))
      faults = {}
    end
    return rille.randn { 3 }
  end
  local want = numbers()
  check.equal(numbers { where = "forward", mb = 1 }, want)
  check.equal(numbers { where = "backward", mb = 2 }, want)
end)

check.test("a failed evaluation and a failed prediction leave nothing behind", function()
  local trainer, model = make()
  trainer:step(batches[1])
  local loader = { batch = function() return batches[2] end, n_batches = function() return 1 end }
  for _, call in ipairs { function() return trainer:evaluate(loader) end,
    function() return trainer:predict(batches[2][1]) end } do
    faults = { where = "forward", mb = 0 }
    check.ok(not pcall(call))
    check.ok(not nn.added_losses)
    check.ok(model.training, "it trains again")
  end
  faults = {}
  trainer:step(batches[2])
  trainer:step(batches[3])
  local other, its_model = make()
  for _, b in ipairs(batches) do other:step(b) end
  check.equal(trainer:fingerprint(), other:fingerprint())
  check.ok(its_model ~= model)
end)

check.test("Pipeline: a step that failed is the same step again", function()
  local function losses_of(fails)
    rille.manual_seed(7)
    local model = nn.Sequential { { "a", Unit(4) }, { "b", Unit(4) }, { "c", nn.Linear { 4, 3 } } }
    local pipe = rille.Pipeline { model = model, loss = nn.cross_entropy,
      batch = { global = 6, micro = 2 } }
    local optimizer, losses = pipe:optimizer { "sgd", lr = 0.1 }, {}
    for step, b in ipairs(batches) do
      faults = { where = "backward", mb = 1 }
      if fails and step > 1 then check.ok(not pcall(pipe.step, pipe, b)) end
      faults = {}
      local r = pipe:step(b)
      optimizer:step(r.scale, 3, false, r.norms)
      losses[step] = r.loss
    end
    return losses
  end
  check.equal(losses_of(true), losses_of(false))
end)

-- What is found only when all has been computed: the weights and buffers that made it stay, and the
-- step again is the step as it would have been.
local function judged(spoil, options)
  local function go(fails)
    local trainer, model = make(options)
    local losses = {}
    for step, b in ipairs(batches) do
      if fails and step == 2 then
        local before = state_of(trainer, model)
        local good, words = spoil(trainer, b)
        check.ok(not good, "it fails")
        check.equal(state_of(trainer, model), before, tostring(words))
      end
      losses[step] = ("%.17g"):format(trainer:step(b).loss)
    end
    return table.concat(losses, " ") .. " " .. state_of(trainer, model)
  end
  check.equal(go(true), go(false))
end

check.test("a step of which no target counts changes no buffer", function()
  judged(function(trainer, b)
    return pcall(trainer.step, trainer, { b[1], rille.full({ 6 }, -100, { dtype = "i64" }) })
  end)
end)

check.test("a step whose loss is not finite changes no buffer, nor does looking for why", function()
  judged(function(trainer, b) return pcall(trainer.step, trainer, { b[1] * (0 / 0), b[2] }) end)
end)

check.test("a step that is skipped changes no buffer", function()
  local trainer, model = make { nonfinite = "skip" }
  trainer:step(batches[1])
  local before = state_of(trainer, model)
  check.ok(trainer:step({ batches[2][1] * (0 / 0), batches[2][2] }).skipped)
  check.equal(state_of(trainer, model), before)
  check.ok(not trainer:step(batches[3]).skipped)
  check.ok(state_of(trainer, model) ~= before)
end)

check.test("a buffer's function that fails leaves all buffers, and the weights", function()
  judged(function(trainer, b)
    faults = { where = "buffer", n = 4 } -- before that others have been put in place
    local good, words = pcall(trainer.step, trainer, b)
    faults = {}
    return good, words
  end)
end)

check.test("a schedule that fails leaves the buffers and the number of updates", function()
  local fails
  local schedule = function(step)
    if fails then
      fails = nil
      error("a fault in the schedule", 0)
    end
    return 1 / step
  end
  judged(function(trainer, b)
    fails = true
    return pcall(trainer.step, trainer, b)
  end, { schedule = schedule })
end)

check.test("memory that is lacking for the optimizer's state changes no weight", function()
  local groups = { { match = "^a" }, { match = "^b" }, {} }
  for _, dtype in ipairs { "f32", "bf16" } do
    local n = 0
    for at = 1, 18 do -- three sets, two arrays each, three allocations an array
      local linear = function() return nn.Linear { 4, 4, dtype = dtype } end
      local model = nn.Sequential { { "a", linear() }, { "b", linear() }, { "c", linear() } }
      local function bits()
        local digest = 0
        for _, entry in ipairs(model:named_parameters()) do
          digest = core.digest(entry[2]:detach(), digest)
        end
        return digest
      end
      local optimizer = rille.optim.new(model:named_parameters(),
        { "adamw", lr = 0.1, groups = groups })
      model(rille.ones({ 2, 4 }, { dtype = dtype })):sum():backward()
      local before = bits()
      core.fail_at(at)
      local good, words = pcall(optimizer.apply, optimizer, 1)
      core.fail_at(0)
      check.ok(not good and tostring(words):find "memory", tostring(words))
      if bits() == before and optimizer.steps_done == 0 then n = n + 1 end
      optimizer:apply(1)
      check.ok(optimizer.steps_done == 1 and bits() ~= before)
    end
    check.equal(n, 18)
  end
end)

check.test("Pipeline: a step that is not finite changes no buffer", function()
  local model = nn.Sequential { { "a", Unit(4) }, { "c", nn.Linear { 4, 3 } } }
  local pipe = rille.Pipeline { model = model, loss = nn.cross_entropy,
    batch = { global = 6, micro = 2 } }
  pipe:optimizer { "sgd", lr = 0.1 }
  pipe:step(batches[1])
  local seen = model:get("a")._buffers.seen
  local before = seen:item()
  check.ok(before ~= 0)
  local r = pipe:step { batches[2][1] * (0 / 0), batches[2][2] }
  check.ok(r.loss ~= r.loss)
  check.equal(seen:item(), before)
end)

-- One that knows of no gradient: those are finite.
check.test("a step whose loss alone is not finite counts nowhere", function()
  local off = 0
  local function loss(y, t)
    local sum, count = nn.cross_entropy(y, t)
    return sum + off, count
  end
  local trainer, model = make { nonfinite = "skip", loss = loss }
  trainer:step(batches[1])
  local before, lr = state_of(trainer, model), trainer.optimizer:lr(2)
  off = 0 / 0
  local r = trainer:step(batches[2])
  check.ok(r.skipped and r.loss ~= r.loss and r.grad_norm == r.grad_norm and r.lr == lr)
  check.equal(state_of(trainer, model), before)
  check.equal(trainer.optimizer.steps_done, 1)
  off = 0
  judged(function(t, b)
    off = 0 / 0
    local good, words = pcall(t.step, t, b)
    check.ok(tostring(words):find "the loss is nan", tostring(words))
    off = 0
    return good, words
  end, { loss = loss })
  local unit = Unit(4)
  local pipe = rille.Pipeline { model = nn.Sequential { unit, nn.Linear { 4, 3 } }, loss = loss,
    batch = { global = 6, micro = 2 } }
  pipe:optimizer { "sgd", lr = 0.1 }
  check.equal(pipe:step(batches[1]).nonfinite, nil)
  local seen = unit._buffers.seen:item()
  off = 0 / 0
  check.equal(pipe:step(batches[2]).nonfinite, "loss")
  check.equal(unit._buffers.seen:item(), seen)
  off = 0
  check.equal(pipe:step { batches[2][1] * (0 / 0), batches[2][2] }.nonfinite, "loss")
end)

check.test("memory that a failed step held is free", function()
  local trainer = make()
  for _ = 1, 3 do trainer:step(batches[1]) end
  collectgarbage()
  local before = core.memory().activations.current
  for _ = 1, 20 do
    faults = { where = "backward", mb = 2 }
    check.ok(not pcall(trainer.step, trainer, batches[2]))
  end
  faults = {}
  collectgarbage()
  check.equal(core.memory().activations.current, before)
end)

check.done()
