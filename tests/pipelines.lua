-- pipelines - what the tests of pipelines share: models, data, a trainer's state as values, and
-- how two of them are compared.
local check <const> = require "tests.check"
local rille <const> = require "rille"
local core <const> = rille.core
local nn <const> = rille.nn
local tensor_parallel <const> = require "rille.tensor_parallel"

local pipelines = {}

core.stall_timeout(20) -- a test that hangs says where

local VOCAB <const>, WIDTH <const>, LENGTH <const> = 11, 8, 4
pipelines.vocab, pipelines.width, pipelines.length = VOCAB, WIDTH, LENGTH

-- ---- models

local HEADS <const>, HIDDEN <const> = 4, 12

-- Layers that say themselves how tp ranks share them, with a random mask between them.
local Declared = nn.class "Declared"

function Declared:init(o)
  self.up = nn.Linear { WIDTH, HIDDEN, act = "gelu", tp = "column", dtype = o.dtype }
  if o.dropout > 0 then self.drop = nn.Dropout { o.dropout, tp = "column" } end
  self.down = nn.Linear { HIDDEN, WIDTH, tp = "row", dtype = o.dtype }
end

function Declared:forward(x)
  local y = self.up(x)
  if self._items.drop then y = self.drop(y) end
  return self.down(y)
end

local Block = nn.class "Block"

function Block:init(i, o)
  self.norm = nn.LayerNorm { WIDTH, dtype = o.dtype }
  if i % 3 == 1 then
    self.mix = nn.Attention { WIDTH, HEADS, kv_heads = o.kv_heads, causal = true, dtype = o.dtype }
  elseif i % 3 == 2 then
    self.mix = Declared(o)
  else
    self.mix = nn.MLP { WIDTH, HIDDEN, act = i % 6 == 3 and "swiglu" or nil, dtype = o.dtype }
  end
  if o.dropout > 0 then self.drop = nn.Dropout(o.dropout) end
end

function Block:forward(x)
  local y = self.mix(self.norm(x))
  if self._items.drop then y = self.drop(y) end
  return x + y
end

--- A language model of `units` units: embedding, blocks, norm, head.
---@param o table {units =, dtype =, dropout =, tied =, kv_heads =}
function pipelines.model(o)
  local dtype = o.dtype or "f32"
  local spec = { dtype = dtype, dropout = o.dropout or 0, kv_heads = o.kv_heads }
  local list = { { "wte", nn.TokenEmbedding { VOCAB, WIDTH, positions = LENGTH, std = 0.5,
    dtype = dtype } } }
  for i = 0, o.units - 4 do table.insert(list, { "h" .. i, Block(i, spec) }) end
  table.insert(list, { "ln_f", nn.LayerNorm { WIDTH, dtype = dtype } })
  table.insert(list, { "head", nn.Linear { WIDTH, VOCAB, bias = not o.tied, dtype = dtype,
    tied = o.tied and "wte.weight" or nil } })
  return nn.Sequential(list)
end

-- ---- data

-- 31 bits of a place: the same on every rank.
local function scramble(...)
  local h = 88172645463325252
  for _, x in ipairs { ... } do
    h = (h ~ x) * 6364136223846793005 + 1442695040888963407
    h = h ~ (h >> 29)
  end
  return h >> 33
end
pipelines.scramble = scramble

local IGNORED <const> = -100

-- Whether target t of sample i counts: the first sample of five has one, others many or none.
local function counts(i, t, step)
  if i % 5 == 0 then return t == 0 end
  return scramble(i, t, step, 7) % 3 > 0
end

local cache = {}

--- The batch of n samples of a step, {ids[n, T], targets[n, T]}; masked: uneven targets.
function pipelines.batch(n, step, masked)
  local key = ("%d %d %s"):format(n, step, masked)
  if cache[key] then return cache[key] end
  local x, y = {}, {}
  for i = 1, n do
    x[i], y[i] = {}, {}
    for t = 1, LENGTH do
      x[i][t] = scramble(i, t, step) % VOCAB
      y[i][t] = scramble(i, t, step, 3) % VOCAB
      if masked and not counts(i - 1, t - 1, step) then y[i][t] = IGNORED end
    end
  end
  cache[key] = { rille.tensor(x, { dtype = "i64" }), rille.tensor(y, { dtype = "i64" }) }
  return cache[key]
end

-- ---- losses

-- A mean over samples as a plain number, as a user writes it.
local function plain_mean(logits, target) return rille.cross_entropy(logits, target) end

pipelines.losses = {
  mean = plain_mean,
  sum = nn.cross_entropy { reduction = "sum" },
  token = nn.cross_entropy, -- with targets that are ignored
}

-- ---- state

-- Values of one kind of every parameter that this rank holds, made whole: {name, tensor}.
local function all_of(trainer, of)
  local list, tp = {}, trainer.layout.tp
  for _, p in ipairs(trainer.layout.params) do
    if p.is_here then
      local value = of(p.tensor)
      if value and p.cut then value = tensor_parallel.gather(tp.group, p.cut, value, p.shape) end
      table.insert(list, { p.name, value })
    end
  end
  return list
end

--- The gradients, and the weights, of this rank's stages: lists of {name, tensor}. Collective over
--- tp ranks.
function pipelines.gradients(trainer)
  return all_of(trainer, function(p) return p:grad() end)
end

function pipelines.weights(trainer)
  return all_of(trainer, function(p) return p end)
end

-- Values as they lie in memory.
local function bytes_of(tensor)
  if not tensor:is_contiguous() then
    tensor = rille.no_grad(function() return tensor:contiguous() end)
  end
  return core.bytes(tensor)
end

-- Digests of what this rank holds and others may too, by what it is a copy of: a parameter, a run
-- of one that is cut, the padding behind a rank's runs. Lines "what digest".
local function digests(trainer)
  local lines, tp = {}, trainer.layout.tp
  local is_alone = trainer.layout.dp == 1 and not tp -- then only tied weights have copies
  local function add(what, part)
    table.insert(lines, ("%s %016x"):format(what, core.hash(bytes_of(part))))
  end
  for _, p in ipairs(trainer.layout.params) do
    if p.is_here and p.cut then
      local part, at = p.tensor:detach(), 0
      for _, run in ipairs(p.cut.runs(tp.rank)) do
        if run[2] > 0 then
          add(("%s[%d+%d]"):format(p.name, run[1], run[2]), part:slice(p.cut.dim, at, at + run[2]))
        end
        at = at + run[2]
      end
      if at < p.cut.size then
        add(("%s[padding of %d]"):format(p.name, tp.rank), part:slice(p.cut.dim, at, p.cut.size))
      end
    elseif p.is_here and not (is_alone and not p.tied) then
      add(p.name, p.tensor)
    end
  end
  return table.concat(lines, "\n")
end

local ENTRY <const> = "<s2s1s4" -- name, dtype, bytes

--- {name, tensor} lists as bytes for other ranks: all values, exactly.
function pipelines.pack(list)
  local words = {}
  for _, entry in ipairs(list) do
    local tensor = entry[2]
    table.insert(words, ENTRY:pack(entry[1], tensor and tensor:dtype() or "",
      tensor and bytes_of(tensor) or ""))
  end
  return table.concat(words)
end

--- The lists of all ranks: a list of {name, bytes, rank, dtype}.
function pipelines.unpack(texts)
  local list = {}
  for rank, text in ipairs(texts) do
    local at = 1
    while at <= #text do
      local name, dtype, bytes
      name, dtype, bytes, at = ENTRY:unpack(text, at)
      table.insert(list, { name, bytes, rank - 1, dtype })
    end
  end
  return list
end

local codes <const> = { f32 = "f", f64 = "d", bf16 = "I2", i64 = "i8", i32 = "i4", u8 = "B",
  bool = "B" }
local RUN <const> = 100 -- values that are read at a time

-- The numbers of an entry of a list that was unpacked.
local function values_of(entry)
  if entry.values then return entry.values end
  local list, bytes, code = {}, entry[2], codes[entry[4]]
  local n, size = 0, code and ("<" .. code):packsize() or 1
  while #bytes > n * size do
    local run = math.min(RUN, #bytes // size - n)
    local values = table.pack(("<" .. code:rep(run)):unpack(bytes, n * size + 1))
    table.move(values, 1, run, n + 1, list)
    n = n + run
  end
  if entry[4] == "bf16" then
    for i, half in ipairs(list) do list[i] = ("<f"):unpack(("<I4"):pack(half << 16)) end
  end
  entry.values = list
  return list
end

--- The largest magnitude in an unpacked list.
function pipelines.largest(list)
  if list.largest then return list.largest end
  local most = 0
  for _, entry in ipairs(list) do
    for _, x in ipairs(values_of(entry)) do most = math.max(most, math.abs(x)) end
  end
  list.largest = most
  return most
end

-- Words about the first element that differs by more than `tolerance`; nil if none does.
local function first_difference(have, want, tolerance)
  local name = have[1]
  if have[4] ~= want[4] and have[4] ~= "" and want[4] ~= "" then
    return ("%s is %s, not %s"):format(name, have[4], want[4])
  end
  if have[2] == want[2] then return nil end
  local a, b = values_of(have), values_of(want)
  if #a ~= #b then return ("%s has %d values, not %d"):format(name, #a, #b) end
  for i = 1, #a do
    local is_near = math.abs(a[i] - b[i]) <= tolerance -- no NaN is
    if not is_near then
      return ("%s[%d] = %.17g, one process has %.17g"):format(name, i - 1, a[i], b[i])
    end
  end
  if tolerance == 0 then return name .. " has zeros of another sign, or other NaNs" end
end

--- Compares what the ranks of a pipeline hold with what one process has: words, or nil. Every
--- parameter must be there, and every copy of it is compared.
---@param have table[] {name, bytes, rank, dtype}
---@param want table[] the same
---@param tolerance number absolute; 0: bit for bit
function pipelines.difference(have, want, tolerance)
  local by_name, seen, last = {}, {}, {}
  for _, entry in ipairs(want) do by_name[entry[1]] = entry end
  for _, entry in ipairs(have) do
    local name, like = entry[1], by_name[entry[1]]
    -- a replica whose samples gave a parameter no gradient has none to show, but another one has
    local is_shown = entry[2] ~= "" or tolerance == 0 or not like or like[2] == ""
    seen[name] = seen[name] or is_shown
    local is_judged = last[name] == entry[2] -- a replica has the same bits as the one before
    last[name] = is_shown and entry[2] or last[name]
    local words = is_shown and like and not is_judged and first_difference(entry, like, tolerance)
    if words then return ("%s (rank %d)"):format(words, entry[3]) end
  end
  for _, entry in ipairs(want) do
    if not seen[entry[1]] then return entry[1] .. " is on no rank" end
  end
end

-- ---- ranks

--- Splits the world into teams of the given sizes; gives this rank's team (a group) and its number,
--- or nil where ranks are left over. Collective.
function pipelines.team(world, sizes)
  local rank, first = world:rank(), 0
  for i, size in ipairs(sizes) do
    if rank >= first and rank < first + size then return world:split(i - 1), i end
    first = first + size
  end
  return world:split(-1), nil
end

--- Frees what finished trainers held, so that thousands of them fit.
function pipelines.tidy()
  collectgarbage()
  core.trim()
end

-- ---- a run, and whether it is what one process does

--- Takes `steps` steps: gradients after the first one, weights and buffers at the end, what each
--- step said. Collective over the trainer's ranks.
---@param batch fun(step: integer): table
function pipelines.run(trainer, batch, steps)
  local result = { losses = {}, norms = {}, added = {}, copies = {} }
  result.first_fingerprint = trainer:fingerprint()
  for step = 1, steps do
    local r = trainer:step(batch(step))
    result.losses[step], result.norms[step], result.count = r.loss, r.grad_norm, r.count
    for name, value in pairs(r.losses) do result.added[name .. " " .. step] = value end
    if step == 1 then result.gradients = pipelines.pack(pipelines.gradients(trainer)) end
    result.copies[step] = digests(trainer)
  end
  result.weights = pipelines.pack(pipelines.weights(trainer))
  result.buffers = pipelines.pack(trainer.pipeline:buffers())
  result.fingerprint = trainer:fingerprint()
  return result
end

local tensors_of_a_run <const> = { "gradients", "weights", "buffers" }

-- What a run left on this rank as one string, and the parts of it.
local function packed(result)
  local parts = {}
  for i, what in ipairs(tensors_of_a_run) do parts[i] = ("<s4"):pack(result[what]) end
  for _, text in ipairs(result.copies or {}) do table.insert(parts, ("<s4"):pack(text)) end
  return table.concat(parts)
end

local function parts_of(text)
  local parts, at = {}, 1
  while at <= #text do parts[#parts + 1], at = ("<s4"):unpack(text, at) end
  return parts
end

--- What all ranks of a team hold after a run; with `only_first` only its first rank learns it.
--- Collective.
function pipelines.collect(result, team, only_first)
  local all = team and team:all_gather(packed(result)) or { packed(result) }
  if only_first and team and team:rank() > 0 then return nil end
  for rank, text in ipairs(all) do all[rank] = parts_of(text) end
  local function of_ranks(k)
    local texts = {}
    for rank, parts in ipairs(all) do texts[rank] = parts[k] end
    return texts
  end
  for i, what in ipairs(tensors_of_a_run) do result[what] = pipelines.unpack(of_ranks(i)) end
  for step in ipairs(result.copies or {}) do
    result.copies[step] = of_ranks(#tensors_of_a_run + step)
  end
  return result
end

local function number_differs(what, a, b, tolerance)
  if math.abs(a - b) <= tolerance * math.max(math.abs(b), 1) then return nil end
  return ("%s is %.17g, one process has %.17g"):format(what, a, b)
end

-- What the steps said.
local function words_differ(have, want, tolerance, o)
  if have.count ~= want.count then
    return ("%s targets counted, not %s"):format(have.count, want.count)
  end
  for step = 1, #want.losses do
    local at, allowed = " of step " .. step, step == 1 and tolerance or o.later or tolerance
    local words = number_differs("the loss" .. at, have.losses[step], want.losses[step], allowed)
    if not words and (step == 1 or not o.is_adaptive) then
      words = number_differs("the norm" .. at, have.norms[step], want.norms[step], allowed)
    end
    if words then return words end
  end
  for name, value in pairs(want.added) do
    local words = number_differs(name, have.added[name] or 0 / 0, value, o.later or tolerance)
    if words then return words end
  end
end

-- Replicas, all holders of a tied weight, and tp ranks of what they have alike have the same bits
-- after a step.
local function copies_differ(texts, step)
  local first = {}
  for rank, text in ipairs(texts) do
    for what, digest in text:gmatch "([^\n]+) (%x+)" do
      first[what] = first[what] or { digest, rank - 1 }
      if first[what][1] ~= digest then
        return ("%s differs between rank %d and rank %d after step %d"):format(what, first[what][2],
          rank - 1, step)
      end
    end
  end
end

--- Words about the first thing in which a collected run differs from the one of one process; nil
--- if there is none. tolerance 0: bit for bit; else in units of the largest magnitude.
---@param o table {is_adaptive: the optimizer divides by gradients: weights are not compared;
--- later: the tolerance after the first update, where it is another one}
function pipelines.judge(have, want, tolerance, o)
  if have.first_fingerprint ~= want.first_fingerprint then
    return ("the initial weights' fingerprint is %s, one process has %s"):format(
      have.first_fingerprint, want.first_fingerprint)
  end
  local words = words_differ(have, want, tolerance, o)
  if words then return words end
  for _, what in ipairs(tensors_of_a_run) do
    if tolerance == 0 or what ~= "weights" or not o.is_adaptive then
      local relative = what ~= "gradients" and o.later or tolerance
      local absolute = tolerance > 0 and math.max(relative * pipelines.largest(want[what]), 1e-300)
      words = pipelines.difference(have[what], want[what], absolute or 0)
      if words then return ("%s: %s"):format(what, words) end
    end
  end
  if tolerance == 0 and have.fingerprint ~= want.fingerprint then
    return ("fingerprint %s, one process has %s"):format(have.fingerprint, want.fingerprint)
  end
  for step, texts in ipairs(have.copies) do
    words = copies_differ(texts, step)
    if words then return words end
  end
end

--- A run under a layout against the same in a group of one: fails unless it is equal (bit for bit;
--- to rounding with replicas and tp). o: model, a function; loss, optimizer, batch(step), global,
--- micro, layout = parallel's fields, steps, recompute, tolerance. Collective over the team.
function pipelines.check(team, alone, o)
  local function trainer_of(comm, is_oracle)
    local parallel = { comm = comm }
    for key, value in pairs(is_oracle and {} or o.layout) do parallel[key] = value end
    rille.manual_seed(3)
    return rille.Trainer { model = o.model(), loss = o.loss, seed = 3, log = 0,
      optimizer = o.optimizer or { "sgd", lr = 0.1, momentum = 0.9 },
      batch = { global = o.global, micro = o.micro }, parallel = parallel,
      recompute = not is_oracle and o.recompute or false }
  end
  local steps = o.steps or 3
  local have = pipelines.collect(pipelines.run(trainer_of(team), o.batch, steps), team, true)
  if team:rank() > 0 then return end
  local want = pipelines.collect(pipelines.run(trainer_of(alone, true), o.batch, steps))
  local is_exact = (o.layout.dp or 1) * (o.layout.tp or 1) == 1
  local tolerance = o.tolerance or is_exact and 0 or 1e-6
  local words = pipelines.judge(have, want, tolerance, { is_adaptive = (o.optimizer or {})[1] ==
    "adamw" })
  if words then error(words, 0) end
end

-- ---- tests on several ranks

--- A test that the first n ranks of the world run together: fn(team, alone). It fails if it fails
--- on one of them; what a rank finds wrong must not keep it from meeting the others. With an
--- argument only the tests whose claims hold that text run.
function pipelines.test(claim, n, fn)
  if arg[1] and not claim:find(arg[1], 1, true) then return end
  local world <const> = core.comm_world()
  local alone <const> = world:split(world:rank())
  local team = world:split(world:rank() < n and 0 or -1)
  core.doing(claim)
  local good, trace = true, ""
  if team then good, trace = xpcall(fn, debug.traceback, team, alone) end
  if not good then -- at once: others may wait for this rank for ever
    io.stderr:write(("rank %d: %s\n"):format(world:rank(), tostring(trace)))
  end
  pipelines.tidy()
  local first, n_wrong = nil, 0
  for rank, words in ipairs(world:all_gather(good and "" or tostring(trace))) do
    if words ~= "" then
      first, n_wrong = first or ("rank %d: %s"):format(rank - 1, words:match "[^\n]*"), n_wrong + 1
    end
  end
  check.test(claim, function()
    if first then error(("%d of %d ranks; %s"):format(n_wrong, n, first), 0) end
  end)
end

return pipelines
