-- stage - what a stage of a pipeline computes: the executor's callbacks.
--
--     F        the stage's units, one by one; on the last stage the loss
--     B, I, W  backward on the tape; the leaves' gradients go to the stages before
--
-- All of it works on a pipeline (rille.pipeline), `self` here.
--
-- Invariants:
--  1. A unit runs at the same place in the step (microbatch, unit, samples) under every layout, so
--     random masks, gradient buffers and staged updates do not depend on it.
--  2. What a stage keeps of a microbatch between F and the end of its backward is in self.live.
local rille = require "rille"
local core = rille.core
local nn = require "rille.nn"
local regions = require "rille.added"
local fail = require "rille.fail"
local reduction = require "rille.reduction"
local targets = require "rille.targets"
local tensor_parallel = require "rille.tensor_parallel"

local stage_calls = {}

-- ---- forward

-- Drops what a unit was given, unless it came out again or somebody else has it.
local function drop_inputs(inputs, outputs, kept, named)
  for i = 1, inputs.n do
    local t = inputs[i]
    local keep = kept[t] or not rille.is_tensor(t)
    for k = 1, outputs.n do keep = keep or rawequal(outputs[k], t) end
    for _, value in pairs(named) do keep = keep or rawequal(value, t) end
    if not keep then core.release(t) end
  end
end

local function call_scoped(unit, ...) return core.scope(unit, ...) end
local function call_again(unit, ...) return core.scope(regions.checkpoint, unit, ...) end

-- Runs the units of a stage on values; returns the last one's results, packed.
local function run_units(self, stage, piece, values, named, kept)
  local l = self.layout
  local call = self.recompute and rille.is_grad_enabled() and call_again or call_scoped
  for u = l.first_unit[stage], l.last_unit[stage] do
    core.set_unit(u - 1)
    local inputs = values
    values = nn.call_unit(call, l.units[u], inputs, named)
    if self.recorder then self.recorder:unit(stage, piece.mb, piece.at, u - 1, values) end
    drop_inputs(inputs, values, kept, named)
  end
  core.set_unit(#l.units)
  return values
end

-- The model's input: numbers are cut along time where all activations are; ids stay whole, since
-- the embedding cuts what it gives.
local function enter(self, x, kept)
  local tp = self.layout.tp
  if not tp or not tp.sequence or not rille.is_tensor(x) or not x:dtype():find "^b?f" then
    return x
  end
  if x:ndim() < 3 then
    fail("sequence_parallel: the input %s has no time to be shared out: [batch, time, ...] is "
      .. "wanted", tensor_parallel.describe(x))
  end
  local part = tp:part(x)
  kept[part] = true
  return part
end

-- The model's output, whole; but for the vocabulary of a head whose loss takes it cut.
local function leave(self, piece, values, keeps_vocab)
  local tp, y, l = self.layout.tp, values[1], self.layout
  if not tp or not rille.is_tensor(y) then return values end
  local x = piece.batch[1]
  local T = rille.is_tensor(x) and x:ndim() > 1 and x:size(1) or nil
  y = tp:finish(y, l.units[#l.units], T, keeps_vocab)
  return { n = values.n, y, table.unpack(values, 2, values.n) }
end

-- What comes into a stage: the chain's values, and named ones.
local function inputs_of(self, stage, piece, ins)
  local named, kept = {}, {}
  if stage == 0 then
    local x = targets.rows(piece.batch, 1, piece.first, piece.n)
    core.data(x)
    kept[x] = true
    return table.pack(enter(self, x, kept)), named, kept
  end
  for k = 2, #ins do
    local names = self.edge_names[ins[k].stage][stage]
    for i, name in ipairs(names) do named[name] = ins[k][i] end
  end
  local along = self.layout.along[stage - 1] or {}
  local n = ins[1].n - #along
  for i, name in ipairs(along) do named[name] = ins[1][n + i] end
  return { n = n, table.unpack(ins[1], 1, n) }, named, kept
end

-- The lists for the ports out of a stage: the chain's, with what the next stage reads by name at
-- its end, then those beside it as the schedule has them.
local function outputs_of(self, stage, values, named)
  if stage == self.layout.n_stages - 1 then return {} end
  local chain = { n = values.n, table.unpack(values, 1, values.n) }
  for _, name in ipairs(self.layout.along[stage] or {}) do
    chain.n = chain.n + 1
    chain[chain.n] = named[name]
  end
  local outs = { chain }
  for _, edge in ipairs(self.edges_from[stage]) do
    local list = { n = #edge.names }
    for i, name in ipairs(edge.names) do list[i] = named[name] end
    table.insert(outs, list)
  end
  return outs
end

-- The main loss of a microbatch, on the last stage.
local function finish_forward(self, piece, values, live, kept)
  local now = self.now
  local y = targets.rows(piece.batch, 2, piece.first, piece.n)
  if y then core.data(y) end
  local tp, loss = self.layout.tp, self.loss
  local is_cut = tp and tp.features and type(loss) == "table" and loss.cut
  local whole = leave(self, piece, values, is_cut)
  if is_cut then
    loss = function(output, target) return self.loss.cut(output, target, tp) end
  end
  local run_loss = targets.loss
  if tp then run_loss = function(...) return tp:outside(targets.loss, ...) end end
  local sum, count, is_mean = run_loss(loss, whole, y, piece.n)
  drop_inputs(values, { n = 0 }, kept, {})
  if whole ~= values then drop_inputs(whole, values, kept, {}) end
  now.slots = now.slots or targets.slots(self.loss, piece.batch[2], now.samples, is_mean)
  piece.loss, piece.count = sum:item(), count
  if not rille.is_grad_enabled() then return core.release(sum) end
  if not sum:requires_grad() then
    fail("the loss depends on no parameter that wants a gradient")
  end
  live.sum = sum
end

-- What this rank's value of an added loss counts: of activations cut along time it is the mean over
-- its part.
local function added_share(self, added, piece)
  local parts = added.is_part and self.layout.tp.size or 1
  return added.weight * piece.n / self.now.samples / parts
end

-- Remembers what added losses are worth, for the step's sums.
local function note_added(self, mb, piece)
  for k, added in ipairs(nn.added_losses) do
    if added.is_part or self.layout:is_first_of_tp() then
      table.insert(self.now.added, {
        name = added.name, mb = mb, unit = added.unit, k = k,
        value = added_share(self, added, piece) * added.value:item(),
      })
    end
  end
  nn.added_losses = nil
end

local function is_out(outs, value)
  for _, list in ipairs(outs) do
    for i = 1, list.n do
      if rawequal(list[i], value) then return true end
    end
  end
  return false
end

--- F of a microbatch: lists of tensors for the edges out, from those of the edges in.
function stage_calls.forward(self, stage, mb, ins)
  local piece = self.now.pieces[mb + 1]
  core.begin_microbatch(mb, piece.at, piece.n)
  nn.added_losses = {}
  local live = { ins = ins }
  local values, named, kept = inputs_of(self, stage, piece, ins)
  values = run_units(self, stage, piece, values, named, kept)
  local outs
  if self.wants_output and stage == self.layout.n_stages - 1 then
    outs, piece.output = {}, leave(self, piece, values, false)
  elseif stage == self.layout.n_stages - 1 then
    finish_forward(self, piece, values, live, kept)
    outs = {}
  else
    outs = outputs_of(self, stage, values, named)
  end
  for _, value in pairs(named) do
    if not is_out(outs, value) then core.release(value) end
  end
  live.outs, live.added = outs, nn.added_losses
  note_added(self, mb, piece)
  if rille.is_grad_enabled() then self.live[stage][mb] = live end
  core.end_microbatch()
  return outs
end

-- ---- backward

-- Roots of a stage's backward and their gradients: the loss, what other stages sent back (the
-- farthest first: in one process the tape reaches it first), added losses.
local function roots_of(self, live, douts, piece)
  local outs, seeds = {}, {}
  local function add(out, seed)
    table.insert(outs, out)
    table.insert(seeds, seed)
  end
  if live.sum then
    add(live.sum, rille.full({}, 1 / self.now.slots, { dtype = live.sum:dtype() }))
  end
  for k = #live.outs, 1, -1 do
    for i = 1, live.outs[k].n do
      local out, dout = live.outs[k][i], douts[k] and douts[k][i]
      if dout and out and out:requires_grad() then add(out, dout) end
    end
  end
  for _, added in ipairs(live.added) do
    if added.value:requires_grad() then
      local share = added_share(self, added, piece)
      add(added.value, rille.full({}, share * targets.count_in_advance(self) / self.now.slots,
        { dtype = added.value:dtype() }))
    end
  end
  return outs, seeds
end

local function release_all(list)
  for _, tensor in ipairs(list or {}) do core.release(tensor) end
end

--- B or I of a microbatch; note is C, which stages before the loss do not know else. Returns the
--- leaves that hold the gradients for the stages before, and C.
function stage_calls.backward(self, stage, mb, half, douts, note)
  local now = self.now
  if not now.slots and note > 0 then now.slots = note end
  local piece, live = now.pieces[mb + 1], self.live[stage][mb]
  core.begin_microbatch(mb, piece.at, piece.n)
  local outs, seeds = roots_of(self, live, douts, piece)
  local tell = half == "B" and reduction.teller(self, stage) or nil
  if #outs > 0 then live.wgrad = core.backward(outs, seeds, half, tell) end
  core.release(live.sum)
  for _, added in ipairs(live.added) do core.release(added.value) end
  live.outs, live.sum, live.added = nil, nil, nil
  if self.recorder then self.recorder:gradients(stage, mb, piece.at, half) end
  if half == "B" then
    release_all(seeds)
    self.live[stage][mb] = nil
  else
    live.seeds = seeds -- W may read them
  end
  core.end_microbatch()
  local ins = live.ins
  live.ins = nil
  return ins, now.slots or 0
end

--- W of a microbatch.
function stage_calls.wgrad(self, stage, mb)
  local live = self.live[stage][mb]
  self.live[stage][mb] = nil
  local tell = reduction.teller(self, stage)
  if live.wgrad then live.wgrad:run(tell) end
  release_all(live.seeds)
  if self.recorder then self.recorder:gradients(stage, mb, self.now.pieces[mb + 1].at, "W") end
end

return stage_calls
