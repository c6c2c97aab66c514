-- trainer - steps over a loader's batches: one update each, with metrics, checkpoints, and stopping
-- on request. What a step computes is rille.pipeline's; how losses are scaled, rille.targets'.
local rille = require "rille"
local core = rille.core
local pipeline = require "rille.pipeline"
local added = require "rille.added"
local checkpoint = require "rille.checkpoint"
local expect = require "rille.expect"
local export = require "rille.export"
local fail = require "rille.fail"
local is_finite = require "rille.is_finite"
local nn = require "rille.nn"
local targets = require "rille.targets"
local trainer_options = require "rille.trainer_options"

---@class rille.Trainer
local Trainer = {}
Trainer.__index = Trainer

local trainer = { add_loss = added.add_loss }

--- A trainer. Options:
---   model       a module; its units() are run one by one, each with gradient buffers of its own
---   loss        nn.cross_entropy, or a function(output, target) -> sum, count, or -> mean
---   optimizer   see rille.optim.new
---   batch       {global = samples a step, micro = samples a microbatch}
---   parallel    how the model lies on the ranks: {dp =, tp =, sequence_parallel =, pp =,
---               stages_per_rank =, pipeline =, group =, split =}; default: all ranks are replicas
---   example     a batch {inputs, targets} that parallel.split = "time" measures units on
---   recompute   true: keep only the inputs of each unit and run it again in backward; "attention":
---               those of each nn.Attention
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
  local self = setmetatable({
    model = options.model, loss = options.loss, recompute = options.recompute or false,
    out = options.out, total = options.steps, nonfinite = options.nonfinite or "stop",
    step_count = 0, samples_seen = 0, log = options.log or 10, options = options,
    fingerprint_every = options.fingerprint or 0,
  }, Trainer)
  self.global, self.micro = trainer_options.batch(options.batch)
  if options.seed then rille.manual_seed(options.seed) end
  self.pipeline = pipeline.Pipeline({
    model = self.model, loss = self.loss, batch = options.batch, parallel = options.parallel,
    recompute = self.recompute, example = options.example,
  }, { optimizer = options.optimizer, nonfinite = self.nonfinite })
  self.layout = self.pipeline.layout
  self.optimizer = self.pipeline:optimizer(options.optimizer)
  self.has_buffers = #self.model:named_buffers() > 0
  checkpoint.configure(self, options.checkpoint)
  return self
end

-- ---- the step

--- What a step gives: r.loss, r.grad_norm, r.lr, r.tokens, r.count, r.losses (added ones by name),
--- r.skipped.
---@class rille.StepResult

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

-- together: all ranks are here, so that they can run the step's forward passes again.
local function explain_nonfinite(self, r, what, value, together)
  core.begin_step(r.step)
  nn.staged_updates = {} -- what this forward pass would change in buffers: thrown away
  local where = together and self.pipeline:first_nonfinite(r.batch, r.at)
  nn.staged_updates = nil
  local shown = value ~= value and "nan" or value > 0 and "inf" or "-inf"
  return ("step %d: %s is %s\n  %s\n"
    .. "  hint: a lower learning rate, more warm-up, or nonfinite = \"skip\""):format(
    r.step, what, shown, where and "the first output that is not finite is that of " .. where
    or together and "all outputs of the forward pass are finite: it arose in the loss or in "
      .. "backward"
    or "which module it came from is said where no rank reads a result before its next step")
end

--- One training step on a global batch: {inputs, targets}, each a tensor or an object with
--- rows(first, n) and n.
---@return rille.StepResult
function Trainer:step(batch)
  check_data("Trainer:step", batch)
  local n_samples = targets.samples(batch)
  if n_samples ~= self.global then
    fail("step: the batch has %d samples, batch.global is %d", n_samples, self.global)
  end
  local step = self.step_count + 1
  local _ <close> = self.pipeline:begin_step(step)
  self.optimizer:zero_grad()
  self.pipeline:forward_backward(batch, self.samples_seen)
  if self.pending and self.pending.complete then self.pending.complete(true) end
  self.pending = nil
  return self:update(batch, step)
end

-- What a step gives, where the other ranks have not told yet: reading a field waits for them.
local Pending = {}
local told = { loss = true, grad_norm = true, count = true, losses = true, stop = true,
  peak = true }
function Pending.__index(r, key)
  local complete = told[key] and rawget(r, "complete")
  if not complete then return nil end
  complete(false)
  return rawget(r, key)
end

-- Refuses sums from which no update follows, or which are not those of an update that was made with
-- `scale`.
local function check_sums(self, sums, step, scale)
  if targets.is_sum(self.loss) then return end
  if sums.count == 0 then
    fail("step %d: no target counts (all %d are ignored): there is no mean loss", step,
      sums.slots)
  end
  if sums.expected and sums.expected ~= sums.count then
    fail("step %d: add_loss needs to know in advance how many targets count (%d expected, "
      .. "%d found): give the loss a function count(target)", step, sums.expected, sums.count)
  end
  if scale and sums.slots / sums.count ~= scale then
    fail("step %d: the loss counted %d targets of %d; the weights have been updated by what its "
      .. "function count(target) said, %g", step, sums.count, sums.slots, sums.slots / scale)
  end
end

-- The learning rate of an update that is not made.
local function lr_of_next(self)
  return self.optimizer:lr(self.optimizer.steps_done + 1, self.total)
end

-- Puts what all ranks have told into r; returns it.
local function judge(self, r, sums, together, scale)
  check_sums(self, sums, r.step, scale)
  local outcome = self.pipeline:outcome(sums)
  r.loss, r.count, r.losses = outcome.loss, outcome.count, outcome.losses
  r.grad_norm, r.stop, r.peak = outcome.grad_norm, sums.stop, sums.peak
  if outcome.nonfinite and self.nonfinite == "stop" then
    self:stop_nonfinite(r, outcome.nonfinite, together)
  end
  r.skipped = outcome.nonfinite ~= nil
  return outcome
end

-- The update with everything known: scale, check, clip.
local function update_when_told(self, r, sums)
  local outcome = judge(self, r, sums, true)
  if r.skipped then
    self.pipeline.staged = nil
    r.lr = lr_of_next(self)
    return
  end
  r.lr = self.pipeline:accept(function()
    return self.optimizer:update(outcome.grad_norm, outcome.scale, self.total)
  end)
end

local function all_finite(norms)
  for _, norm in ipairs(norms) do
    if not is_finite(norm[2]) then return false end
  end
  return true
end

-- The update at once, by what this rank knows; the rest of r comes when the others have told. What
-- is not finite is not applied: from outputs that are not finite no gradient is finite, so all
-- ranks keep the weights that made them.
local function update_in_advance(self, r, norms, report, scale)
  r.lr = self.pipeline:alone(function()
    if self.pipeline.staged and #self.pipeline.staged > 0 then
      fail("a module has declared a buffer after the trainer was made\n  hint: declare it in init")
    end
    return all_finite(norms) and self.optimizer:apply(scale, self.total) or lr_of_next(self)
  end)
  r.skipped = false -- what is not finite raises here, once it is known
  r.complete = function(together)
    r.complete = nil
    judge(self, r, report.wait(together), together, scale)
    r.batch = nil
  end
  setmetatable(r, Pending)
  self.pending = r
end

-- The second half of a step. Without clipping nothing in the update needs another rank's word, so
-- none is waited for: a rank goes on to its next step while others still run backward. But buffers
-- are changed only once all ranks know that the step counts.
function Trainer:update(batch, step)
  local norms = self.optimizer:norms()
  local r = { step = step, tokens = self.pipeline.now.slots, batch = batch, at = self.samples_seen }
  local report = self.pipeline:report(norms)
  local alone = self.layout.mesh:all():size() == 1 or self.pipeline.recorder
  local scale = not alone and not self.optimizer.clip and self.nonfinite == "stop"
    and self.step_count > 0 and not self.has_buffers and self.pipeline:scale_in_advance()
  if scale then
    update_in_advance(self, r, norms, report, scale)
  else
    local sums = report.wait(true)
    r.tokens = sums.slots
    update_when_told(self, r, sums)
    r.batch = nil
  end
  self.step_count = step
  self.samples_seen = self.samples_seen + targets.samples(batch)
  core.end_step()
  self.last = { r = r, time = core.clock(), flops = core.flops() }
  local recorder = self.pipeline.recorder
  if recorder then
    recorder:told(step, r.loss, r.grad_norm)
    recorder:updated(step)
  end
  return r
end

-- which: the field of r that is not finite.
function Trainer:stop_nonfinite(r, which, together)
  local what = which == "loss" and "the loss" or "the gradient norm"
  local words = explain_nonfinite(self, r, what, r[which], together)
  core.end_step()
  error(setmetatable({ code = 3, words = words }, {
    __tostring = function(e) return e.words end,
  }), 0)
end

-- Until what it gives is closed.
local function in_eval_mode(model)
  local was_training = model.training
  model:eval()
  return setmetatable({}, { __close = function() model:train(was_training) end })
end

--- The mean loss over n batches of a loader (all it has, if n is absent), without gradients, in
--- eval mode.
function Trainer:evaluate(loader, n)
  if type(loader) ~= "table" or not loader.batch then
    fail("Trainer:evaluate: the data must have a method batch(step, n), got %s",
      expect.describe(loader))
  end
  expect("Trainer:evaluate", "n", n, "positive?")
  local batches = loader.n_batches and loader:n_batches(self.micro) or n
  if not batches then fail("evaluate needs n, the number of batches: this loader has no end") end
  local _ <close> = in_eval_mode(self.model)
  local sum, count = self.pipeline:evaluate(loader, math.min(n or batches, batches), self.micro)
  if count == 0 then fail("evaluate: no target counts") end
  return sum / count
end

-- ---- the loop

local SILENT_STEPS <const> = 500 -- after a warning of the same kind

-- The bubble of the step for metrics; says so when a rank becomes one that stays slow.
local function bubble_of(self, is_latest)
  local bubble = self.pipeline:bubble(is_latest)
  if not bubble then return nil end
  bubble.words = nil
  local slow = bubble.slow_rank
  if slow and self.step_count >= (self.warned and self.warned[slow] or 0) then
    self.warned = self.warned or {}
    self.warned[slow] = self.step_count + SILENT_STEPS
    self:say("rank %d of the pipeline stays slow: others have waited for it in each of the last "
      .. "steps", slow)
  end
  return bubble
end

-- What communication has cost since the last step that metrics told of; nil in one process.
local function communication_since(self)
  local before, now = self.communicated or {}, self.pipeline:communication()
  local since = {}
  for axis, sums in pairs(now) do
    since[axis] = {}
    for name, value in pairs(sums) do
      since[axis][name] = value - (before[axis] and before[axis][name] or 0)
    end
  end
  self.communicated = now
  return next(since) and since
end

-- Metrics for a step that was run: {r =, seconds =, data =}. Returns the name of a signal that some
-- rank has got by then.
local function after_step(self, metrics, run)
  local r, is_latest = run.r, run.r.step == self.step_count
  if r.complete then r.complete(true) end
  local record = {
    step = r.step, loss = r.loss, grad_norm = r.grad_norm, lr = r.lr, tokens = r.tokens,
    seconds = run.seconds, data_seconds = run.data, memory = core.memory(), peak = r.peak,
    flops = run.flops, bubble = bubble_of(self, is_latest),
    extra = { losses = next(r.losses) and r.losses or nil, skipped = r.skipped or nil,
      communication = communication_since(self) or nil },
  }
  if is_latest and self.fingerprint_every > 0 and r.step % self.fingerprint_every == 0 then
    record.extra.fingerprint = self.pipeline:common_fingerprint()
  end
  metrics:step(record)
  local alone = self.layout.mesh:all():size() == 1
  return r.stop or alone and core.stop_requested() or nil
end

-- Whether all ranks must stand still after this step.
local function is_due(self, step)
  local function divides(every) return every > 0 and step % every == 0 end
  return divides(self.checkpoint_every) or divides(self.fingerprint_every)
end

--- The 64-bit fingerprint of all parameters as 16 hexadecimal digits: equal for every layout.
function Trainer:fingerprint() return self.pipeline:fingerprint() end

--- The model's output for an input that every rank gives, in eval mode, without gradients: under
--- every layout, on every rank.
function Trainer:predict(x)
  local _ <close> = in_eval_mode(self.model)
  return self.pipeline:predict(x)
end

--- The same, so that a trainer can be called as its model is.
Trainer.__call = Trainer.predict

--- for step, batch in trainer:steps(loader, n) do trainer:step(batch) end: steps from the one after
--- the last (1, or where a resumed run stood) to n. Logs, writes metrics and checkpoints, and stops
--- on SIGTERM or SIGUSR1 with a checkpoint and exit code 75.
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
    layout = self.layout:summary(),
  }
  self.metrics = metrics
  local mesh = self.layout.mesh
  if mesh:all():size() > 1 then
    local warnings = mesh:warnings()
    if self.log > 0 then metrics:say(self.layout:describe()) end
    if warnings ~= "" then metrics:say((warnings:gsub("\n$", ""))) end
  end
  if self.step_count >= n and self.step_count > 0 then
    metrics:say(("%s is at step %d; nothing left to do of %d"):format(
      self.resumed and "the checkpoint" or "the training", self.step_count, n))
  end
  local is_stopping = false
  local started, runs = nil, {} -- runs: steps that nobody has been told of
  -- What the other ranks say of a step may come while the next one runs: it is told of then.
  local function tell(all)
    if started and self.last then
      local last = self.last
      started.r, started.seconds, started.flops = last.r, last.time - started.time, last.flops
      self.last = nil
      table.insert(runs, started)
    end
    started = nil
    local newest = runs[#runs] and runs[#runs].r
    local keep = newest and not all and newest.complete and not is_due(self, newest.step) and 1 or 0
    local signal
    while #runs > keep do
      signal = after_step(self, metrics, table.remove(runs, 1)) or signal
      if signal then keep = 0 end -- the end: all steps are told of first
    end
    is_stopping = is_stopping or signal ~= nil
    if signal then checkpoint.stop(self, metrics, signal) end
    if newest and #runs == 0 then checkpoint.when_due(self) end
  end
  local closing = setmetatable({}, {
    __close = function(_, failure)
      if not failure then tell(true) end
      metrics:close()
      core.catch_signals(false, is_stopping)
      self.metrics = nil
    end,
  })
  local function next_step()
    tell(self.step_count >= n)
    if self.step_count >= n then return nil end
    started = { time = core.clock() }
    core.flops(true)
    local batch = loader:batch(self.step_count, self.global)
    started.data = core.clock() - started.time
    return self.step_count + 1, batch
  end
  return next_step, nil, nil, closing
end

-- A usage error on rank 0 where no file can be made at `path`.
local function check_path(self, what, path)
  if self.layout.mesh:all():rank() > 0 then return end
  local out = self.out and self.out:gsub("/*$", "/")
  if out and path:sub(1, #out) == out then core.make_directory(self.out) end
  local there, folder = core.stat(path), path:match("^(.*/)[^/]*$") or "./"
  local probe = ("%s.%s-%x"):format(folder, what, core.clock() * 1e9 // 1 | 0)
  local file, why = io.open(probe, "w")
  if file then file:close() os.remove(probe) end
  if there and there.is_directory then file, why = nil, "it is a directory" end
  if not file then
    fail.usage("the %s cannot be written to %s: %s", what, path, (why:gsub("^.*: ", "")))
  end
end

--- Says before a training whether timeline(path) will have something to write, and can: false
--- without a pipeline; a usage error where no file can be made at `path`.
---@return boolean
function Trainer:check_timeline(path)
  expect("Trainer:check_timeline", "path", path, "path")
  check_path(self, "timeline", path)
  return self.layout.pp > 1
end

--- Says before a training whether export(path) can write: a usage error where no file can be made.
function Trainer:check_export(path)
  expect("Trainer:check_export", "path", path, "path")
  check_path(self, "export", path)
end

--- Writes an SVG of the latest step: what its pipeline schedule promises above what was measured.
--- Every rank may call it; the first one writes, and gets the same as text, with the bubble's
--- causes (nil elsewhere, and without a pipeline).
---@return string? words
function Trainer:timeline(path)
  expect("Trainer:timeline", "path", path, "path")
  if self.layout.mesh:all():rank() > 0 then return nil end
  local svg, figures = self.pipeline:timeline()
  if not svg then return nil end
  core.write_atomic(path, svg)
  local bubble = self.pipeline:bubble(true)
  return ("%sstep %.0f ms, bubble %.0f ms; predicted from its mean times %.0f ms, bubble %.0f ms"
    .. " (%s)\n%s"):format(figures.text, figures.measured * 1e3, figures.measured_bubble * 1e3,
    figures.predicted * 1e3, figures.predicted_bubble * 1e3, path, bubble.words)
end

--- Writes a checkpoint now; the path of its file.
function Trainer:save(path) return checkpoint.save(self, path) end

--- Goes on from a checkpoint: a file, or a directory with checkpoint.json. The next step follows
--- the saved one.
function Trainer:resume(path) return checkpoint.resume(self, path) end

--- Writes the whole model, parameters and buffers, to one safetensors file, which
--- model:load_state_dict reads in one process, and others' programs too. Every rank calls it; none
--- has more than one parameter beside its own at a time.
function Trainer:export(path) return export.write(self, path) end

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
