-- pipeline - one training step over the stages of a model: what the executor's callbacks do.
--
--     F        the stage's units, one by one; on the last stage the loss
--     B, I, W  backward on the tape; the leaves' gradients go to the stages before
--     REDUCE   gradients summed over the stages that share a parameter, then over replicas
--
-- One process is a pipeline of one stage: there is no other path.
--
-- Invariants:
--  1. A unit runs at the same place in the step (microbatch, unit, samples) under every layout, so
--     random masks, gradient buffers and staged updates do not depend on it.
--  2. What a stage keeps of a microbatch between F and the end of its backward is in `live`.
--  3. All ranks of a replica's data-parallel group reduce the same things in the same order.
local rille = require "rille"
local core = rille.core
local nn = require "rille.nn"
local regions = require "rille.added"
local fail = require "rille.fail"
local layouts = require "rille.layout"
local optim = require "rille.optim"
local known = require "rille.known"
local record = require "rille.record"
local report = require "rille.report"
local trainer_options = require "rille.trainer_options"

local pipeline = {}

---@class rille.Pipeline
local Pipeline = {}
Pipeline.__index = Pipeline

-- ---- batches

local function rows_of(batch, k, first, n)
  local part = batch[k]
  if part == nil then return nil end
  if rille.is_tensor(part) then return part:slice(0, first, first + n) end
  return part:rows(first, n)
end

--- How many samples a batch has.
function pipeline.samples_of(batch)
  local part = batch[1]
  if rille.is_tensor(part) then return part:size(0) end
  return part.n
end

-- ---- the loss contract

-- The loss of outputs: sum (a tensor), count, and whether the loss gave a mean over samples.
local function run_loss(loss, outputs, y, n_samples)
  local sum, count = core.scope(loss, outputs[1], y)
  if not rille.is_tensor(sum) then
    fail("the loss gave a %s, not a tensor", type(sum))
  end
  if sum:numel() ~= 1 then
    fail("the loss gave a tensor of shape [%s], not a single number: sum it, or return "
      .. "(sum, count)", table.concat({ sum:shape() }, ", "))
  end
  if count == nil then return sum * n_samples, n_samples, true end
  return sum, rille.is_tensor(count) and count:item() or count, false
end

local function is_sum(loss) return type(loss) == "table" and loss.reduction == "sum" end

-- How many target slots the whole step has: C of the loss contract.
local function count_slots(loss, y, n_samples, is_mean)
  if is_sum(loss) then return 1 end
  if is_mean or y == nil then return n_samples end
  return math.max(y:numel(), 1)
end

-- How many targets of the whole step count. What is no tensor may give other rows to another cut.
local function count_targets(self)
  local now, total = self.now, 0
  if rille.is_tensor(now.batch[2]) then return self.loss.count(now.batch[2]) end
  for _, piece in ipairs(self.layout:microbatches(now.samples)) do
    total = total + self.loss.count(rows_of(now.batch, 2, piece[1], piece[2]))
  end
  return total
end

-- N, before all of it has been seen: an added loss is seeded so that the final factor C/N cancels.
local function count_in_advance(self)
  local now, loss = self.now, self.loss
  if now.expected then return now.expected end
  local has_count = type(loss) == "table" and loss.count and not is_sum(loss)
  now.expected = has_count and count_targets(self) or now.slots
  return now.expected
end

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

-- What comes into a stage: the chain's values, and named ones.
local function inputs_of(self, stage, piece, ins)
  local named, kept = {}, {}
  if stage == 0 then
    local x = rows_of(piece.batch, 1, piece.first, piece.n)
    core.data(x)
    kept[x] = true
    return table.pack(x), named, kept
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
  local y = rows_of(piece.batch, 2, piece.first, piece.n)
  if y then core.data(y) end
  local sum, count, is_mean = run_loss(self.loss, values, y, piece.n)
  drop_inputs(values, { n = 0 }, kept, {})
  now.slots = now.slots or count_slots(self.loss, piece.batch[2], now.samples, is_mean)
  piece.loss, piece.count = sum:item(), count
  if not rille.is_grad_enabled() then return core.release(sum) end
  if not sum:requires_grad() then
    fail("the loss depends on no parameter that wants a gradient")
  end
  live.sum = sum
end

-- Remembers what added losses are worth, for the step's sums.
local function note_added(self, mb, piece)
  for k, added in ipairs(nn.added_losses) do
    table.insert(self.now.added, {
      name = added.name, mb = mb, unit = added.unit, k = k,
      value = added.weight * piece.n / self.now.samples * added.value:item(),
    })
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

-- F of a microbatch.
local function forward(self, stage, mb, ins)
  local piece = self.now.pieces[mb + 1]
  core.begin_microbatch(mb, piece.at, piece.n)
  nn.added_losses = {}
  local live = { ins = ins, stage = stage }
  local values, named, kept = inputs_of(self, stage, piece, ins)
  values = run_units(self, stage, piece, values, named, kept)
  local outs
  if self.wants_output and stage == self.layout.n_stages - 1 then
    outs, piece.output = {}, values
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

-- ---- what is reduced

-- The buckets of what a stage or a group of stages reduces: runs of parameters in a set, the last
-- units first, each of about `size` bytes: {set, first, n, unit}; `unit` is the lowest that uses
-- one.
local function buckets_of(sets, size)
  local list = {}
  for _, part in ipairs(sets) do
    local bucket, bytes
    for i = #part.params, 1, -1 do
      local p = part.params[i]
      if not bucket or bytes >= size then
        bucket, bytes = { set = part.set, first = i, n = 0, unit = math.huge }, 0
        table.insert(list, bucket)
      end
      bucket.first, bucket.n = i, bucket.n + 1
      bucket.unit = math.min(bucket.unit, part.units[i])
      bytes = bytes + p:numel() * (p:dtype() == "f64" and 8 or 4)
    end
  end
  for i, bucket in ipairs(list) do bucket.order = i end
  table.sort(list, function(a, b)
    if a.unit ~= b.unit then return a.unit > b.unit end
    return a.order < b.order
  end)
  return list
end

-- Starts what is ready, in the common order (inv. 3).
local function start_ready(self)
  while self.next_bucket <= #self.buckets do
    local bucket = self.buckets[self.next_bucket]
    if not bucket.is_ready then return end
    self.next_bucket = self.next_bucket + 1
    local grad = bucket.set:finish_part(bucket.first, bucket.n)
    if self.layout.dp > 1 then
      table.insert(self.started, self.dp_comm:all_reduce_start(grad))
    end
  end
end

-- The last contribution to a stage or group has been made, or to its units above `unit`.
local function mark_ready(self, kind, index, unit)
  for _, bucket in ipairs(self.buckets) do
    if bucket.kind == kind and bucket.index == index and (not unit or bucket.unit > unit) then
      bucket.is_ready = true
    end
  end
  start_ready(self)
end

-- What the last backward of a stage tells of finished units; nothing where nobody waits for them.
local function teller(self, stage)
  self.left[stage] = self.left[stage] - 1
  if self.left[stage] > 0 or self.layout.dp == 1 then return nil end
  return function(unit) mark_ready(self, "stage", stage, unit) end
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
      if dout and out:requires_grad() then add(out, dout) end
    end
  end
  for _, added in ipairs(live.added) do
    if added.value:requires_grad() then
      local share = added.weight * piece.n / self.now.samples
      add(added.value, rille.full({}, share * count_in_advance(self) / self.now.slots,
        { dtype = added.value:dtype() }))
    end
  end
  return outs, seeds
end

local function release_all(list)
  for _, tensor in ipairs(list or {}) do core.release(tensor) end
end

-- B or I of a microbatch; note is C, which stages before the loss do not know else.
local function backward(self, stage, mb, half, douts, note)
  local now = self.now
  if not now.slots and note > 0 then now.slots = note end
  local piece, live = now.pieces[mb + 1], self.live[stage][mb]
  core.begin_microbatch(mb, piece.at, piece.n)
  local outs, seeds = roots_of(self, live, douts, piece)
  local tell = half == "B" and teller(self, stage) or nil
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

local function wgrad(self, stage, mb)
  local live = self.live[stage][mb]
  self.live[stage][mb] = nil
  local tell = teller(self, stage)
  if live.wgrad then live.wgrad:run(tell) end
  release_all(live.seeds)
  if self.recorder then self.recorder:gradients(stage, mb, self.now.pieces[mb + 1].at, "W") end
end

-- ---- reductions

local function reduce_tied(self, group)
  local tied = self.layout.tied[group + 1]
  if self.tied_comm[group] then
    for _, p in ipairs(tied.params) do
      core.tied_exchange(self.tied_comm[group], p.tensor, p.units, p.unit_ranks)
    end
  end
  mark_ready(self, "tied", group)
end

-- Groups of ranks that share parameters, and which rank in it runs each unit.
local function make_tied_groups(self)
  local l = self.layout
  self.tied_comm = {}
  for g, tied in ipairs(l.tied) do
    local ranks, at, n = {}, {}, 0
    for _, stage in ipairs(tied.stages) do ranks[l.sched:holder(stage)] = true end
    for rank = 0, l.pp - 1 do
      if ranks[rank] then at[rank], n = n, n + 1 end
    end
    if n > 1 then
      self.tied_comm[g - 1] = self.pp_comm:split(ranks[l.rank] and 0 or -1, l.rank)
    end
    for _, p in ipairs(tied.params) do
      p.unit_ranks = {}
      for i, unit in ipairs(p.units) do
        p.unit_ranks[i] = at[l.sched:holder(l.stage_of[unit + 1])]
      end
    end
  end
end

-- The order in which this pipeline rank's buckets become ready, the same for all replicas.
local function order_of_buckets(self, optimizer)
  local list = {}
  local kinds = { REDUCE_GRAD = "stage", REDUCE_TIED = "tied" }
  for _, action in ipairs(self.layout.sched:row(self.layout.rank)) do
    local kind = kinds[action.kind]
    if kind then
      local index, sets = kind == "stage" and action.stage or action.mb, {}
      for _, part in ipairs(optimizer.sets) do
        if part.place == kind .. " " .. index then table.insert(sets, part) end
      end
      for _, bucket in ipairs(buckets_of(sets, self.layout.bucket)) do
        bucket.kind, bucket.index = kind, index
        table.insert(list, bucket)
      end
    end
  end
  return list
end

-- ---- a pass

-- This rank's part of what a step gives.
local function my_sums(self, norms)
  local now = self.now
  local mine = {
    loss = 0.0, count = 0, slots = now.slots, expected = now.expected, added = now.added,
    has_loss = self.has_loss, stop = core.stop_requested() or "",
    norms = self.layout.mesh:at("dp") == 0 and norms or {}, -- replicas have the same gradients
  }
  for _, piece in ipairs(now.pieces) do
    if piece.loss then mine.loss, mine.count = mine.loss + piece.loss, mine.count + piece.count end
  end
  return mine
end

--- slots / count of the step, if this rank can know it before others have told: from the targets.
---@return number? scale
function Pipeline:scale_in_advance()
  local now, loss = self.now, self.loss
  if is_sum(loss) then return 1 end
  if type(loss) ~= "table" or not loss.count or #now.added > 0 then return nil end
  local y = now.batch[2]
  if not y then return nil end
  local count = count_targets(self)
  return count > 0 and math.max(y:numel(), 1) / count or nil
end

--- Starts telling all ranks what the step gave: wait() of the result returns loss, count, slots,
--- norms, added losses by name, stop (the name of a signal that a rank got). norms: as
--- Optimizer:norms() gives them.
---@return {wait: fun(): table}
function Pipeline:report(norms)
  local mine, n_samples, sums = my_sums(self, norms), self.now.samples, nil
  local l = self.layout
  local gather = self.all:size() > 1
    and self.all:all_gather_start(report.pack(mine), report.size(#self.layout.params))
  local function wait()
    if sums then return sums end
    local parts = { mine }
    if gather then
      parts = gather:wait()
      for r, text in ipairs(parts) do parts[r] = report.unpack(text) end
    end
    sums = report.combine(parts, n_samples, function(r) return l.mesh:at("dp", r - 1) end)
    return sums
  end
  return { wait = wait }
end

-- Buffers that forward passes changed: in the order of microbatches, once a step. Replicas have
-- seen other samples: they take the mean.
local function apply_staged(self)
  local staged, seen = nn.staged_updates, {}
  nn.staged_updates = nil
  for i, update in ipairs(staged) do update.order = i end
  table.sort(staged, function(a, b)
    if a.mb ~= b.mb then return a.mb < b.mb end
    return a.order < b.order
  end)
  for _, update in ipairs(staged) do update.apply() end
  if self.layout.dp == 1 then return end
  for _, update in ipairs(staged) do seen[update.buffer] = true end
  for _, entry in ipairs(self:buffers()) do
    if seen[entry[2]] and entry[2]:dtype():find "^b?f" then
      self.dp_comm:all_reduce(entry[2])
      rille.no_grad(function() entry[2]:mul_(1 / self.layout.dp) end)
    end
  end
end

-- This replica's microbatches of a global batch whose first sample has the global index `at`.
local function pieces_of(self, batch, at)
  local l, pieces = self.layout, {}
  for mb = 0, l.m - 1 do
    local first, n = layouts.cut(l.n_samples, l.micro, mb)
    first = first + l.first_sample
    pieces[mb + 1] = { batch = batch, first = first, n = n, at = at + first, mb = mb }
  end
  return pieces
end

-- ---- where the time went

local REALIGN <const> = 500 -- steps after which clocks are compared again: they drift

-- Seconds to be added to each rank's clock of this pipeline to get rank 0's.
local function align_clocks(self)
  if self.layout.pp == 1 then return end
  self.clocks, self.clock_errors = self.pp_comm:align_clocks()
end

-- The latest step's spans by rank; nil if there was none.
local function spans_of(self)
  if self.spans_coming then self.spans, self.spans_coming = self.spans_coming:wait(), nil end
  return self.spans
end

-- The spans of all ranks of this pipeline, for a ledger or a drawing.
local function gather_spans(self)
  if self.layout.pp == 1 then return end
  spans_of(self) -- of the step before: done by now
  self.steps_run = (self.steps_run or 0) + 1
  self.spans_clocks = self.clocks
  self.spans_coming = self.pp_comm:all_gather_start(self.exec:spans(), self.spans_bytes)
  if self.steps_run % REALIGN == 0 then align_clocks(self) end
end

-- Of numbers by name in a list, the sums by name.
local function sum_by_name(list)
  local sums = {}
  for _, entry in ipairs(list) do
    for name, value in pairs(entry) do sums[name] = (sums[name] or 0) + value end
  end
  return sums
end

--- The bubble ledger of the latest step (or of the one before, for which nobody is waited for), on
--- the first rank of a pipeline (elsewhere nil): seconds of idle time summed over its ranks, by
--- cause, and who was late.
---@return table? {share = of all ranks' time, idle =, causes = {warm_up =, ...}, idle_by_rank =,
--- late_rank =, slow_rank = the one that stays late}
function Pipeline:bubble(is_latest)
  local spans = is_latest and spans_of(self) or self.spans
  if self.layout.rank > 0 or not spans then return nil end
  local ledger = self.layout.sched:ledger(spans, self.spans_clocks)
  local idle = 0.0
  for _, seconds in ipairs(ledger.idle) do idle = idle + seconds end
  self.watch = self.watch or {}
  return {
    share = idle / ((ledger.finish - ledger.start) * #ledger.idle), idle = idle,
    idle_by_rank = ledger.idle, causes = sum_by_name(ledger.causes), late_rank = ledger.latest,
    slow_rank = core.ledger_watch(self.watch, ledger, 10, 0.02),
    words = ledger.words,
  }
end

--- The latest step as an SVG: what the schedule promises, with the measured mean times, above what
--- was measured; and the figures, {predicted =, measured =, predicted_bubble =, measured_bubble =
--- (seconds), text = the same for a terminal}. On the first rank of a pipeline; elsewhere nil.
---@return string? svg
---@return table? figures
function Pipeline:timeline()
  local spans = spans_of(self)
  if self.layout.rank > 0 or not spans then return nil end
  return self.layout.sched:compare(spans, self.spans_clocks)
end

--- Forward and backward of a global batch: gradients are summed over microbatches and ranks, to be
--- multiplied by slots / count (a summed loss: as they are), which report() knows. at: the global
--- index of the batch's first sample.
function Pipeline:forward_backward(batch, at)
  local l = self.layout
  self.now = { batch = batch, pieces = pieces_of(self, batch, at), added = {},
    samples = pipeline.samples_of(batch) }
  self.next_bucket, self.started = 1, {}
  for _, bucket in ipairs(self.buckets) do bucket.is_ready = false end
  for _, stage in ipairs(l.local_stages) do self.live[stage], self.left[stage] = {}, l.m end
  nn.staged_updates = {}
  if self.is_broken and self.all:size() > 1 then
    fail("an earlier step failed on this rank, and the error was caught: other ranks wait in that "
      .. "step\n  hint: let the error end the run")
  end
  self.is_broken = true
  self.exec:run()
  gather_spans(self)
  for _, reduction in ipairs(self.started) do reduction:wait() end
  apply_staged(self)
  self.is_broken = false
end

--- A whole step but for the update, of a loop of one's own: gradients are zeroed, filled, reduced.
---@param batch table {inputs, targets}
---@return table {loss, count, scale = what the gradients are to be multiplied by, norms = for
--- Optimizer:step, losses = added ones by name}, the same on every rank
function Pipeline:step(batch)
  if not self.own_optimizer then
    fail("Pipeline:step: make the optimizer first, pipe:optimizer{\"adamw\", ...}: it lays the "
      .. "gradients out")
  end
  self.steps_taken = (self.steps_taken or 0) + 1
  core.begin_step(self.steps_taken)
  self.own_optimizer:zero_grad()
  self:forward_backward(batch, self.samples_seen or 0)
  self.samples_seen = (self.samples_seen or 0) + pipeline.samples_of(batch)
  local sums = self:report(self.own_optimizer:norms()).wait()
  core.end_step()
  local loss = is_sum(self.loss) and sums.loss or sums.loss / sums.count
  for _, value in pairs(sums.added) do loss = loss + value end
  return { loss = loss, count = sums.count, losses = sums.added, norms = sums.norms,
    scale = is_sum(self.loss) and 1 or sums.slots / sums.count }
end

-- Forward passes of pieces that this replica runs, as many at a time as the schedule has.
local function forward_pieces(self, pieces)
  local l = self.layout
  for first = 1, #pieces, l.m do
    self.now.pieces = table.move(pieces, first, math.min(first + l.m - 1, #pieces), 1, {})
    rille.no_grad(function() self.exec:forward(#self.now.pieces) end)
  end
end

-- All ranks' losses of an evaluation, in the order of the batches.
local function gather_pieces(self, mine)
  local PIECE <const> = "<i8dd"
  local words = {}
  for i, part in ipairs(mine) do words[i] = PIECE:pack(part.k, part.loss, part.count) end
  local list = {}
  for _, text in ipairs(self.all:all_gather(table.concat(words))) do
    local at = 1
    while at <= #text do
      local part = {}
      part.k, part.loss, part.count, at = PIECE:unpack(text, at)
      part.count = report.whole(part.count)
      table.insert(list, part)
    end
  end
  table.sort(list, function(a, b) return a.k < b.k end)
  return list
end

--- The loss sum and the count over n batches of a loader, without gradients; batches are shared out
--- among replicas, and summed in their order.
function Pipeline:evaluate(loader, n, micro)
  local l = self.layout
  local pieces, order = {}, {}
  for k = l.mesh:at("dp"), n - 1, l.dp do
    local batch = loader:batch(k, micro)
    local samples = pipeline.samples_of(batch)
    table.insert(pieces, { batch = batch, first = 0, n = samples, at = k * micro, k = k })
  end
  self.now = { pieces = pieces, samples = micro, added = {} }
  forward_pieces(self, pieces)
  for _, piece in ipairs(pieces) do
    if piece.loss then
      table.insert(order, { k = piece.k, loss = piece.loss, count = piece.count })
    end
  end
  if self.all:size() > 1 then order = gather_pieces(self, order) end
  local sum, count = 0.0, 0
  for _, part in ipairs(order) do sum, count = sum + part.loss, count + part.count end
  return sum, count
end

-- A tensor of rank `owner` on all ranks.
local function broadcast(comm, tensor, owner)
  local words = tensor and ("%s %s"):format(tensor:dtype(), table.concat({ tensor:shape() }, " "))
  words = comm:broadcast(words, owner)
  if not tensor then
    local shape = {}
    for n in words:gmatch(" (%d+)") do table.insert(shape, math.tointeger(n)) end
    tensor = rille.zeros(shape, { dtype = words:match("^%S+") })
  end
  comm:broadcast(tensor, owner)
  return tensor
end

--- The model's output for an input that every rank has, on every rank.
function Pipeline:predict(x)
  self.now = { pieces = { { batch = { x }, first = 0, n = x:size(0), at = 0 } }, added = {},
    samples = x:size(0) }
  self.wants_output = true
  local _ <close> = setmetatable({}, { __close = function() self.wants_output = false end })
  rille.no_grad(function() self.exec:forward(1) end)
  local output = self.now.pieces[1].output
  if self.layout.pp == 1 then return output[1] end
  local owner = self.layout.sched:holder(self.layout.n_stages - 1)
  return broadcast(self.pp_comm, output and output[1]:contiguous(), owner)
end

-- The unit of this rank whose output first held a value that is not finite, by running forward once
-- more: {mb, unit, words}.
local function find_nonfinite(self)
  local l, found, removes = self.layout, nil, {}
  for _, stage in ipairs(l.local_stages) do
    for u = l.first_unit[stage], l.last_unit[stage] do
      for _, module in ipairs(l.units[u]:modules()) do
        table.insert(removes, module:on("", function(m, out)
          local place = core.place()
          local is_later = found and (place.microbatch > found.mb or place.microbatch == found.mb
            and place.unit >= found.unit)
          if is_later or not rille.is_tensor(out) then return end
          if rille.no_grad(function() return out:isfinite():all():item() end) then return end
          found = { mb = place.microbatch, unit = place.unit, words = ("%s (%s), microbatch %d")
            :format(m._path == "" and "the model" or m._path, m._class, place.microbatch) }
        end))
      end
    end
  end
  forward_pieces(self, self.now.pieces)
  for _, remove in ipairs(removes) do remove() end
  return found
end

--- The module, over all ranks, whose output first held a value that is not finite, in words; nil if
--- there is none. Runs the forward passes of the step again.
function Pipeline:first_nonfinite(batch, at)
  self.now = { batch = batch, pieces = pieces_of(self, batch, at), added = {},
    samples = pipeline.samples_of(batch) }
  local found = find_nonfinite(self)
  if self.all:size() == 1 then return found and found.words end
  local FOUND <const>, first = "<i8i8s4", nil
  for _, text in ipairs(self.all:all_gather(found and
    FOUND:pack(found.mb, found.unit, found.words) or "")) do
    local mb, unit, words
    if text ~= "" then mb, unit, words = FOUND:unpack(text) end
    if mb and (not first or mb < first.mb or mb == first.mb and unit < first.unit) then
      first = { mb = mb, unit = unit, words = words }
    end
  end
  return first and first.words
end

-- ---- parameters

--- An optimizer over the parameters that this rank holds; norms are the whole model's.
function Pipeline:optimizer(spec)
  local l, named = self.layout, {}
  for _, p in ipairs(l.params) do
    if p.is_here then
      table.insert(named, { p.name, p.tensor, order = p.index, is_counted = p.owner == l.rank,
        place = p.tied and "tied " .. p.group or "stage " .. p.stages[1], unit = p.units[1] })
    end
  end
  local optimizer = optim.new(named, spec, l.dp)
  self.buckets = order_of_buckets(self, optimizer)
  self.own_optimizer = optimizer
  return optimizer
end

--- The buffers that this rank's units have: a list of {name, tensor}.
function Pipeline:buffers()
  local l, list = self.layout, {}
  if l.pp == 1 then return l.model:named_buffers() end
  for _, stage in ipairs(l.local_stages) do
    for u = l.first_unit[stage], l.last_unit[stage] do
      local buffers = l.units[u]:named_buffers()
      table.move(buffers, 1, #buffers, #list + 1, list)
    end
  end
  return list
end

--- The 64-bit fingerprint of all parameters as 16 hexadecimal digits: equal for every layout.
function Pipeline:fingerprint()
  local l, sum = self.layout, 0
  for _, p in ipairs(l.params) do
    if p.owner == l.rank then sum = sum + core.fingerprint(p.tensor) end
  end
  if l.pp > 1 then
    local parts = self.pp_comm:all_gather(("<i8"):pack(sum))
    sum = 0
    for _, part in ipairs(parts) do sum = sum + ("<i8"):unpack(part) end
  end
  return ("%016x"):format(sum)
end

-- ---- construction

local function make_exec(self)
  local l = self.layout
  self.exec = core.exec {
    sched = l.sched, comm = self.pp_comm, clocks = self.clocks,
    forward = function(...) return forward(self, ...) end,
    backward = function(...) return backward(self, ...) end,
    wgrad = function(...) return wgrad(self, ...) end,
    reduce_grad = function(stage) mark_ready(self, "stage", stage) end,
    reduce_tied = function(group) reduce_tied(self, group) end,
  }
end

-- A pipeline over the ranks of a layout.
local function new(l, options)
  local self = setmetatable({
    layout = l, loss = options.loss, recompute = options.recompute, live = {},
    all = l.mesh:all(), pp_comm = l.mesh:group("pp"), dp_comm = l.mesh:group("dp"),
    edge_names = {}, edges_from = {}, left = {}, buckets = {},
  }, Pipeline)
  self.has_loss = l.sched:holder(l.n_stages - 1) == l.rank
  for stage = 0, l.n_stages - 1 do self.edge_names[stage], self.edges_from[stage] = {}, {} end
  for _, edge in ipairs(l.edges) do
    self.edge_names[edge.from][edge.to] = edge.names
    table.insert(self.edges_from[edge.from], edge)
  end
  for _, stage in ipairs(l.local_stages) do self.live[stage] = {} end
  self.recorder = record.new(l)
  make_tied_groups(self)
  align_clocks(self)
  self.spans_bytes = 0 -- of the longest list
  for rank = 0, l.pp - 1 do
    self.spans_bytes = math.max(self.spans_bytes, 48 * #l.sched:row(rank))
  end
  make_exec(self)
  return self
end

local option_names = { "batch", "example", "loss", "model", "parallel", "recompute", "seed" }

--- The pieces of a Trainer for a loop of one's own, under every layout:
---
---     local pipe = rille.Pipeline { model = model, loss = nn.cross_entropy,
---       batch = { global = 64, micro = 4 }, parallel = { pp = 2 } }
---     local optimizer = pipe:optimizer { "adamw", lr = 3e-4, clip = 1 }
---     for step = 1, 100 do
---       local r = pipe:step(data.train:batch(step - 1, 64)) -- {inputs, targets}
---       optimizer:step(r.scale, 100, false, r.norms)
---     end
---
--- Options are the Trainer's of the same names.
---@return rille.Pipeline
function pipeline.Pipeline(options)
  known("Pipeline", options, option_names)
  for _, name in ipairs { "model", "loss", "batch" } do
    if options[name] == nil then fail.usage("Pipeline needs %s", name) end
  end
  local global, micro = trainer_options.batch(options.batch)
  if options.seed then rille.manual_seed(options.seed) end
  return new(layouts.new(options.model, options.parallel, global, micro, options.example,
    options.loss), options)
end

return pipeline
