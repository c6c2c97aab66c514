-- trainer - the training step: the global batch cut into microbatches, forward and backward of
-- each, one
-- update; evaluation, checkpoints, and stopping on request.
--
-- The loss contract: a loss gives (sum, count). Backward is seeded with 1/C, where C is the number
-- of target
-- slots of the step, the same for every layout; gradients are multiplied by C/N once, N the number
-- of targets
-- that counted, folded into the clip factor. A plain scalar loss counts as (mean x samples,
-- samples).
local rille = require "rille"
local core = rille.core
local nn = require "rille.nn"
local optim = require "rille.optim"
local checkpoint = require "rille.checkpoint"
local expect = require "rille.expect"
local fail = require "rille.fail"
local trainer_options = require "rille.trainer_options"

---@class rille.Trainer
local Trainer = {}
Trainer.__index = Trainer

local trainer = {}

-- One process runs every layout of size 1; anything else is refused with words.
local function check_parallel(parallel)
  for _, axis in ipairs { "dp", "tp", "pp" } do
    local n = parallel and parallel[axis] or 1
    if n ~= 1 then
      fail.usage("Trainer: parallel.%s = %s, but this is one process (only 1 is possible)", axis,
        tostring(n))
    end
  end
end

--- A trainer. Options:
---   model       a module; its units() are run one by one, each with gradient buffers of its own
---   loss        nn.cross_entropy, or a function(output, target) -> sum, count, or -> mean
---   optimizer   see rille.optim.new
---   batch       {global = samples a step, micro = samples a microbatch}
---   recompute   true: keep only the inputs of each unit and run it again in backward
---   steps       how many are planned (schedules and the eta need it)
---   seed        of initial weights, dropout and data order (default 0)
---   out         a directory for metrics.jsonl and checkpoints; nil: none
---   checkpoint  {every = steps, keep = number kept}
---   nonfinite   "stop" (default) or "skip"
---   log         print a progress line every so many steps (default 10; 0: none)
---   fingerprint put the weights' fingerprint into metrics every so many steps (default 0: never)
---@return rille.Trainer
function Trainer.new(options)
  trainer_options.check(options)
  check_parallel(options.parallel)
  local self = setmetatable({
    model = options.model, loss = options.loss, recompute = options.recompute or false,
    out = options.out, total = options.steps, nonfinite = options.nonfinite or "stop",
    step_count = 0, samples_seen = 0, log = options.log or 10, options = options,
    fingerprint_every = options.fingerprint or 0,
  }, Trainer)
  self.global, self.micro = trainer_options.batch(options.batch)
  if options.seed then rille.manual_seed(options.seed) end
  self.units = self.model.units ~= nn.Module.units and self.model:units() or { self.model }
  self.optimizer = optim.new(self.model:named_parameters(), options.optimizer)
  checkpoint.configure(self, options.checkpoint)
  return self
end

-- ---- one microbatch

-- Drops what a unit was given, unless it is the batch itself or came out again.
local function drop_inputs(inputs, outputs, batch_input)
  for i = 1, inputs.n do
    local t = inputs[i]
    local kept = rawequal(t, batch_input) or not rille.is_tensor(t)
    for k = 1, outputs.n do kept = kept or rawequal(outputs[k], t) end
    if not kept then core.release(t) end
  end
end

-- Runs the units on x; returns the last one's results.
local function run_units(self, x)
  local values = table.pack(x)
  for i, unit in ipairs(self.units) do
    core.set_unit(i - 1)
    local inputs = values
    if self.recompute and rille.is_grad_enabled() then
      values = table.pack(core.scope(rille.checkpoint, unit, table.unpack(inputs, 1, inputs.n)))
    else
      values = table.pack(core.scope(unit, table.unpack(inputs, 1, inputs.n)))
    end
    drop_inputs(inputs, values, x)
  end
  core.set_unit(#self.units)
  return values
end

-- The loss of outputs: sum (a tensor), count, and whether the loss gave a mean over samples.
local function run_loss(self, outputs, y, n_samples)
  local sum, count = core.scope(self.loss, outputs[1], y)
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

-- How many target slots the whole step has: C of the loss contract.
local function count_slots(self, y, n_samples, is_mean)
  local loss = self.loss
  if type(loss) == "table" and loss.reduction == "sum" then return 1 end
  if is_mean or y == nil then return n_samples end
  return math.max(y:numel(), 1)
end

-- ---- add_loss

--- Adds weight x value to the loss of the running microbatch, from within any layer; value is a
--- mean over the
--- microbatch's samples. Its running value shows in the metrics under `name`.
function trainer.add_loss(name, value, weight)
  expect("rille.add_loss", "name", name, "string")
  expect("rille.add_loss", "value", value, "tensor")
  expect("rille.add_loss", "weight", weight, "number?")
  local added = nn.added_losses
  if not added or core.recomputing() then return end
  table.insert(added, { name = name, value = value:keep(), weight = weight or 1 })
end

-- ---- the step

--- What a step gives: r.loss, r.grad_norm, r.lr, r.tokens, r.count, r.losses (added ones by name),
--- r.skipped.
---@class rille.StepResult

local function rows_of(batch, k, first, n)
  local part = batch[k]
  if part == nil then return nil end
  if rille.is_tensor(part) then return part:slice(0, first, first + n) end
  return part:rows(first, n)
end

-- A batch is {inputs, targets}; each a tensor, or an object with rows(first, n) and n.
local function check_data(where, batch)
  expect(where, "the batch", batch, "table")
  for i = 1, 2 do
    local part = batch[i]
    if not rille.is_tensor(part) and not (i == 2 and part == nil) and
      not (type(part) == "table" and part.rows and part.n) then
      fail("%s: a batch is {inputs, targets}, each a tensor or an object with rows(first, n) and "
        .. "n; entry %d is %s", where, i, expect.describe(part))
    end
  end
end

local function samples_of(batch)
  local part = batch[1]
  if rille.is_tensor(part) then return part:size(0) end
  return part.n
end

-- N, before all of it has been seen: an added loss is seeded so that the final factor C/N cancels.
local function count_in_advance(self, batch, sums)
  if sums.expected then return end
  local has_count = type(self.loss) == "table" and self.loss.count and self.loss.reduction ~= "sum"
  sums.expected = has_count and self.loss.count(rows_of(batch, 2, 0, sums.samples)) or sums.slots
end

-- Forward and backward of the samples first .. first+n-1 of the batch.
local function run_microbatch(self, batch, index, first, n, sums)
  core.begin_microbatch(index, self.samples_seen + first, n)
  nn.added_losses = {}
  local x, y = rows_of(batch, 1, first, n), rows_of(batch, 2, first, n)
  core.data(x)
  if y then core.data(y) end
  local start = core.clock()
  local outputs = run_units(self, x)
  local sum, count, is_mean = run_loss(self, outputs, y, n)
  sums.slots = sums.slots or count_slots(self, batch[2], sums.samples, is_mean)
  sums.loss = sums.loss + sum:item()
  sums.count = sums.count + count
  if #nn.added_losses > 0 then count_in_advance(self, batch, sums) end
  local outs, seeds = { sum }, { rille.full({}, 1 / sums.slots, { dtype = sum:dtype() }) }
  for _, added in ipairs(nn.added_losses) do
    local share = added.weight * n / sums.samples
    sums.added[added.name] = (sums.added[added.name] or 0) + share * added.value:item()
    if added.value:requires_grad() then
      table.insert(outs, added.value)
      table.insert(seeds, rille.full({}, share * sums.expected / sums.slots,
        { dtype = added.value:dtype() }))
    end
  end
  local middle = core.clock()
  core.span(("F%d"):format(index), start, middle)
  if not sum:requires_grad() then
    fail("the loss depends on no parameter that wants a gradient")
  end
  core.backward(outs, seeds, "B")
  core.span(("B%d"):format(index), middle, core.clock())
  core.release(sum)
  drop_inputs(outputs, { n = 0 }, x)
  for _, added in ipairs(nn.added_losses) do core.release(added.value) end
  nn.added_losses = nil
  core.end_microbatch()
end

-- The module whose output first held a value that is not finite, by running forward once more.
local function first_nonfinite(self, batch, index, first, n)
  local found
  local removes = {}
  for _, module in ipairs(self.model:modules()) do
    table.insert(removes, self.model:on(module._path, function(m, out)
      if found or not rille.is_tensor(out) then return end
      local bad = rille.no_grad(function() return not out:isfinite():all():item() end)
      if bad then found = m end
    end))
  end
  core.begin_microbatch(index, self.samples_seen + first, n)
  rille.no_grad(function()
    local x, y = rows_of(batch, 1, first, n), rows_of(batch, 2, first, n)
    run_loss(self, run_units(self, x), y, n)
  end)
  core.end_microbatch()
  for _, remove in ipairs(removes) do remove() end
  return found
end

local function explain_nonfinite(self, batch, what, value)
  local where
  for index = 0, math.ceil(samples_of(batch) / self.micro) - 1 do
    local first = index * self.micro
    local n = math.min(self.micro, samples_of(batch) - first)
    local module = first_nonfinite(self, batch, index, first, n)
    if module then
      where = ("the first output that is not finite is that of %s (%s), microbatch %d"):format(
        module._path == "" and "the model" or module._path, module._class, index)
      break
    end
  end
  local shown = value ~= value and "nan" or value > 0 and "inf" or "-inf"
  return ("step %d: %s is %s\n  %s\n"
    .. "  hint: a lower learning rate, more warm-up, or nonfinite = \"skip\""):format(
    self.step_count + 1, what, shown,
    where or "all outputs of the forward pass are finite: it arose in the loss or in backward")
end

local function apply_staged()
  local staged = nn.staged_updates
  nn.staged_updates = nil
  for _, apply in ipairs(staged or {}) do apply() end
end

--- One training step on a global batch: {inputs, targets}, each a tensor or an object with
--- rows(first, n) and n.
---@return rille.StepResult
function Trainer:step(batch)
  check_data("Trainer:step", batch)
  local n_samples = samples_of(batch)
  if n_samples ~= self.global then
    fail("step: the batch has %d samples, batch.global is %d", n_samples, self.global)
  end
  local step = self.step_count + 1
  core.begin_step(step)
  nn.staged_updates = {}
  self.optimizer:zero_grad()
  local sums = { loss = 0.0, count = 0, samples = n_samples, added = {} }
  for index = 0, math.ceil(n_samples / self.micro) - 1 do
    local first = index * self.micro
    run_microbatch(self, batch, index, first, math.min(self.micro, n_samples - first), sums)
  end
  apply_staged()
  return self:update(batch, sums, step)
end

-- The second half of a step: scale, check, update.
function Trainer:update(batch, sums, step)
  local is_sum = type(self.loss) == "table" and self.loss.reduction == "sum"
  if sums.count == 0 and not is_sum then
    fail("step %d: no target counts (all %d are ignored): there is no mean loss", step,
      sums.slots)
  end
  if sums.expected and not is_sum and sums.expected ~= sums.count then
    fail("step %d: add_loss needs to know in advance how many targets count (%d expected, "
      .. "%d found): give the loss a function count(target)", step, sums.expected, sums.count)
  end
  local loss = is_sum and sums.loss or sums.loss / sums.count
  for _, value in pairs(sums.added) do loss = loss + value end
  local skip = self.nonfinite == "skip"
  if loss - loss ~= 0 and not skip then self:stop_nonfinite(batch, "the loss", loss) end
  local scale = is_sum and 1 or sums.slots / sums.count
  local norm, lr, finite = self.optimizer:step(scale, self.total, true)
  if not finite and not skip then self:stop_nonfinite(batch, "the gradient norm", norm) end
  self.step_count = step
  self.samples_seen = self.samples_seen + sums.samples
  core.end_step()
  local result = {
    step = step, loss = loss, grad_norm = norm, lr = lr, count = sums.count, tokens = sums.slots,
    losses = sums.added, skipped = not finite,
  }
  self.last = result
  return result
end

function Trainer:stop_nonfinite(batch, what, value)
  local words = explain_nonfinite(self, batch, what, value)
  core.end_step()
  error(setmetatable({ code = 3, words = words }, {
    __tostring = function(e) return e.words end,
  }), 0)
end

--- The mean loss over n batches of a loader (all it has, if n is absent), without gradients, in
--- eval mode.
function Trainer:evaluate(loader, n)
  if type(loader) ~= "table" or not loader.batch then
    fail("Trainer:evaluate: the data must have a method batch(step, n), got %s",
      expect.describe(loader))
  end
  expect("Trainer:evaluate", "n", n, "positive?")
  local was_training = self.model.training
  self.model:eval()
  local sum, count = 0.0, 0
  rille.no_grad(function()
    local batches = loader.n_batches and loader:n_batches(self.micro) or n
    if not batches then fail("evaluate needs n, the number of batches: this loader has no end") end
    batches = math.min(n or batches, batches)
    for k = 0, batches - 1 do
      local batch = loader:batch(k, self.micro)
      local samples = samples_of(batch)
      core.begin_microbatch(k, k * self.micro, samples)
      local x, y = rows_of(batch, 1, 0, samples), rows_of(batch, 2, 0, samples)
      local outputs = run_units(self, x)
      local s, c = run_loss(self, outputs, y, samples)
      sum, count = sum + s:item(), count + c
      core.release(s)
      drop_inputs(outputs, { n = 0 }, x)
      core.end_microbatch()
    end
  end)
  self.model:train(was_training)
  if count == 0 then fail("evaluate: no target counts") end
  return sum / count
end

-- ---- the loop

-- Metrics, checkpoint and requests to stop, after a step that the loop handed out.
local function after_step(self, metrics, started)
  local r = self.last
  self.last = nil
  if not r then return end -- the loop's body took no step
  local seconds = core.clock() - started.time
  local record = {
    step = r.step, loss = r.loss, grad_norm = r.grad_norm, lr = r.lr, tokens = r.tokens,
    seconds = seconds, data_seconds = started.data, memory = core.memory(),
    flops = core.flops(),
    extra = { losses = next(r.losses) and r.losses or nil, skipped = r.skipped or nil },
  }
  if self.fingerprint_every > 0 and r.step % self.fingerprint_every == 0 then
    record.extra.fingerprint = self:fingerprint()
  end
  metrics:step(record)
  checkpoint.after_step(self, metrics)
end

--- The 64-bit fingerprint of all parameters as 16 hexadecimal digits: equal for every layout.
function Trainer:fingerprint()
  local sum = 0
  for _, entry in ipairs(self.model:named_parameters()) do
    sum = sum + core.fingerprint(entry[2])
  end
  return ("%016x"):format(sum)
end

--- for step, batch in trainer:steps(loader, n) do trainer:step(batch) end: steps from the one after
--- the last
--- (1, or where a resumed run stood) to n. Logs, writes metrics and checkpoints, and stops on
--- SIGTERM or
--- SIGUSR1 with a checkpoint and exit code 75.
function Trainer:steps(loader, n)
  local has_batch = type(loader) == "table" and loader.batch
  if not has_batch then
    fail("Trainer:steps: the data must have a method batch(step, n), got %s",
      expect.describe(loader))
  end
  expect("Trainer:steps", "n", n, "count")
  core.catch_signals(true)
  self.total = self.total or n
  local metrics = require "rille.metrics" {
    dir = self.out, total = n, every = self.log, resumed = self.step_count,
  }
  self.metrics = metrics
  if self.step_count >= n and self.step_count > 0 then
    metrics:say(("%s is at step %d; nothing left to do of %d"):format(
      self.resumed and "the checkpoint" or "the training", self.step_count, n))
  end
  local started
  local closing = setmetatable({}, {
    __close = function(_, failure)
      if started and not failure then after_step(self, metrics, started) end
      metrics:close()
      core.catch_signals(false)
      self.metrics = nil
    end,
  })
  local function next_step()
    if started then after_step(self, metrics, started) end
    started = nil
    if self.step_count >= n then return nil end
    started = { time = core.clock() }
    core.flops(true)
    local batch = loader:batch(self.step_count, self.global)
    started.data = core.clock() - started.time
    return self.step_count + 1, batch
  end
  return next_step, nil, nil, closing
end

--- Writes a checkpoint now; the path of its file.
function Trainer:save(path) return checkpoint.save(self, path) end

--- Goes on from a checkpoint: a file, or a directory with checkpoint.json. The next step follows
--- the saved one.
function Trainer:resume(path) return checkpoint.resume(self, path) end

--- Prints a line without breaking the progress line.
function Trainer:say(...)
  local first = ...
  expect("Trainer:say", "text", first, "string|number")
  local good, text = true, tostring(first)
  if select("#", ...) > 1 then good, text = pcall(string.format, ...) end
  if not good then
    fail("Trainer:say: %s", (text:gsub("^bad argument #(%d+)[^(]*", "value %1 ")))
  end
  if self.metrics then self.metrics:say(text) else print(text) end
end

trainer.Trainer = Trainer.new

return trainer
