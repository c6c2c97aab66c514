-- Checkpoints and exports of layouts that cut parameters over ranks, read under others. Run on four
-- ranks by tests/shards_test.sh; every rank runs the same tests, the first one prints.
local rille = require "rille"
local check = require "tests.check"
local gpt = require "models.gpt"
local core, nn = rille.core, rille.nn
local folder <const> = arg[1]
local world <const> = core.comm_world()
local rank <const> = world:rank()

if rank > 0 then
  rawset(_G, "print", function(words)
    if not words:find("^%d+ passed") then rille.print_all(words) end
  end)
end

-- What fails on one rank ends all of them: the others may wait for it.
local function test(claim, fn)
  check.test(claim, function()
    local passed, words = xpcall(fn, debug.traceback)
    if not passed then core.give_up(("not ok %s: %s"):format(claim, words)) end
  end)
end

local T <const>, VOCAB <const> = 8, 13
rille.manual_seed(3)
local batches <const> = {}
for step = 1, 4 do
  local x = (rille.rand(4, T + 1) * VOCAB):to("i64")
  batches[step] = { x:slice(1, 0, T):contiguous(), x:slice(1, 1, T + 1):contiguous() }
end

local comms <const> = {} -- by number of ranks
for _, n in ipairs { 1, 2, 4 } do comms[n] = world:split(rank < n and 0 or 1, rank) end

-- What a model of a kind is, and its optimizer.
local kinds <const> = {
  gpt2 = { { style = "gpt2", kv_heads = 2 }, { "adamw", lr = 1e-2, clip = 0.5 } },
  llama = { { style = "llama", kv_heads = 1 }, { "sgd", lr = 1e-2, momentum = 0.9 } },
  bf16 = { { style = "gpt2", kv_heads = 1 }, { "adamw", lr = 1e-2 }, "bf16" },
}

local function model_of(kind, more)
  local options = { vocab = VOCAB, T = T, d = 16, layers = 2, heads = 4 }
  for key, value in pairs(kinds[kind][1]) do options[key] = value end
  for key, value in pairs(more or {}) do options[key] = value end
  return gpt(options)
end

-- A two-layer chain in bf16, whose masters are state: the models above are f32.
local function chain()
  return nn.Sequential { nn.Linear { 8, 12, tp = "column", act = "gelu", dtype = "bf16" },
    nn.Linear { 12, 8, tp = "row", dtype = "bf16" }, nn.Linear { 8, 8, dtype = "bf16" } }
end

-- A trainer of a kind over pp x tp x dp ranks; nil on ranks that have no part in it.
local function trainer(kind, l, model)
  local n = (l.pp or 1) * (l.tp or 1) * (l.dp or 1)
  if rank >= n then return nil end
  local parallel = { comm = comms[n] }
  for key, value in pairs(l) do parallel[key] = value end
  local is_chain = kind == "bf16"
  return rille.Trainer { model = model or is_chain and chain() or model_of(kind), seed = 1, log = 0,
    loss = is_chain and nn.mse or nn.cross_entropy, optimizer = kinds[kind][2],
    batch = { global = 4, micro = 1 }, parallel = parallel }
end

local function batch(kind, step)
  if kind ~= "bf16" then return batches[step] end
  local x = batches[step][1]:to("bf16") * 0.1
  return { x, x }
end

local function loss(t, kind, step) return t:step(batch(kind, step)).loss end

-- All tensors of a trainer's state, by name.
local function whole(path)
  local tensors = rille.load(path)
  local list = {}
  for name, tensor in pairs(tensors) do list[name] = tensor:tolist() end
  return list
end

-- What one process reads of a checkpoint, tensor by tensor.
local function as_one(kind, path)
  local one = trainer(kind, { pp = 1 })
  one:resume(path)
  one:save(folder .. "/one.safetensors")
  return whole(folder .. "/one.safetensors")
end

local function words_of(l)
  return ("tp %d pp %d dp %d"):format(l.tp or 1, l.pp or 1, l.dp or 1)
end

local writers <const> = { { tp = 2, pp = 2 }, { tp = 4 }, { tp = 2, dp = 2 } }
local readers <const> = { { pp = 1 }, { tp = 2 }, { tp = 4 }, { pp = 2 } }

for _, kind in ipairs { "gpt2", "llama", "bf16" } do
  for w, l in ipairs(writers) do
    test(("%s written under %s: read under any other, the same"):format(kind, words_of(l)),
      function()
        local path = ("%s/%s-%d.safetensors"):format(folder, kind, w)
        local t = trainer(kind, l)
        for step = 1, 2 do t:step(batch(kind, step)) end
        path = t:save(path)
        local print, next_loss = t:fingerprint(), loss(t, kind, 3)
        local stored = rank == 0 and as_one(kind, path)
        for _, reader in ipairs(readers) do
          world:barrier()
          local r = trainer(kind, reader)
          if r then
            check.equal(r:resume(path), 2)
            check.equal(r:fingerprint(), print)
            local again = r:save(folder .. "/again.safetensors")
            check.near(loss(r, kind, 3) / next_loss, 1.0, kind == "bf16" and 1e-2 or 1e-6,
              words_of(reader))
            if rank == 0 then check.equal(as_one(kind, again), stored, words_of(reader)) end
          end
        end
        world:barrier()
      end)
  end
end

test("a file of one process is read by parts; padding is in no file", function()
  local one = trainer("gpt2", { pp = 1 })
  local path, print, want = folder .. "/single.safetensors", nil, nil
  if one then
    one:step(batches[1])
    one:save(path)
    local _, metadata = rille.load(path)
    check.equal(core.json_decode(metadata.rille).format, 2)
    print, want = one:fingerprint(), loss(one, "gpt2", 2)
  end
  print, want = world:broadcast(print, 0), tonumber(world:broadcast(("%.17g"):format(want or 0), 0))
  for _, l in ipairs(writers) do
    local t = trainer("gpt2", l)
    t:resume(path)
    check.equal(t:fingerprint(), print)
    local index = t:save(folder .. "/parts.safetensors")
    check.near(loss(t, "gpt2", 2) / want, 1.0, 1e-6)
    if rank == 0 then
      local rows, n = 0, 0
      for name, tensor in pairs(rille.load(index)) do
        if name:find("^model%.wte%.weight#") then rows = rows + tensor:size(0) end
        if name:find("^model%.ln_f%.weight") then n = n + 1 end
      end
      check.equal({ rows, n }, { VOCAB, 1 })
    end
    world:barrier()
  end
end)

test("a checkpoint of another model: both whole shapes", function()
  local t = trainer("gpt2", { tp = 4 }, model_of("gpt2", { vocab = 14, kv_heads = 4 }))
  local before = t:fingerprint()
  local words = check.raises(function() t:resume(folder .. "/gpt2-1.safetensors.index.json") end,
    "does not fit this run", "model.wte.weight f32%[14, 16%] is f32%[13, 16%] in the file")
  check.ok(words:find("attn.qkv.weight f32[48, 16] is f32[32, 16]", 1, true), words)
  check.equal(t:fingerprint(), before)
end)

-- Changes the first file of a checkpoint of several in which `fn` finds something to change: gets
-- tensors, metadata and the index's map, returns whether it did.
local function forge(name, fn)
  if rank == 0 then
    local index = ("%s/%s.safetensors.index.json"):format(folder, name)
    local object = core.json_decode(io.open(index):read("a"))
    local files, done = {}, false
    for _, file in pairs(object.weight_map) do files[file] = true end
    for file in pairs(files) do
      local path = folder .. "/" .. file
      local tensors, metadata = rille.load(path)
      if not done and fn(tensors, metadata, object.weight_map) then
        done = true
        rille.save(path, tensors, metadata)
      end
    end
    core.write_atomic(index, core.json_encode(object))
    assert(done, "nothing to change")
  end
  world:barrier()
end

local function refused(name, ...)
  for _, l in ipairs { { pp = 1 }, { tp = 4 } } do
    local t, words = trainer("gpt2", l), { ... }
    if t then
      local before = t:fingerprint()
      check.raises(function() t:resume(("%s/%s.safetensors.index.json"):format(folder, name)) end,
        table.unpack(words))
      check.equal(t:fingerprint(), before)
    end
    world:barrier()
  end
end

-- Writes a checkpoint of two steps under a name.
local function written(name, lr)
  kinds.gpt2[2].lr = lr or 1e-2
  local t = trainer("gpt2", { tp = 2, pp = 2 })
  kinds.gpt2[2].lr = 1e-2
  t:step(batches[1])
  return t:save(("%s/%s.safetensors"):format(folder, name))
end

test("a piece that is missing is named", function()
  written "lacking"
  local name <const> = "model.wte.weight#7"
  forge("lacking", function(tensors, metadata, map)
    if not tensors[name] then return false end
    tensors[name], map[name] = nil, nil
    return metadata
  end)
  refused("lacking", "damaged: model.wte.weight%[13, 16%] lacks the piece that begins at index 7")
end)

test("a piece of another save: digest, and with its digest the fingerprint", function()
  written "mixed"
  local name <const> = "model.h.0.mlp.up.weight#0"
  local other = rille.load(written("other", 0.1))[name]
  forge("mixed", function(tensors)
    if not tensors[name] then return false end
    tensors[name] = other
    return true
  end)
  refused("mixed", "damaged: ", name)
  forge("mixed", function(tensors, metadata)
    if not tensors[name] then return false end
    for key, text in pairs(metadata) do
      if key:find("^rille%.digests") then
        local digests = core.json_decode(text)
        digests[name] = ("%016x"):format(core.digest(other, 0))
        metadata[key] = core.json_encode(digests)
      end
    end
    return true
  end)
  refused("mixed", "damaged: its weights have the fingerprint")
end)

test("a piece of another shape, and metadata that say nothing, are refused", function()
  written "bent"
  local name <const> = "model.h.0.attn.proj.weight#8"
  forge("bent", function(tensors)
    if not tensors[name] then return false end
    tensors[name] = rille.zeros { 15, 8 }
    return true
  end)
  refused("bent", "the piece model.h.0.attn.proj.weight#8 is f32%[15, 8%] where f32%[16, 8%]")
  local function say(file, text)
    written(file)
    forge(file, function(_, metadata)
      for key in pairs(metadata) do
        if key:find("^rille%.cut") then metadata[key] = text end
      end
      return true
    end)
  end
  say("mute", '{"model.wte.weight": {"dim": 5}}')
  refused("mute", "damaged: its files say different things of model.wte.weight")
  say("mute", '{"model.h.0.x": {"dim": 5}}')
  refused("mute", "damaged: it does not say how model.h.0.x is cut")
  say("mute", "[")
  refused("mute", "damaged: its metadata rille.cut.%d are no JSON object")
end)

-- ---- export

-- A model with a buffer in each of its units.
local Unit = nn.class "Unit"
function Unit:init()
  self.up = nn.Linear { 64, 256, act = "gelu", tp = "column" }
  self.down = nn.Linear { 256, 64, tp = "row" }
  self:buffer("seen", rille.zeros({ 3 }, { dtype = "i64" }))
end
function Unit:forward(x) return x + self.down(self.up(x)) end
local function units() return nn.Sequential { Unit(), Unit(), Unit(), Unit() } end
local sample <const> = { rille.randn(4, 64), rille.randn(4, 64) }
local layouts <const> = { { tp = 2, pp = 2 }, { tp = 4 }, { tp = 2, dp = 2 }, { pp = 2, dp = 2 },
  { dp = 4 }, { pp = 1 } }

for _, l in ipairs(layouts) do
  test(("export under %s: one process reads it, and its next loss is the same"):format(
    words_of(l)), function()
    local path = folder .. "/exported.safetensors"
    for _, kind in ipairs { "gpt2", "llama" } do
      local t = trainer(kind, l)
      if t then
        t:step(batch(kind, 1))
        t:export(path)
        local print = t:fingerprint()
        local want = t:evaluate({ batch = function() return batch(kind, 2) end }, 1)
        if rank == 0 then
          local model = model_of(kind)
          check.equal(model:load_state_dict(path), {})
          local one = trainer(kind, { pp = 1 }, model)
          check.equal(one:fingerprint(), print)
          local have = one:evaluate({ batch = function() return batch(kind, 2) end }, 1)
          check.near(have / want, 1.0, 1e-6)
        end
      end
    end
    world:barrier()
  end)
end

test("export: buffers too, and one parameter in memory at a time", function()
  for _, l in ipairs { { tp = 2, pp = 2 }, { pp = 4 }, { dp = 4 } } do
    local parallel = { comm = comms[4], table.unpack(l) }
    for key, value in pairs(l) do parallel[key] = value end
    local t = rille.Trainer { model = units(), loss = nn.mse, seed = 1, log = 0,
      optimizer = { "sgd", lr = 1e-2 }, batch = { global = 4, micro = 1 }, parallel = parallel }
    t:step(sample)
    for _, entry in ipairs(t.pipeline:buffers()) do
      rille.no_grad(function()
        entry[2]:fill_(7 + math.tointeger(tonumber(entry[1]:match("^%d+"))))
      end)
    end
    collectgarbage()
    collectgarbage()
    core.reset_peaks()
    local before = core.memory().total.current
    t:export(folder .. "/units.safetensors")
    local more = core.memory().total.peak - before
    check.ok(more <= 64 * 256 * 4 + 16384, -- and handles
      ("%d bytes more"):format(more))
    if rank == 0 then
      local model = units()
      model:load_state_dict(folder .. "/units.safetensors")
      for k, entry in ipairs(model:named_buffers()) do
        check.equal(entry[2], { 6 + k, 6 + k, 6 + k }, entry[1])
      end
    end
    world:barrier()
  end
end)

test("export to nowhere: an error everywhere; a model is read before or after it is cut", function()
  local t = trainer("gpt2", { tp = 2, pp = 2 })
  check.raises(function() t:export(folder .. "/nowhere/x.safetensors") end, "nowhere")
  t:step(batches[1])
  local path = folder .. "/exported.safetensors"
  t:export(path)
  local model = model_of("gpt2")
  model:load_state_dict(path)
  local again = trainer("gpt2", { tp = 4 }, model)
  check.equal(again:fingerprint(), t:fingerprint())
  local want = t:evaluate({ batch = function() return batches[2] end }, 1)
  local function loss_of(any) -- collective
    return any:evaluate({ batch = function() return batches[2] end }, 1)
  end
  check.near(loss_of(again) / want, 1.0, 1e-6)
  local late = trainer("gpt2", { tp = 4 })
  check.raises(function() late.model:load_state_dict { ["wte.weight"] = rille.zeros { 4, 16 } } end,
    "wte.weight is %[13, 16%] here and %[4, 16%] there")
  late.model:load_state_dict(path)
  check.equal(late:fingerprint(), t:fingerprint())
  check.near(loss_of(late) / want, 1.0, 1e-6)
  check.raises(function() late.model:save(folder .. "/part.safetensors") end,
    "this rank has a part of wte.weight, %[4, 16%] of %[13, 16%]", "trainer:export")
end)

check.done()
