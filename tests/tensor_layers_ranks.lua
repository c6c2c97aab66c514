-- Layers of one's own under tensor parallelism, on two ranks: declared forms, cut randomness, added
-- losses, recomputation, and what is refused. Run by tests/tensor_layers_test.sh.
local rille = require "rille"
local check = require "tests.check"
local tensor_parallel = require "rille.tensor_parallel"
local core, nn = rille.core, rille.nn
local rank <const> = core.rank

if rank > 0 then -- other ranks say what failed there
  rawset(_G, "print", function(words)
    if not words:find("^%d+ passed") then rille.print_all(words) end
  end)
end

local alone = core.comm_world():split(rank, 0)
local D <const>, T <const>, B <const> = 8, 6, 4

-- The whole gradients by name, the loss and what tp has sent in a step of `options`' model.
local function step_of(options, parallel)
  parallel.comm = parallel.tp and core.comm_world() or alone
  local trainer = rille.Trainer { model = options.model(), loss = options.loss or nn.mse, seed = 3,
    log = 0, parallel = parallel, recompute = options.recompute,
    optimizer = { "sgd", lr = 0.1, clip = options.clip }, batch = { global = B, micro = 2 } }
  local l, grads, x = trainer.layout, {}, options.x
  local r = trainer:step { x, options.y or x }
  for _, p in ipairs(l.params) do
    local grad = p.tensor:grad():clone() -- the second step writes there
    grads[p.name] = p.cut and tensor_parallel.gather(l.tp.group, p.cut, grad, p.shape) or grad
  end
  local first, sent = r.loss, trainer.pipeline:communication().tp
  return { grads = grads, loss = first, norm = r.grad_norm, losses = r.losses,
    messages = sent and sent.messages, second = trainer:step { x, options.y or x }.loss,
    fingerprint = trainer.pipeline:common_fingerprint() }
end

-- Layouts give the gradients of one process.
local function compare(claim, options)
  for _, sequence in ipairs { false, true } do
    check.test(("%s%s"):format(claim, sequence and ", time cut" or ""), function()
      rille.manual_seed(7)
      options.x = options.ids and rille.randint(0, options.ids, B, T) or rille.randn(B, T, D)
      options.y = options.ids and rille.randint(0, options.ids, B, T) or nil
      local one = step_of(options, {})
      local two = step_of(options, { tp = 2, sequence_parallel = sequence })
      local largest = 0
      for _, grad in pairs(one.grads) do largest = math.max(largest, grad:abs():max():item()) end
      for name, grad in pairs(one.grads) do
        local gap = (grad - two.grads[name]):abs():max():item()
        check.ok(gap <= 1e-6 * largest, ("%s differs by %g of %g"):format(name, gap, largest))
      end
      check.near(two.loss, one.loss, 1e-6 * math.abs(one.loss))
      check.near(two.norm, one.norm, 1e-5 * one.norm)
      check.near(two.second, one.second, 1e-5 * math.abs(one.second))
      for name, value in pairs(one.losses) do check.near(two.losses[name], value, 1e-6) end
    end)
  end
end

local Mine = nn.class "Mine"
function Mine:init(o)
  self.up = nn.Linear { D, 12, act = "gelu", tp = "column" }
  self.drop = nn.Dropout { o.dropout or 0, tp = "column" }
  self.down = nn.Linear { 12, D, act = o.act or "none", tp = "row" }
  self.after = nn.Dropout(o.dropout or 0)
  self.aux = o.aux
end
function Mine:forward(x)
  local y = self.after(self.down(self.drop(self.up(x))))
  if self.aux then rille.add_loss("size", y:square():mean(), 0.3) end
  return x + y
end

local function chain(...)
  local list = table.pack(...)
  return function()
    local made = {}
    for i, make in ipairs(list) do made[i] = make() end
    return nn.Sequential(made)
  end
end
local function norm() return nn.LayerNorm(D) end

compare("column, row and a loss of its own", { model = chain(function() return Mine {} end, norm,
  function() return Mine { act = "silu" } end) })
compare("dropout on cut features and after them", { model = chain(function()
  return Mine { dropout = 0.4 }
end, norm) })
compare("an added loss", { model = chain(norm, function() return Mine { aux = true } end, norm) })
compare("... in a recomputed unit", { recompute = true, model = chain(norm, function()
  return Mine { aux = true, dropout = 0.3 }
end, norm) })
compare("a last layer cut by columns", { model = chain(norm, function()
  return nn.Linear { D, D, tp = "column" }
end) })
compare("units that end between a column and a row form", { model = chain(function()
  return nn.Linear { D, 10, act = "relu", tp = "column" }
end, function() return nn.Linear { 10, D, tp = "row" } end, norm) })

-- Heads of one's own, with a norm of each.
local Heads = nn.class "Heads"
function Heads:init(kv)
  self.kv = kv
  self.qkv = nn.Linear { D, (4 + 2 * kv) * 2, tp = "heads", heads = 4, kv_heads = kv }
  self.norm = nn.RMSNorm { 2, tp = "heads" }
  self.out = nn.Linear { 8, D, tp = "row" }
end
function Heads:forward(x)
  local qkv = self.qkv(x)
  local b, t, n = qkv:shape()
  local all = n // 2
  local share = rawget(self, "_tp") and 2 or 1
  local q, kv = 4 // share, math.max(self.kv // share, 1)
  local split = qkv:view(b, t, all, 2)
  local heads = self.norm(split:slice(2, 0, q))
  local y = rille.attention(heads, split:slice(2, q, q + kv), split:slice(2, q + kv, all), nil,
    { causal = true })
  return x + self.out(y:view(b, t, q * 2))
end
for _, kv in ipairs { 4, 2, 1 } do
  compare(("heads of one's own, %d of keys"):format(kv), { model = chain(norm, function()
    return Heads(kv)
  end) })
end

compare("attention that is not cut", { model = chain(norm, function()
  return nn.Attention { D, 2, causal = true, tp = "replicate" }
end, norm) })

local function language(o)
  return chain(function()
    return nn.TokenEmbedding { 7, D, positions = T, tp = o.embedding, std = 0.5 }
  end, function()
    return nn.Attention { D, 4, causal = true, kv_heads = o.kv or 4, rotary = o.rotary }
  end, function() return nn.MLP { D, 12, act = o.act } end, norm,
  function() return nn.Linear { D, 7, tied = o.tied and "0.weight" or nil, bias = not o.tied } end)
end
compare("a vocabulary of 7 in two parts", { ids = 7, loss = nn.cross_entropy, model = language {} })
compare("... tied", { ids = 7, loss = nn.cross_entropy, model = language { tied = true } })
compare("... smoothed, with z-loss, some targets ignored", { ids = 7,
  loss = nn.cross_entropy { label_smoothing = 0.1, z_loss = 0.01, ignore_index = 3 },
  model = language { tied = true } })
compare("an embedding that is not cut", { ids = 7, loss = nn.cross_entropy,
  model = language { embedding = "replicate" } })
compare("a loss of one's own on whole logits", { ids = 7, model = language { rotary = true },
  loss = function(y, target)
    check.equal(y:size(-1), 7)
    return rille.cross_entropy(y, target)
  end })
compare("swiglu, one head of keys, clipped", { ids = 7, loss = nn.cross_entropy, clip = 0.01,
  model = language { act = "swiglu", kv = 1, rotary = true } })

-- A layer that mixes time, and an end of the model without it.
local Mix = nn.class "Mix"
Mix.time = "whole"
function Mix:init()
  self.scale = nn.Parameter({ D }, { init = function(p) p:uniform_(0, 1) end })
end
function Mix:forward(x) return x + x:mean({ 1 }, true) * self.scale end
local Pool = nn.class "Pool"
Pool.time = "whole"
function Pool:init()
  self.norm = nn.LayerNorm(D)
  self.out = nn.Linear { D, D }
end
function Pool:forward(x) return self.out(self.norm(x):mean { 1 }) end
local function to_means(y, target) return nn.mse(y, target:mean { 1 }) end
compare("a layer that mixes time", { model = chain(norm, Mix, norm) })
compare("a model that ends without time", { model = chain(norm, Mix, Pool), loss = to_means })

-- A whole module that runs a part again in backward, and adds a loss.
local Again = nn.class "Again"
Again.time = "whole"
function Again:init()
  self.attn = nn.Attention { D, 4 }
  self.mlp = nn.MLP { D, 12 }
  self.drop = nn.Dropout(0.3)
end
function Again:forward(x)
  x = x + self.attn(x)
  rille.add_loss("size", x:square():mean(), 0.3)
  return x + rille.checkpoint(function(y) return self.drop(self.mlp(y)) end, x)
end
for _, recompute in ipairs { false, true, "attention" } do
  compare("recomputation within a module that sees time whole, " .. tostring(recompute),
    { recompute = recompute, model = chain(norm, Again, norm) })
end

local Own = nn.class "Own"
Own.time = "whole"
function Own:init()
  self.table = nn.Parameter({ 7, D }, { init = function(p) p:normal_(0, 1) end })
end
function Own:forward(ids) return rille.embedding(self.table, ids) end
compare("an embedding of one's own", { ids = 7, loss = nn.cross_entropy, model = chain(Own, norm,
  function() return nn.Attention { D, 4, causal = true } end,
  function() return nn.Linear { D, 7 } end) })

-- A head within a module of one's own.
local function wrapped(form)
  local Wrap = nn.class "Wrap"
  function Wrap:init() self.out = nn.Linear { D, 7, tp = form } end
  function Wrap:forward(x) return self.out(x) end
  return chain(function() return nn.TokenEmbedding { 7, D, std = 0.5 } end, norm, Wrap)
end
compare("a head within a module", { ids = 7, loss = nn.cross_entropy, model = wrapped "vocab" })
compare("a last layer by columns within a module", { model = chain(norm, function()
  local Wrap = nn.class "Wrap"
  function Wrap:init() self.out = nn.Linear { D, D, tp = "column" } end
  function Wrap:forward(x) return self.out(x) end
  return Wrap()
end) })

local function one_step(make, parallel, x, loss)
  local trainer = rille.Trainer { model = make(), loss = loss or nn.mse, optimizer = "sgd",
    seed = 3, log = 0, batch = { B, 2 }, parallel = parallel }
  trainer:step { x, x }
  return trainer
end

check.test("what cannot be made whole is refused", function()
  local x = rille.randn(B, T, D)
  local sequence = { tp = 2, sequence_parallel = true }
  check.raises(function()
    one_step(chain(norm, function() return nn.Linear { D, 24, tp = "heads", heads = 2 } end),
      { tp = 2 }, x, function(y) return y:sum(), y:numel() end)
  end, "1 %(Linear%) is cut by heads and ends the model")
  check.raises(function()
    local Ends = nn.class "Ends"
    Ends.forward = function(_, y) return y:mean { 1 } end
    one_step(chain(norm, Ends), sequence, x, to_means)
  end, "the model gives f32%[2, 8%], whose dimension 1 is no part of the T = 6", "time = \"whole\"")
  check.raises(function() one_step(chain(norm), sequence, rille.randn(B, D)) end,
    "the input f32%[2, 8%] has no time")
  check.raises(function() one_step(chain(norm), { comm = alone, sequence_parallel = true }, x) end,
    "but tp is 1")
end)

check.test("what follows an end of time, or is made of cut features, is refused", function()
  local x = rille.randn(B, T, D)
  local Half = nn.class "Half"
  Half.time = "whole"
  Half.forward = function(_, y) return y:slice(1, 0, T // 2) end
  check.raises(function()
    one_step(chain(Half, norm), { tp = 2, sequence_parallel = true }, x, to_means)
  end, "0 %(Half%) sees time whole and gives f32%[2, 3, 8%], which has not its T = 6 positions")
  local Product = nn.class "Product"
  function Product:init()
    self.a, self.b = nn.Linear { D, D, tp = "column" }, nn.Linear { D, D, tp = "column" }
  end
  function Product:forward(y) return self.a(y) * self.b(y) end
  check.raises(function()
    one_step(chain(norm, Product), { tp = 2 }, x, function(y) return y:square():mean() end)
  end, "1.b %(Linear%) is cut by its features, and what is made of them ends the model")
  local Odd = nn.class "Odd"
  Odd.time = "hole"
  Odd.forward = function(_, y) return y end
  check.raises(function() one_step(chain(norm, Odd), { tp = 2 }, x) end, "time = \"hole\"")
end)

do -- a loss that asks the model itself
  local model
  local function own_answers(y)
    local answer = rille.no_grad(function() return model(nil) end)
    return rille.cross_entropy(y, answer:argmax(-1):view(y:size(0), T))
  end
  local Ids = nn.class "Ids" -- answers for ids of its own where it is asked for none
  function Ids:init() self.table = nn.TokenEmbedding { 7, D, std = 0.5 } end
  function Ids:forward(ids) return self.table(ids or rille.ones(2, T):to("i64")) end
  compare("a loss that calls the model", { ids = 7, loss = own_answers, model = function()
    model = chain(Ids, norm, function() return nn.Linear { D, 7, tp = "vocab" } end)()
    return model
  end })
end

check.test("a whole parameter that drifts apart is named after the first step", function()
  local Scale = nn.class "Scale"
  function Scale:init(sums)
    self.up = nn.Linear { D, 12, tp = "column" }
    self.s = nn.Parameter({ 1 }, { init = function(p) p:fill_(1) end })
    self.down = nn.Linear { 12, D, tp = "row" }
    self.sums = sums
  end
  function Scale:tensor_parallel(plan)
    if self.sums then plan:sums(self, "s") end
  end
  function Scale:forward(x) return self.down(self.up(x) * self.s) end
  local x = rille.randn(B, T, D)
  check.raises(function()
    one_step(chain(function() return Scale(false) end), { tp = 2 }, x):step { x, x }
  end, "0.s of fingerprint", "plan:sums")
  one_step(chain(function() return Scale(true) end), { tp = 2 }, x):step { x, x }
end)

check.test("a model that is called by itself gives whole outputs", function()
  rille.manual_seed(7)
  local model, x = language { rotary = true } (), rille.randint(0, 7, B, T)
  local parallel = { tp = 2, sequence_parallel = true }
  local trainer = rille.Trainer { model = model, loss = nn.cross_entropy, seed = 3, log = 0,
    optimizer = "sgd", batch = { B, 2 }, parallel = parallel }
  local y = rille.no_grad(function() return model(x) end)
  check.equal({ y:shape() }, { B, T, 7 })
  check.ok((y - trainer:predict(x)):abs():max():item() < 1e-6)
  rille.Trainer { model = model, loss = nn.cross_entropy, seed = 3, log = 0, optimizer = "sgd",
    batch = { B, 2 }, parallel = parallel }:step { x, x } -- a second one on the same model
end)

check.test("recomputation sends no more: sums that were kept are not taken again", function()
  rille.manual_seed(7)
  local options = { loss = nn.cross_entropy, model = language {}, ids = 7,
    x = rille.randint(0, 7, B, T), y = rille.randint(0, 7, B, T) }
  local plain = step_of(options, { tp = 2 })
  for _, recompute in ipairs { true, "attention" } do
    options.recompute = recompute
    local again = step_of(options, { tp = 2 })
    check.equal(again.messages, plain.messages)
    check.equal(again.fingerprint, plain.fingerprint)
  end
end)

for _, sequence in ipairs { false, true } do
  check.test("running statistics are those of one process, alike on all ranks"
    .. (sequence and ", time cut" or ""), function()
    local Mean = nn.class "Mean"
    function Mean:init() self:buffer("mean", rille.zeros { D }) end
    function Mean:forward(x)
      local mean = x:mean({ 0, 1 }):detach():keep()
      self:update_buffer("mean", function(old) return old * 0.5 + mean * 0.5 end)
      return x
    end
    rille.manual_seed(7)
    local x = rille.randn(B, T, D)
    local function mean_of(parallel)
      local model = chain(norm, Mean, function() return Mine {} end)()
      local trainer = rille.Trainer { model = model, loss = nn.mse, seed = 3, log = 0,
        optimizer = "sgd", batch = { B, 2 }, parallel = parallel }
      trainer:step { x, x }
      return model:get "1"._buffers.mean
    end
    local one = mean_of { comm = alone }
    local two = mean_of { tp = 2, sequence_parallel = sequence }
    check.ok((one - two):abs():max():item() < 1e-6)
    core.comm_world():agree { tostring(core.digest(two, 0)) }
  end)
end

check.test("predict gives whole logits for any length, on all ranks", function()
  rille.manual_seed(7)
  local function trainer(parallel)
    return rille.Trainer { model = language { rotary = true } (), loss = nn.cross_entropy, seed = 3,
      log = 0, optimizer = "sgd", batch = { B, 2 }, parallel = parallel }
  end
  local x = rille.randint(0, 7, 1, 5)
  local one = trainer { comm = alone }:predict(x)
  local two = trainer { tp = 2, sequence_parallel = true }:predict(x)
  check.equal({ two:shape() }, { 1, 5, 7 })
  check.ok((one - two):abs():max():item() < 1e-5)
end)

check.test("what does not fit is refused, by name", function()
  local function refused(make, ...)
    local words = table.pack(...)
    check.raises(function()
      rille.Trainer { model = make(), loss = nn.mse, optimizer = "sgd", batch = { B, 2 },
        parallel = { tp = 2 } }
    end, table.unpack(words))
  end
  refused(chain(norm, function() return nn.Attention { 9, 3 } end),
    "tp = 2 does not fit 1.qkv %(Linear%): 3 heads do not divide into 2 parts", "replicate")
  refused(chain(norm, function() return nn.MLP { D, 13 } end),
    "tp = 2 does not fit 1.up %(Linear%): its d_out = 13 does not divide into 2 parts")
  check.raises(function() nn.Linear { 2, 2, tp = "colum" } end, "did you mean \"column\"")
  check.raises(function() nn.Linear { 2, 2, tp = "heads" } end, "needs heads")
end)

check.test("a length that tp does not divide is refused where time is cut", function()
  check.raises(function()
    local x = rille.randn(B, 5, D)
    local trainer = rille.Trainer { model = chain(norm)(), loss = nn.mse, optimizer = "sgd",
      batch = { B, 2 }, parallel = { tp = 2, sequence_parallel = true }, log = 0 }
    trainer:step { x, x }
  end, "T = 5 does not divide into the 2 parts of tp")
end)

check.test("targets that are no class are refused on all ranks", function()
  check.raises(function()
    local x = rille.randint(0, 7, B, T)
    local trainer = rille.Trainer { model = language {} (), loss = nn.cross_entropy, log = 0,
      optimizer = "sgd", batch = { B, 2 }, parallel = { tp = 2 } }
    trainer:step { x, x + 5 }
  end, "targets holds %d+ at position %d+, valid are 0 to 6")
end)

check.done()
