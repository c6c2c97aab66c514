-- pipeline - the training step over the stages of a model: a pass over a global batch, what all
-- ranks learn of it, evaluation, where the time went.
--
--     forward_backward    the executor runs the schedule's list; rille.stage is what it calls
--     report              what the ranks tell each other of the step
--
-- One process is a pipeline of one stage: there is no other path.
local rille = require "rille"
local core = rille.core
local nn = require "rille.nn"
local fail = require "rille.fail"
local is_finite = require "rille.is_finite"
local layouts = require "rille.layout"
local optim = require "rille.optim"
local known = require "rille.known"
local record = require "rille.record"
local reduction = require "rille.reduction"
local report = require "rille.report"
local stage_calls = require "rille.stage"
local targets = require "rille.targets"
local trainer_options = require "rille.trainer_options"

local pipeline = {}

---@class rille.Pipeline
local Pipeline = {}
Pipeline.__index = Pipeline

-- ---- a pass

-- This rank's part of what a step gives.
local function my_sums(self, norms)
  local now = self.now
  local mine = {
    loss = 0.0, count = 0, slots = now.slots, expected = now.expected, added = now.added,
    has_loss = self.has_loss,
    norms = self.layout.mesh:at("dp") == 0 and norms or {}, -- replicas have the same gradients
    peak = core.memory().total.peak, stop = core.stop_requested() or "",
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
  if targets.is_sum(loss) then return 1 end
  if type(loss) ~= "table" or not loss.count then return nil end
  local y = now.batch[2]
  if not y then return nil end
  local count = targets.count(self)
  return count > 0 and math.max(y:numel(), 1) / count or nil
end

--- Starts telling all ranks what the step gave: wait() of the result returns loss, count, slots,
--- norms, added losses by name, stop (the name of a signal that a rank got). norms: as
--- Optimizer:norms() gives them. wait(true) where all ranks wait now: long parts then take a second
--- round.
---@return {wait: fun(together: boolean): table}
function Pipeline:report(norms)
  local mine, n_samples, sums = my_sums(self, norms), self.now.samples, nil
  local l = self.layout
  local gather = self.all:size() > 1
    and self.all:all_gather_start(report.pack(mine), report.size(#self.layout.params))
  local function wait(together)
    if sums then return sums end
    local parts = { mine }
    if gather then
      parts = gather:wait(together)
      for r, text in ipairs(parts) do parts[r] = report.unpack(text) end
    end
    sums = report.combine(parts, n_samples, function(r) return l.mesh:at("dp", r - 1) end)
    return sums
  end
  return { wait = wait }
end

--- What communication has cost this rank so far, by axis: of tp the sums within layers; of dp those
--- of gradients over replicas (with time cut, over tp ranks too: of tp where there are no
--- replicas); of pp what stages send.
---@return table<string, {messages: integer, bytes: integer, waited: number, busy: number}>
---  bytes sent; waited: seconds without anything to do; busy: seconds with something under way
function Pipeline:communication()
  local l, by_axis = self.layout, {}
  local groups = { tp = { l.tp and l.tp.group }, dp = { self.dp_comm }, pp = { self.pp_comm } }
  for _, group in pairs(self.sharers_comm or {}) do table.insert(groups.tp, group) end
  for _, group in pairs(self.tied_comm) do table.insert(groups.pp, group) end
  if self.stage_comm then -- over tp and dp
    table.insert(l.dp > 1 and groups.dp or groups.tp, self.stage_comm)
  end
  for _, axis in ipairs { "tp", "dp", "pp" } do
    local sums = { messages = 0, bytes = 0, waited = 0.0, busy = 0.0 }
    for _, group in pairs(groups[axis]) do
      for name, value in pairs(group:stats()) do sums[name] = sums[name] + value end
    end
    if l.mesh:size(axis) > 1 then by_axis[axis] = sums end
  end
  return by_axis
end

--- What a step comes to, by what the ranks have told.
---@param sums table as wait() of report() gives them
---@return {loss: number, count: number, losses: table, scale: number, norms: table,
---  grad_norm: number, nonfinite: string?} scale: what the gradients are to be multiplied by;
---  grad_norm: the norm of the scaled gradients; nonfinite: "loss" or "grad_norm", which of the two
---  is not finite: such a step does not count
function Pipeline:outcome(sums)
  local loss, scale = targets.finish(self.loss, sums)
  local norm = self.own_optimizer:norm_of(sums.norms) * scale
  return {
    loss = loss, count = sums.count, losses = sums.added, scale = scale, norms = sums.norms,
    grad_norm = norm,
    nonfinite = not is_finite(loss) and "loss" or not is_finite(norm) and "grad_norm" or nil,
  }
end

-- Replicas have seen other samples, tp ranks maybe other parts of time: buffers take the mean.
local function average(self, is_changed)
  local tp = self.layout.tp
  local comm = tp and tp.wants_sequence and self.stage_comm or self.layout.dp > 1 and self.dp_comm
  if not comm then return end
  for _, entry in ipairs(self:buffers()) do
    if is_changed[entry[2]] and entry[2]:dtype():find "^b?f" then
      comm:all_reduce(entry[2])
      rille.no_grad(function() entry[2]:mul_(1 / comm:size()) end)
    end
  end
end

--- fn(), in which this rank may fail alone, after the others have gone on. If it raises, the
--- pipeline stays broken: a script that catches the error cannot run another step with the others.
function Pipeline:alone(fn)
  self.is_broken = true
  local result = fn()
  self.is_broken = false
  return result
end

--- A step counts, on all ranks: what its forward passes changed in buffers is put in place, in the
--- order of microbatches, and update(), if there is one, called, whose result it returns. An error
--- in either puts the old values back.
function Pipeline:accept(update)
  local staged, before, is_changed = self.staged or {}, {}, {}
  self.staged = nil
  local _ <close> = setmetatable({}, { __close = function(_, failure)
    for _, entry in ipairs(before) do
      if failure then rille.no_grad(function() entry[1]:copy_(entry[2]) end) end
      core.release(entry[2])
    end
  end })
  for i, change in ipairs(staged) do change.order = i end
  table.sort(staged, function(a, b)
    if a.mb ~= b.mb then return a.mb < b.mb end
    return a.order < b.order
  end)
  return self:alone(function()
    for _, change in ipairs(staged) do
      local buffer = change.buffer
      if not is_changed[buffer] then
        is_changed[buffer] = true
        table.insert(before, { buffer, buffer:detach():clone() })
      end
      change.apply()
    end
    average(self, is_changed)
    return update and update()
  end)
end

-- This replica's microbatches of a global batch whose first sample has the global index `at`.
local function pieces_of(self, batch, at)
  local l, pieces = self.layout, {}
  for i, cut in ipairs(layouts.cut(l.n_samples, l.micro)) do
    local first = l.first_sample + cut[1]
    pieces[i] = { batch = batch, first = first, n = cut[2], at = at + first, mb = i - 1 }
  end
  return pieces
end

-- What a pass had begun that ended by an error: the script may catch that and go on.
local function abandon(self, failure)
  if not failure then return end
  core.end_microbatch()
  nn.added_losses, nn.staged_updates = nil, nil
  for stage in pairs(self.live) do self.live[stage] = {} end
end

-- Calls a method of the executor; tp ranks share activations out meanwhile. any_length: not time.
local function pass(self, any_length, method, ...)
  local tp = self.layout.tp
  local _ <close> = setmetatable({}, { __close = function(_, failure) abandon(self, failure) end })
  if not tp then return method(self.exec, ...) end
  if rawget(self.layout.model, "_tp") ~= tp then self.layout:bind() end
  return tp:pass(any_length, method, self.exec, ...)
end

-- ---- where the time went

local REALIGN <const> = 500 -- steps after which clocks are compared again: they drift

-- Seconds to be added to each rank's clock of this pipeline to get rank 0's.
local function align_clocks(self)
  if self.layout.pp == 1 then return end
  self.clocks = self.pp_comm:align_clocks()
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
    slow_rank = core.ledger_watch(self.watch, ledger, 10, 0.1),
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

-- Weights that all ranks of a tp group have whole are the same there.
local function agree_in_tp(self)
  local l, lines = self.layout, {}
  if not l.tp then return end
  for _, p in ipairs(l.params) do
    if p.is_here and not p.cut then
      table.insert(lines, ("%s of fingerprint %016x"):format(p.name, core.fingerprint(p.tensor)))
    end
  end
  layouts.agree(l.tp.group, lines, "tp ranks have this parameter whole, but other gradients for "
    .. "it: between a \"column\" and a \"row\" Linear a module says plan:sums(self, \"name\") in "
    .. "its tensor_parallel(plan), a norm tp = \"heads\", a Dropout tp = \"column\"")
end

--- The fingerprint, on which all ranks agree; an error where replicas have drifted apart.
function Pipeline:common_fingerprint()
  local value = self:fingerprint()
  if self.all:size() > 1 then self.all:agree { "weights of fingerprint " .. value } end
  agree_in_tp(self)
  return value
end

-- Before the first step: all ranks have the same weights (a pipeline's together) and see the same
-- data.
local function agree_at_start(self, batch)
  self.has_agreed = true
  if self.all:size() == 1 then return end
  local digest = 0
  for k = 1, 2 do
    local part = targets.rows(batch, k, 0, 1)
    if part then digest = core.digest(part:contiguous(), digest) end
  end
  self.all:agree { "weights of fingerprint " .. self:fingerprint(),
    ("a first sample of digest %016x"):format(digest) }
end

--- Forward and backward of a global batch: gradients are summed over microbatches and ranks, to be
--- multiplied by slots / count (a summed loss: as they are), which report() knows. at: the global
--- index of the batch's first sample. What it would change in buffers waits for accept().
function Pipeline:forward_backward(batch, at)
  local l = self.layout
  self.now = { batch = batch, pieces = pieces_of(self, batch, at), added = {},
    samples = targets.samples(batch) }
  self.next_bucket, self.started = 1, {}
  for _, bucket in ipairs(self.buckets) do bucket.is_ready = false end
  for _, stage in ipairs(l.local_stages) do self.live[stage], self.left[stage] = {}, l.m end
  if self.is_broken and self.all:size() > 1 then
    core.give_up("an earlier step failed on this rank, and the error was caught: other ranks wait "
      .. "in that step\n    hint: let the error end the run")
  end
  if not self.has_agreed then agree_at_start(self, batch)
  elseif not self.has_stepped then
    self.has_stepped = true
    agree_in_tp(self) -- after the first update
  end
  self.is_broken = true
  nn.staged_updates = {}
  pass(self, false, self.exec.run)
  gather_spans(self)
  for _, sum in ipairs(self.started) do sum:wait() end
  self.staged, nn.staged_updates = nn.staged_updates, nil
  if self.recorder then self.recorder:reduced() end
  self.is_broken = false
end

--- Begins a step. What it gives is for a variable with <close>: an error ends the step; else it
--- lasts until core.end_step().
function Pipeline:begin_step(step)
  core.begin_step(step)
  return setmetatable({}, { __close = function(_, failure)
    if not failure then return end
    core.end_step()
    self.staged = nil
  end })
end

--- A whole step but for the update, of a loop of one's own: gradients are zeroed, filled, reduced.
--- From a loss or gradients that are not finite nothing is put into buffers.
---@param batch table {inputs, targets}
---@return table as outcome() gives it, the same on every rank; norms are for Optimizer:step
function Pipeline:step(batch)
  if not self.own_optimizer then
    fail("Pipeline:step: make the optimizer first, pipe:optimizer{\"adamw\", ...}: it lays the "
      .. "gradients out")
  end
  if targets.samples(batch) ~= self.layout.n_global then
    fail("Pipeline:step: the batch has %d samples, batch.global is %d", targets.samples(batch),
      self.layout.n_global)
  end
  local step = (self.steps_taken or 0) + 1
  if self.recorder then self.recorder:updated(step - 1) end
  local _ <close> = self:begin_step(step)
  self.own_optimizer:zero_grad()
  self:forward_backward(batch, self.samples_seen or 0)
  local outcome = self:outcome(self:report(self.own_optimizer:norms()).wait(true))
  if not outcome.nonfinite then self:accept() end
  self.staged = nil
  self.samples_seen = (self.samples_seen or 0) + targets.samples(batch)
  self.steps_taken = step
  core.end_step()
  if self.recorder then self.recorder:told(step, outcome.loss, outcome.grad_norm) end
  return outcome
end

-- Forward passes of pieces that this replica runs, as many at a time as the schedule has.
local function forward_pieces(self, pieces)
  local l = self.layout
  for first = 1, #pieces, l.m do
    self.now.pieces = table.move(pieces, first, math.min(first + l.m - 1, #pieces), 1, {})
    rille.no_grad(function() pass(self, false, self.exec.forward, #self.now.pieces) end)
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
    local samples = targets.samples(batch)
    table.insert(pieces, { batch = batch, first = 0, n = samples, at = k * micro, k = k })
  end
  self.now = { pieces = pieces, samples = micro, added = {} }
  forward_pieces(self, pieces)
  for _, piece in ipairs(pieces) do
    if piece.loss and l:is_first_of_tp() then
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
  rille.no_grad(function() pass(self, true, self.exec.forward, 1) end)
  local output = self.now.pieces[1].output
  if self.layout.pp == 1 then return output[1] end
  local owner = self.layout.sched:holder(self.layout.n_stages - 1)
  return broadcast(self.pp_comm, output and output[1]:contiguous(), owner)
end

-- The unit of this rank whose output first held a value that is not finite, by running forward once
-- more: {mb, unit, words}.
local function find_nonfinite(self)
  local l, found, removes, n_calls = self.layout, nil, {}, 0
  for _, stage in ipairs(l.local_stages) do
    for u = l.first_unit[stage], l.last_unit[stage] do
      for _, module in ipairs(l.units[u]:modules()) do
        table.insert(removes, module:on("", function(m, out)
          local place = core.place()
          n_calls = n_calls + 1
          local is_later = found and (place.microbatch > found.mb or place.microbatch == found.mb
            and place.unit >= found.unit)
          if is_later or not rille.is_tensor(out) then return end
          if rille.no_grad(function() return out:isfinite():all():item() end) then return end
          local of = l.dp > 1 and (" of replica %d"):format(l.mesh:at("dp")) or ""
          found = {
            mb = place.microbatch, unit = place.unit, call = n_calls,
            words = ("%s (%s), microbatch %d%s"):format(m._path == "" and "the model" or m._path,
              m._class, place.microbatch, of),
          }
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
    samples = targets.samples(batch) }
  local found = find_nonfinite(self)
  if self.all:size() == 1 then return found and found.words end
  local FOUND <const>, all = "<i8i8i8s4", {}
  for rank, text in ipairs(self.all:all_gather(found and
    FOUND:pack(found.mb, found.unit, found.call, found.words) or "")) do
    local f = { rank = rank }
    if text ~= "" then
      f.mb, f.unit, f.call, f.words = FOUND:unpack(text)
      table.insert(all, f)
    end
  end
  table.sort(all, function(a, b)
    for _, key in ipairs { "mb", "unit", "call" } do -- ranks of a tp group make the same calls
      if a[key] ~= b[key] then return a[key] < b[key] end
    end
    return a.rank < b.rank
  end)
  return all[1] and all[1].words
end

-- ---- parameters

--- An optimizer over the parameters that this rank holds; norms are the whole model's.
function Pipeline:optimizer(spec)
  local l, named = self.layout, {}
  for _, p in ipairs(l.params) do
    if p.is_here then
      local place = p.tied and "tied " .. p.group or "stage " .. p.stages[1]
      table.insert(named, { p.name, p.tensor, order = p.index, unit = p.units[1],
        is_counted = p.owner == l.rank and (p.cut ~= nil or l:is_first_of_tp()),
        place = p.is_partial and place .. " partial" or place, cut = p.cut })
    end
  end
  local optimizer = optim.new(named, spec, l.dp)
  self.buckets = reduction.buckets(self, optimizer)
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

-- This rank's share of the fingerprint: what no other rank of the replica counts.
local function own_fingerprint(self)
  local l, sum = self.layout, 0
  for _, p in ipairs(l.params) do
    if p.owner == l.rank and (p.cut or l:is_first_of_tp()) then
      sum = sum + core.fingerprint(p.tensor)
    end
  end
  return sum
end

--- The 64-bit fingerprint of all parameters as 16 hexadecimal digits: equal for every layout.
function Pipeline:fingerprint()
  local sum = own_fingerprint(self)
  if self.model_comm:size() > 1 then
    local parts = self.model_comm:all_gather(("<i8"):pack(sum))
    sum = 0
    for _, part in ipairs(parts) do sum = sum + ("<i8"):unpack(part) end
  end
  return ("%016x"):format(sum)
end

-- ---- construction

local function make_exec(self)
  local l = self.layout
  self.exec = core.exec {
    sched = l.sched, comm = self.pp_comm, units = l:last_units(),
    forward = function(...) return stage_calls.forward(self, ...) end,
    backward = function(...) return stage_calls.backward(self, ...) end,
    wgrad = function(...) return stage_calls.wgrad(self, ...) end,
    reduce_grad = function(stage) reduction.ready(self, "stage", stage) end,
    reduce_tied = function(group) reduction.tied(self, group) end,
  }
end

-- A pipeline over the ranks of a layout.
local function new(l, options)
  local self = setmetatable({
    layout = l, loss = options.loss, recompute = options.recompute == true, live = {},
    all = l.mesh:all(), pp_comm = l.mesh:group("pp"), dp_comm = l.mesh:group("dp"),
    edge_names = {}, edges_from = {}, left = {}, buckets = {},
  }, Pipeline)
  for _, module in ipairs(l.model:modules()) do
    if getmetatable(module) == nn.Attention._instance then
      rawset(module, "_recomputes", options.recompute == "attention" or nil)
    end
  end
  self.has_loss = l.sched:holder(l.n_stages - 1) == l.rank and l:is_first_of_tp()
  self.model_comm = self.pp_comm -- the ranks that make one copy of the model
  if l.tp then
    self.model_comm = self.all:split(l.mesh:at("dp"), self.all:rank())
    self.stage_comm = self.all:split(l.mesh:at("pp"), self.all:rank()) -- ... that share a stage
    reduction.make_sharers(self)
  end
  for stage = 0, l.n_stages - 1 do self.edge_names[stage], self.edges_from[stage] = {}, {} end
  for _, edge in ipairs(l.edges) do
    self.edge_names[edge.from][edge.to] = edge.names
    table.insert(self.edges_from[edge.from], edge)
  end
  for _, stage in ipairs(l.local_stages) do self.live[stage] = {} end
  self.recorder = record.new(l)
  if self.recorder then core.keep_order(true) end -- it reads gradients after each action
  reduction.make_groups(self)
  align_clocks(self)
  make_exec(self)
  local longest = 0
  for rank = 0, l.pp - 1 do longest = math.max(longest, #l.sched:row(rank)) end
  self.spans_bytes = longest * (#self.exec:spans() // #l.sched:row(l.rank))
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
--- Options are the Trainer's of the same names. alike: what else must be the same on all ranks.
---@return rille.Pipeline
function pipeline.Pipeline(options, alike)
  known("Pipeline", options, option_names)
  for _, name in ipairs { "model", "loss", "batch" } do
    if options[name] == nil then fail.usage("Pipeline needs %s", name) end
  end
  local global, micro = trainer_options.batch(options.batch)
  if options.seed then rille.manual_seed(options.seed) end
  return new(layouts.new(options.model, options.parallel, global, micro, options.example,
    options.loss, { recompute = options.recompute, alike }), options)
end

return pipeline
