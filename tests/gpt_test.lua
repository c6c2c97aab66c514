-- gpt_test - the model as a whole: PyTorch's losses and gradients from the same weights, and
-- results that do
-- not depend on how a step is carried out.
local rille = require "rille"
local check = require "tests.check"
local gpt = require "models.gpt"
local nn = rille.nn

-- ---- PyTorch (tests/reference_gpt.py)
local shape = { vocab = 48, T = 12, d = 24, layers = 2, heads = 4, hidden = 64 }

local function reference(style)
  local state = rille.load(("tests/golden/gpt_%s.safetensors"):format(style))
  local options = { style = style, kv_heads = style == "llama" and 2 or nil }
  for key, value in pairs(shape) do options[key] = value end
  local model = gpt(options)
  local weights = {}
  for name, tensor in pairs(state) do
    local own = name:match("^weight%.(.+)$")
    if own then weights[own] = tensor end
  end
  model:load_state_dict(weights)
  return model, state
end

local optimizer = { "adamw", lr = 3e-3, betas = { 0.9, 0.95 }, eps = 1e-8, weight_decay = 0.1,
  clip = 1.0 }

local function batch_of(tokens, step)
  local rows = tokens[step]
  local T = rows:size(1) - 1
  return { rows:slice(1, 0, T), rows:slice(1, 1, T + 1) }
end

for _, style in ipairs { "gpt2", "llama" } do
  check.test(style .. ": 20 losses are PyTorch's to 1e-4, by microbatches of 6, 2, 4", function()
    for _, micro in ipairs { 6, 2, 4 } do
      local model, state = reference(style)
      local trainer = rille.Trainer { model = model, loss = nn.cross_entropy, optimizer = optimizer,
        batch = { global = 6, micro = micro }, log = 0 }
      for step = 0, 19 do
        local r = trainer:step(batch_of(state.tokens, step))
        local note = ("micro %d, step %d"):format(micro, step)
        check.near(r.loss, state.losses[step]:item(), 1e-4, note)
      end
    end
  end)

  check.test(style .. ": the first gradients are PyTorch's to 1e-5 of the largest", function()
    local model, state = reference(style)
    local x, y = table.unpack(batch_of(state.tokens, 0))
    rille.cross_entropy(model(x), y):backward()
    local largest = 0
    for name, tensor in pairs(state) do
      if name:find("^grad") then largest = math.max(largest, tensor:abs():max():item()) end
    end
    for _, entry in ipairs(model:named_parameters()) do
      local want = state["grad." .. entry[1]]
      check.near((entry[2]:grad() - want):abs():max():item() / largest, 0, 1e-5, entry[1])
    end
  end)
end

-- ---- the same result by another road
local function tokens(n, T, vocab)
  local list = {}
  for i = 1, n * (T + 1) do list[i] = (i * 7919 + i * i * 31) % vocab end
  return rille.tensor(list, { dtype = "i64" }):view(n, T + 1)
end

local function small_run(options)
  local model = gpt { vocab = 48, T = 12, d = 24, layers = 3, heads = 4, style = options.style,
    dropout = options.dropout or 0 }
  local trainer = rille.Trainer { model = model, loss = options.loss or nn.cross_entropy,
    optimizer = options.optimizer or optimizer, seed = 5, log = 0,
    batch = { global = 8, micro = options.micro or 4 }, recompute = options.recompute }
  return trainer, model
end

local data = tokens(64, 12, 48)

local function batch(step)
  local first = step * 8 % 64
  local rows = data:slice(0, first, first + 8)
  return { rows:slice(1, 0, 12), rows:slice(1, 1, 13) }
end

local function train(options, n)
  local trainer, model = small_run(options)
  local losses = {}
  for step = 0, n - 1 do losses[step + 1] = trainer:step(batch(step)).loss end
  return losses, trainer:fingerprint(), trainer, model
end

check.test("two runs give the same bits", function()
  local a, fa = train({ dropout = 0.1 }, 4)
  local b, fb = train({ dropout = 0.1 }, 4)
  check.equal(a, b)
  check.equal(fa, fb)
end)

check.test("another seed gives other weights", function()
  local _, fa = train({}, 1)
  local model = gpt { vocab = 48, T = 12, d = 24, layers = 3, heads = 4 }
  local trainer = rille.Trainer { model = model, loss = nn.cross_entropy, optimizer = optimizer,
    seed = 6, log = 0, batch = { global = 8, micro = 4 } }
  trainer:step(batch(0))
  check.equal(fa ~= trainer:fingerprint(), true)
end)

for _, dropout in ipairs { 0, 0.1 } do
  check.test(("recompute on and off give the same bits, dropout %g"):format(dropout), function()
    local a, fa = train({ dropout = dropout }, 4)
    for _, what in ipairs { true, "attention" } do
      local b, fb = train({ dropout = dropout, recompute = what }, 4)
      check.equal(a, b)
      check.equal(fa, fb)
    end
  end)
end

-- The dropout masks of a step, sample by sample, when it is cut into microbatches of `micro`.
local function masks_of(micro)
  local Probe = nn.class "Probe"
  local seen = {}
  function Probe:init()
    self.drop = nn.Dropout(0.5)
    self.w = nn.Parameter({ 1 })
  end
  function Probe:forward(x)
    local ones = rille.ones { x:size(0), 5 }
    for r = 1, 2 do -- two random calls of one module differ
      local mask = self.drop(ones)
      for i = 0, x:size(0) - 1 do
        table.insert(seen, { r, table.concat(mask[i]:tolist(), " ") })
      end
    end
    return x * self.w
  end
  local trainer = rille.Trainer { model = Probe(), optimizer = { "sgd", lr = 0 }, seed = 3, log = 0,
    loss = function(y) return y:sum(), y:numel() end, batch = { global = 6, micro = micro } }
  trainer:step { rille.ones { 6, 1 } }
  local by_call = { {}, {} }
  for _, entry in ipairs(seen) do table.insert(by_call[entry[1]], entry[2]) end
  return by_call
end

check.test("dropout masks do not depend on how a batch is cut into microbatches", function()
  local whole = masks_of(6)
  for _, micro in ipairs { 1, 2, 4 } do check.equal(masks_of(micro), whole) end
  check.equal(whole[1] ~= nil and whole[1][1] ~= whole[2][1], true, "two calls, two masks")
end)

check.test("losses do not depend on how a batch is cut, to rounding", function()
  local whole = train({ micro = 8, dropout = 0.1 }, 3)
  for _, micro in ipairs { 1, 3, 5 } do
    local cut = train({ micro = micro, dropout = 0.1 }, 3)
    for i = 1, 3 do check.near(cut[i], whole[i], 2e-5, ("micro %d, step %d"):format(micro, i)) end
  end
end)

-- ---- the loss contract
local function six_rows()
  return rille.tensor({ 1, -2, 3, 0, 1, 1, 2, 2, -1, 5, 0, 1, -3, 1, 1, 0, 0, 2 },
    { dtype = "f32" }):view(6, 3)
end

local function gradient_of(options)
  local model = nn.Linear { 3, 4 }
  local trainer = rille.Trainer { model = model, optimizer = { "sgd", lr = 0 }, seed = 1, log = 0,
    loss = options.loss, batch = { global = 6, micro = options.micro } }
  local x = six_rows()
  local r = trainer:step { x, options.targets }
  -- the flat gradient still holds sums seeded with 1/C: scale by C/N, as the update did
  local scale = options.is_sum and 1 or r.tokens / r.count
  return (model.weight:grad() * scale):tolist(), r.loss, r
end

check.test("uneven masks: the loss is the mean over counted targets for every cut", function()
  local targets = rille.tensor({ 0, -100, -100, 3, 1, -100 }, { dtype = "i64" })
  local whole, loss = gradient_of { loss = nn.cross_entropy, targets = targets, micro = 6 }
  for _, micro in ipairs { 1, 2, 4, 5 } do
    local cut, other = gradient_of { loss = nn.cross_entropy, targets = targets, micro = micro }
    check.near(cut, whole, 1e-6)
    check.near(other, loss, 1e-6)
  end
end)

check.test("a sum loss is not divided", function()
  local targets = rille.tensor({ 0, 1, 2, 3, 1, 0 }, { dtype = "i64" })
  local mean, loss = gradient_of { loss = nn.cross_entropy, targets = targets, micro = 2 }
  local sum, total = gradient_of { loss = nn.cross_entropy { reduction = "sum" }, targets = targets,
    micro = 2, is_sum = true }
  check.near(total, 6 * loss, 1e-5)
  check.near(sum[1][1], 6 * mean[1][1], 1e-5)
end)

check.test("a plain scalar loss counts as a mean over samples", function()
  local function mean_loss(y) return y:square():mean() end
  local whole, loss = gradient_of { loss = mean_loss, micro = 6 }
  for _, micro in ipairs { 1, 4 } do
    local cut, other = gradient_of { loss = mean_loss, micro = micro }
    check.near(cut, whole, 1e-5)
    check.near(other, loss, 1e-5)
  end
end)

check.test("no target that counts is an error by name", function()
  local targets = rille.full({ 6 }, -100, { dtype = "i64" })
  check.raises(function()
    gradient_of { loss = nn.cross_entropy, targets = targets, micro = 2 }
  end, "no target counts")
end)

check.test("add_loss: the same loss and gradient for every cut, beside uneven masks", function()
  local targets = rille.tensor({ 0, -100, -100, 3, 1, -100 }, { dtype = "i64" })
  local function run(micro)
    local Net = nn.class "Net"
    function Net:init() self.lin = nn.Linear { 3, 4 } end
    function Net:forward(x)
      local y = self.lin(x)
      rille.add_loss("size", y:square():mean(), 0.5)
      return y
    end
    local model = Net()
    local trainer = rille.Trainer { model = model, optimizer = { "sgd", lr = 1 }, seed = 1, log = 0,
      loss = nn.cross_entropy, batch = { global = 6, micro = micro } }
    local x = six_rows()
    local r = trainer:step { x, targets }
    return r.loss, r.losses.size, model.lin.weight:tolist()
  end
  local loss, size, weight = run(6)
  for _, micro in ipairs { 1, 2, 4 } do
    local other, other_size, other_weight = run(micro)
    check.near(other, loss, 1e-5)
    check.near(other_size, size, 1e-5)
    check.near(other_weight, weight, 1e-5)
  end
end)

-- ---- buffers
local function running_mean(micro, recompute)
  local Mean = nn.class "Mean"
  function Mean:init()
    self.w = nn.Parameter({ 2 })
    self.w:fill_(1)
    self:buffer("mean", rille.zeros { 2 })
  end
  function Mean:forward(x)
    local now = x:detach():mean(0):keep()
    self:update_buffer("mean", function(old) return old * 0.9 + now * 0.1 end)
    return x * self.w
  end
  local model = Mean()
  local trainer = rille.Trainer { model = model, optimizer = { "sgd", lr = 0.1 }, log = 0,
    recompute = recompute, loss = function(y) return y:sum(), y:numel() end,
    batch = { global = 4, micro = micro } }
  trainer:step { rille.tensor({ 1, 2, 3, 4, 5, 6, 7, 8 }, { dtype = "f32" }):view(4, 2) }
  return model.mean:tolist()
end

check.test("a running mean is written once a microbatch, never by recomputation", function()
  -- microbatches (1,2),(3,4) and (5,6),(7,8): means (2,3), (6,7): 0.9 * 0.1 m0 + 0.1 m1
  local want = { 0.9 * 0.2 + 0.6, 0.9 * 0.3 + 0.7 }
  check.near(running_mean(2, false), want, 1e-6)
  check.near(running_mean(2, true), want, 1e-6)
  check.near(running_mean(4, true), { 0.4, 0.5 }, 1e-6)
end)

-- ---- frozen and tied
check.test("a frozen unit keeps its weights, the others train", function()
  local trainer, model = small_run {}
  model:get("h.1"):requires_grad_(false)
  local before = model:get("h.1.mlp.up.weight"):clone()
  local other = model:get("h.0.mlp.up.weight"):clone()
  trainer:step(batch(0))
  check.equal(model:get("h.1.mlp.up.weight"), before)
  check.equal((model:get("h.0.mlp.up.weight") - other):abs():max():item() > 0, true)
end)

check.test("a tied weight is one parameter", function()
  local _, model = small_run {}
  for _, entry in ipairs(model:named_parameters()) do
    check.equal(entry[1] ~= "head.weight", true)
  end
end)

-- ---- failing
check.test("a loss that is not finite names the first layer whose output is not", function()
  local trainer, model = small_run {}
  rille.no_grad(function() model:get("h.1.mlp.up.bias"):fill_(0 / 0) end)
  local ok, err = pcall(trainer.step, trainer, batch(0))
  check.equal(ok, false)
  check.equal(tostring(err):find("h.1.mlp.up", 1, true) ~= nil, true, tostring(err))
end)

check.test("nonfinite = skip leaves the weights alone", function()
  local model = nn.Linear { 2, 2 }
  local trainer = rille.Trainer { model = model, optimizer = { "sgd", lr = 1 }, log = 0,
    nonfinite = "skip", loss = function(y) return y:sum(), y:numel() end,
    batch = { global = 1, micro = 1 } }
  local before = trainer:fingerprint()
  local r = trainer:step { rille.tensor({ 1 / 0, 1 }, { dtype = "f32" }):view(1, 2) }
  check.equal(r.skipped, true)
  check.equal(trainer:fingerprint(), before)
end)

check.test("wrong batches and options are refused with words", function()
  local trainer = small_run {}
  local x = data:slice(0, 0, 5)
  check.raises(function()
    trainer:step { x:slice(1, 0, 12), x:slice(1, 1, 13) }
  end, "batch has 5 samples, batch.global is 8")
  check.raises(function() rille.Trainer { optimiser = {} } end, "did you mean \"optimizer\"")
  check.raises(function()
    rille.Trainer { model = nn.Linear { 1, 1 }, loss = nn.mse, optimizer = "sgd",
      batch = { global = 1 }, parallel = { pp = 2 } }
  end, "pp 2 makes 2 ranks a copy of the model, but there is 1")
end)

check.done()
