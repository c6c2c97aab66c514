-- pipeline_models - models of every shape over pipelines do what they do in one process:
--
--     rille -n 4 tests/pipeline_models.lua
local rille <const> = require "rille"
local check <const> = require "tests.check"
local pipelines <const> = require "tests.pipelines"
local core <const> = rille.core
local nn <const> = rille.nn

local WIDTH <const>, VOCAB <const> = pipelines.width, pipelines.vocab

-- Ranks and layouts that every model runs under: at most eight stages.
local layouts <const> = {
  { 4, { pp = 4, pipeline = "1f1b" } },
  { 4, { pp = 4, pipeline = "zb-h1" } },
  { 3, { pp = 3, pipeline = "interleaved", stages_per_rank = 2 } },
  { 4, { pp = 4, pipeline = "zbv", stages_per_rank = 2 } },
  { 2, { pp = 2, pipeline = "hanayo", stages_per_rank = 4 } },
  { 4, { pp = 4, pipeline = "bfs", stages_per_rank = 2 } },
  { 4, { pp = 2, dp = 2, pipeline = "dualpipev", stages_per_rank = 2, bucket = 300 } },
}

local function words_of(layout)
  return ("pp %d, dp %d, %s"):format(layout.pp, layout.dp or 1, layout.pipeline)
end

local function token_batch(n, masked)
  return function(step) return pipelines.batch(n, step, masked) end
end

-- The claim, once for each layout, with and without recomputation. o as of pipelines.check, and
--   exact_only     leave out replicas
--   exact_stages   bit for bit only with so many stages, else to rounding
local function under_all(claim, o)
  for i, entry in ipairs(layouts) do
    local n, layout = entry[1], entry[2]
    if not (o.exact_only and layout.dp) then
      pipelines.test(("%s (%s)"):format(claim, words_of(layout)), n, function(team, alone)
        local all = { global = 8, micro = 2, loss = nn.cross_entropy, batch = token_batch(8, true) }
        for key, value in pairs(o) do all[key] = value end
        all.layout, all.recompute = layout, i % 2 == 0
        local n_stages = layout.pp * (layout.stages_per_rank or 1)
        if o.exact_stages and o.exact_stages ~= n_stages then all.tolerance = 1e-6 end
        pipelines.check(team, alone, all)
      end)
    end
  end
end

local function embedding() return { "wte", nn.TokenEmbedding { VOCAB, WIDTH, std = 0.5 } } end
local function head() return { "head", nn.Linear { WIDTH, VOCAB } } end
local function mlp(i) return { "h" .. i, nn.MLP { WIDTH, 12 } } end

-- ---- named values: skip connections, an encoder's output

local Down = nn.class "Down"
function Down:init(name)
  self.writes = { name }
  self.lin = nn.Linear { WIDTH, WIDTH, act = "gelu" }
end
function Down:forward(x)
  local y = self.lin(x)
  return y, y * 0.5 + x
end

-- Its result goes on, and is the skipping value too.
local Same = nn.class "Same"
function Same:init(name)
  self.writes = { name }
  self.lin = nn.Linear { WIDTH, WIDTH, act = "gelu" }
end
function Same:forward(x)
  local y = self.lin(x)
  return y, y
end

local Up = nn.class "Up"
function Up:init(name)
  self.reads = { name }
  self.lin = nn.Linear { 2 * WIDTH, WIDTH, act = "gelu" }
end
function Up:forward(x, skip) return self.lin(rille.cat({ x, skip }, { dim = -1 })) end

local function u_net(Wide)
  return function()
    return nn.Sequential { embedding(), { "d0", Wide "s0" }, { "d1", Wide "s1" }, mlp(0), mlp(1),
      { "u1", Up "s1" }, { "u0", Up "s0" }, head() }
  end
end

under_all("a U-shaped model: skip connections over several stages", { model = u_net(Down) })
under_all("a skipping value that also goes to the next stage", { model = u_net(Same) })

local Decoder = nn.class "Decoder"
Decoder.reads = { "memory" }
function Decoder:init()
  self.q = nn.Linear { WIDTH, WIDTH }
  self.k = nn.Linear { WIDTH, WIDTH }
end
function Decoder:forward(x, memory) return x + self.q(x) * self.k(memory):tanh() end

local Encoder = nn.class "Encoder"
Encoder.writes = { "memory" }
function Encoder:init() self.lin = nn.Linear { WIDTH, WIDTH, act = "gelu" } end
function Encoder:forward(x) return x * 0.5, self.lin(x) end

-- One process sums the gradients of all five uses in order; a stage that has two of them sums them
-- first.
under_all("an encoder's output is read by every stage of the decoder", {
  exact_stages = 8,
  model = function()
    local list = { embedding(), { "enc", Encoder() } }
    for i = 0, 4 do table.insert(list, { "dec" .. i, Decoder() }) end
    table.insert(list, head())
    return nn.Sequential(list)
  end,
})

-- ---- what crosses a boundary

local Open = nn.class "Open" -- ids -> x, and what later units need of the ids
function Open:init() self.wte = nn.TokenEmbedding { VOCAB, WIDTH, std = 0.5 } end
function Open:forward(ids)
  return self.wte(ids), ids, ids:gt(4), rille.full({}, 2, { dtype = "f32" })
end

local Many = nn.class "Many"
function Many:init()
  self.lin = nn.Linear { WIDTH, WIDTH, act = "gelu" }
  self.more = nn.TokenEmbedding { VOCAB, WIDTH, std = 0.5 }
end
function Many:forward(x, ids, mask, scale, y)
  local B, T = ids:shape()
  local z = rille.where(mask:view(B, T, 1), self.lin(x), x) * scale
  if y then z = z + y end
  return x + z, ids, mask, scale, self.more(ids) -- i64, bool, a number, a second gradient
end

local Close = nn.class "Close"
function Close:init() self.lin = nn.Linear { WIDTH, VOCAB } end
function Close:forward(x, ids, _, _, y)
  return self.lin(x + y) + ids:to("f32"):mean()
end

under_all("several tensors cross a boundary, of any dtype, with and without gradient", {
  model = function()
    local list = { { "open", Open() } }
    for i = 0, 5 do table.insert(list, { "m" .. i, Many() }) end
    table.insert(list, { "close", Close() })
    return nn.Sequential(list)
  end,
})

-- Sequences of another length in each microbatch.
local Varying = {}
Varying.__index = Varying
local function length_at(first) return 2 + (first // 2) % 3 end
function Varying:rows(first, n)
  return self.whole:slice(0, first, first + n):slice(1, 0, length_at(first)):contiguous()
end
function Varying:numel()
  local total = 0
  for first = 0, self.n - 1, 2 do total = total + length_at(first) * math.min(2, self.n - first) end
  return total
end

under_all("shapes change from microbatch to microbatch", {
  model = function() return pipelines.model { units = 8 } end,
  batch = function(step)
    local whole = pipelines.batch(8, step, false)
    return { setmetatable({ whole = whole[1], n = 8 }, Varying),
      setmetatable({ whole = whole[2], n = 8 }, Varying) }
  end,
})

-- Messages that the transport does not copy at once: their memory must stay until they are out.
local LARGE <const> = 256
under_all("large tensors cross boundaries", {
  model = function()
    local list = { { "wte", nn.TokenEmbedding { VOCAB, LARGE, std = 0.5 } } }
    for i = 0, 5 do table.insert(list, { "h" .. i, nn.Linear { LARGE, LARGE, act = "gelu" } }) end
    table.insert(list, { "head", nn.Linear { LARGE, VOCAB } })
    return nn.Sequential(list)
  end,
  global = 32, micro = 8, batch = token_batch(32, false), steps = 1,
})

-- ---- stages of all kinds

local function frozen(names)
  return function()
    local model = pipelines.model { units = 8, dropout = 0.1 }
    for _, name in ipairs(names) do model:get(name):requires_grad_(false) end
    return model
  end
end

under_all("frozen stages at the front: no gradient goes there", {
  model = frozen { "wte", "h0", "h1" },
})
under_all("a frozen stage in the middle", { model = frozen { "h2", "h3" } })
under_all("a frozen head", { model = frozen { "head", "ln_f" } })

under_all("stages without parameters", {
  model = function()
    return nn.Sequential { embedding(), { "a", nn.Activation "gelu" },
      { "b", nn.Activation "gelu_tanh" }, mlp(0), { "c", nn.Activation "silu" },
      { "d", nn.Dropout(0.1) },
      { "e", nn.Activation "gelu" }, head() }
  end,
})

for _, split in ipairs { { 0, 4, 0, 2 }, { 6, 0, 0, 0 }, { 3, 0, 3, 0 } } do
  for _, tied in ipairs { false, true } do
    local words = table.concat(split, ", ")
    pipelines.test(("empty stages, %s%s"):format(words, tied and ", tied" or ""), 4,
      function(team, alone)
        pipelines.check(team, alone, {
          model = function() return pipelines.model { units = 6, tied = tied } end,
          loss = nn.cross_entropy, batch = token_batch(6), global = 6, micro = 2,
          layout = { pp = 4, pipeline = "1f1b", split = split },
        })
      end)
  end
end

local Either = nn.class "Either" -- one of two layers, as the microbatch's data say
function Either:init()
  self.a = nn.Linear { WIDTH, WIDTH }
  self.b = nn.Linear { WIDTH, WIDTH }
end
function Either:forward(x)
  local is_a = rille.no_grad(function() return x:sum():item() end) > self.border
  return x + (is_a and self.a or self.b)(x)
end
Either.border = 0

under_all("a parameter without gradient in some microbatches", {
  model = function()
    local list = { embedding() }
    for i = 0, 5 do table.insert(list, { "e" .. i, Either() }) end
    table.insert(list, head())
    return nn.Sequential(list)
  end,
})

local Never = nn.class("Never", Either)
Never.border = math.huge

under_all("a parameter without any gradient", {
  model = function()
    return nn.Sequential { embedding(), { "n0", Never() }, mlp(0), { "n1", Never() }, mlp(1),
      mlp(2), { "n2", Never() }, head() }
  end,
})

-- ---- shared weights

-- Reads a table of vectors by content: uses the shared weight twice.
local Recall = nn.class "Recall"
function Recall:init(path) self.tied = path end
function Recall:forward(x)
  local w = self:shared_parameters()[1][2]
  return x + rille.matmul(rille.linear(x, w):softmax(), w)
end

local Shared = nn.class "Shared" -- the matrix of another layer
function Shared:init(path) self.lin = nn.Linear { WIDTH, WIDTH, tied = path, bias = false } end
function Shared:forward(x) return x + self.lin(x):tanh() end

local Held = nn.class "Held"
function Held:init()
  self.matrix = nn.Parameter { WIDTH, WIDTH }
  self.matrix:normal_(0, 0.3)
end
function Held:forward(x) return x + rille.linear(x, self.matrix) end

local function three_groups()
  return nn.Sequential { embedding(), { "a", nn.Linear { WIDTH, WIDTH } },
    { "recall", Recall "wte.weight" }, { "b", Shared "a.weight" }, { "c", Held() },
    { "d", Shared "a.weight" }, { "e", Shared "c.matrix" },
    { "head", nn.Linear { WIDTH, VOCAB, tied = "wte.weight", bias = false } } }
end

under_all("weights shared by three units and more, in three groups, over 20 steps", {
  model = three_groups, steps = 20, optimizer = { "adamw", lr = 0.01, clip = 0.5 },
})

-- ---- losses and buffers on any stage

local Extra = nn.class "Extra"
function Extra:init() self.lin = nn.Linear { WIDTH, WIDTH } end
function Extra:forward(x)
  local y = self.lin(x)
  rille.add_loss("size", y:square():mean(), 0.1)
  return x + y
end

for _, loss in ipairs { "mean", "sum", "token" } do
  under_all("losses added on every stage, " .. loss, {
    model = function()
      local list = { embedding() }
      for i = 0, 5 do table.insert(list, { "x" .. i, Extra() }) end
      table.insert(list, head())
      return nn.Sequential(list)
    end,
    loss = pipelines.losses[loss], batch = token_batch(8, loss == "token"),
    optimizer = { "sgd", lr = loss == "sum" and 1e-3 or 0.1 },
  })
end

local spoils = false -- replica 1's part of the batch gives values that are not finite

local Running = nn.class "Running"
function Running:init()
  self:buffer("mean", rille.zeros { WIDTH })
  self:buffer("seen", rille.zeros {})
  self.lin = nn.Linear { WIDTH, WIDTH }
end
function Running:forward(x)
  local mean = rille.no_grad(function() return x:mean { 0, 1 } end):keep()
  self:update_buffer("mean", function(old) return old * 0.9 + mean * 0.1 end)
  self:update_buffer("seen", function(old) return old + 1 end)
  if spoils and core.place().first_sample >= 4 then x = x * (0 / 0) end
  return x + self.lin(x - self.mean)
end

local function running_model()
  local list = { embedding() }
  for i = 0, 5 do table.insert(list, { "r" .. i, Running() }) end
  table.insert(list, head())
  return nn.Sequential(list)
end

under_all("running statistics: once a step, in microbatch order, never by recomputation", {
  model = running_model, exact_only = true,
})

pipelines.test("running statistics: every microbatch once; replicas agree", 4, function(team)
  local trainer = rille.Trainer { model = running_model(), loss = nn.cross_entropy, seed = 1,
    optimizer = "adamw", log = 0, batch = { global = 8, micro = 2 }, recompute = true,
    parallel = { comm = team, pp = 2, dp = 2, pipeline = "zbv" } }
  for step = 1, 3 do trainer:step(pipelines.batch(8, step)) end
  for _, entry in ipairs(trainer.pipeline:buffers()) do
    if entry[1]:find "seen" then check.equal(entry[2]:item(), 6.0, entry[1]) end
  end
  local all = pipelines.collect({ buffers = pipelines.pack(trainer.pipeline:buffers()),
    gradients = "", weights = "" }, team)
  local first = {}
  for _, entry in ipairs(all.buffers) do
    first[entry[1]] = first[entry[1]] or entry[2]
    check.ok(first[entry[1]] == entry[2], entry[1] .. " differs between replicas")
  end
end)

-- All ranks refuse a step, whatever each of them saw, and none has changed anything.
pipelines.test("running statistics: a step that was refused is the same again", 4, function(team)
  local function go(spoil)
    local trainer = rille.Trainer { model = running_model(), loss = nn.cross_entropy, seed = 1,
      optimizer = "adamw", log = 0, batch = { global = 8, micro = 2 },
      parallel = { comm = team, pp = 2, dp = 2, pipeline = "zbv" } }
    for step = 1, 3 do
      local batch = pipelines.batch(8, step)
      if spoil and step > 1 then
        local before = pipelines.pack(trainer.pipeline:buffers()) .. trainer:fingerprint()
        local good = spoil(trainer, batch)
        check.ok(not good, "it is refused")
        check.ok(before == pipelines.pack(trainer.pipeline:buffers()) .. trainer:fingerprint(),
          "a step that was refused has changed something")
      end
      trainer:step(batch)
    end
    return pipelines.pack(trainer.pipeline:buffers()) .. trainer:fingerprint()
  end
  local clean = go()
  check.ok(clean == go(function(trainer, batch)
    local none = rille.full({ batch[2]:shape() }, -100, { dtype = "i64" })
    return pcall(trainer.step, trainer, { batch[1], none })
  end), "no target counts")
  check.ok(clean == go(function(trainer, batch)
    spoils = true
    local good = pcall(trainer.step, trainer, batch)
    spoils = false
    return good
  end), "a loss that is not finite")
end)

core.doing("")
check.done()
