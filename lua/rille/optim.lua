-- optim - optimizers over flat weight sets, learning-rate schedules, the one global gradient norm.
--
-- Parameters are sorted into groups (by default: matrices decay, vectors do not); those of one
-- group and dtype become one flat set that is updated in one pass.
local rille = require "rille"
local core = rille.core
local expect = require "rille.expect"
local fail = require "rille.fail"
local is_finite = require "rille.is_finite"
local known = require "rille.known"
local strict = require "rille.strict"

local optim = strict("rille.optim", {})

-- ---- learning rates: factors of the base rate as functions of the step (from 1) and the total

-- Reaches 1 at step `warmup`.
local function warming(step, warmup) return warmup > 0 and math.min(step / warmup, 1) or 1 end

-- How far from the end of warm-up to the end of training, 0 .. 1.
local function progress(step, o)
  local span = math.max(o.total - o.warmup, 1)
  return math.min(math.max(step - o.warmup, 0) / span, 1)
end

local schedules = {
  constant = function(step, o) return warming(step, o.warmup) end,
  -- down in a straight line to `min`
  linear = function(step, o)
    return warming(step, o.warmup) * (1 - (1 - o.min) * progress(step, o))
  end,
  -- half a cosine down to `min` (arXiv:1608.03983 without restarts)
  cosine = function(step, o)
    local fall = 0.5 * (1 + math.cos(math.pi * progress(step, o)))
    return warming(step, o.warmup) * (o.min + (1 - o.min) * fall)
  end,
  -- warm-up, stable, decay: in a straight line over the last `decay` of all steps
  -- (arXiv:2404.06395, section 4)
  wsd = function(step, o)
    local start = o.total * (1 - o.decay)
    local fall = math.min(math.max((step - start) / math.max(o.total - start, 1), 0), 1)
    return warming(step, o.warmup) * (1 - (1 - o.min) * fall)
  end,
}

local function names_of(t)
  local names = {}
  for name in pairs(t) do table.insert(names, name) end
  table.sort(names)
  return names
end

--- A schedule: "cosine", or {"cosine", warmup = 100, total = 1000, min = 0.1}, or a function(step)
--- -> factor.
--- total defaults to the trainer's number of steps.
function optim.schedule(spec)
  if type(spec) == "function" then return spec end
  if type(spec) == "string" then spec = { spec } end
  expect.option("optimizer", "schedule", spec, "string|table|function")
  local name = spec[1] or "constant"
  local shape = schedules[name]
  if not shape then
    fail.usage("there is no learning-rate schedule %q: %s%s", tostring(name),
      table.concat(names_of(schedules), ", "),
      rille.did_you_mean(tostring(name), names_of(schedules)))
  end
  local o = { warmup = 0, total = 0, min = 0, decay = 0.2 }
  known("schedule " .. name, spec, names_of(o))
  for key in pairs(o) do
    expect.option("schedule " .. name, key, spec[key], "number?")
    if spec[key] ~= nil then o[key] = spec[key] end
  end
  local needs_total = name ~= "constant"
  return function(step, total)
    local all = { warmup = o.warmup, min = o.min, decay = o.decay,
      total = o.total > 0 and o.total or total or 0 }
    if needs_total and all.total <= 0 then
      fail.usage("schedule %s needs total = the number of steps", name)
    end
    return shape(step, all)
  end
end

-- ---- groups

-- The group of a parameter: the first whose `match` (a Lua pattern) or `of` (a function) fits.
local function default_groups(o)
  return {
    { of = function(_, p) return p:ndim() >= 2 end, weight_decay = o.weight_decay },
    { of = function() return true end, weight_decay = 0 },
  }
end

local function group_of(groups, name, p)
  for i, group in ipairs(groups) do
    if (group.match and name:find(group.match)) or (group.of and group.of(name, p)) or
      not (group.match or group.of) then
      return i
    end
  end
  fail.usage("parameter %s is in no group: end the list with a group without match", name)
end

-- ---- optimizers

local Optimizer = {}
Optimizer.__index = Optimizer

local kinds = {
  adamw = {
    defaults = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0.01 },
    state = { "m", "v" },
    step = function(set, o, g, lr, scale, step)
      set:adamw {
        lr = lr, beta1 = o.betas[1], beta2 = o.betas[2], eps = o.eps, decay = g.weight_decay or 0,
        grad_scale = scale, step = step,
      }
    end,
  },
  sgd = {
    defaults = { lr = 1e-2, momentum = 0, dampening = 0, nesterov = false, weight_decay = 0 },
    state = { "momentum" },
    step = function(set, o, g, lr, scale, step)
      set:sgd {
        lr = lr, momentum = o.momentum, dampening = o.dampening, nesterov = o.nesterov,
        decay = g.weight_decay or 0, grad_scale = scale, is_first = step == 1,
      }
    end,
  },
}

-- Values with which no training makes sense, by name.
local function check_numbers(name, o, clip)
  local function check(key, value, lowest, below)
    local is_number = type(value) == "number" and value == value
    if not is_number or value < lowest or (below and value >= below) then
      fail.usage("%s: %s must be a number from %g on%s, got %s", name, key, lowest,
        below and (" and below %g"):format(below) or "", expect.describe(value))
    end
  end
  check("lr", o.lr, 0)
  check("weight_decay", o.weight_decay, 0)
  if o.eps then check("eps", o.eps, 0) end
  if o.momentum then check("momentum", o.momentum, 0, 1) end
  if o.betas then
    if type(o.betas) ~= "table" then
      fail.usage("%s: betas must be two numbers, {0.9, 0.999}, got %s", name,
        expect.describe(o.betas))
    end
    check("betas[1]", o.betas[1], 0, 1)
    check("betas[2]", o.betas[2], 0, 1)
  end
  if clip ~= nil then check("clip", clip, 0) end
  expect.option(name, "dampening", o.dampening, "number?")
  expect.option(name, "nesterov", o.nesterov, "boolean?")
end

local group_options = { "match", "of", "lr", "weight_decay" }

local function check_groups(name, groups)
  expect.option(name, "groups", groups, "list?")
  for i, group in ipairs(groups or {}) do
    local where = ("%s: group %d"):format(name, i)
    known(where, group, group_options)
    expect.option(where, "match", group.match, "string?")
    expect.option(where, "of", group.of, "function?")
    expect.option(where, "lr", group.lr, "number?")
    expect.option(where, "weight_decay", group.weight_decay, "number?")
  end
end

--- An optimizer over {name, tensor} pairs (model:named_parameters()) by a spec such as
--- {"adamw", lr = 3e-4, betas = {0.9, 0.95}, weight_decay = 0.1, clip = 1.0,
---  schedule = {"cosine", warmup = 100},
---  groups = {{match = "wte", lr = 0.1, weight_decay = 0}, {weight_decay = 0.1}}}. A group's lr is
--- a factor.
--- An entry of `named` may say more, where a model lies on several ranks: place (parameters of
--- one place share a flat set), unit (the first that uses it), order (in the model), is_counted
--- (false: another rank counts it in the norm), cut (which part of it this rank has). replicas:
--- sets are padded so that they divide.
---@param named table[]
---@param spec table|string
---@param replicas integer?
function optim.new(named, spec, replicas)
  if type(spec) == "string" then spec = { spec } end
  if type(named) ~= "table" or (#named == 0 and not replicas) then -- a rank may hold none
    fail("optim.new: a list of {name, parameter} such as model:named_parameters() is wanted, "
      .. "got %s", type(named) == "table" and "no entries" or expect.describe(named))
  end
  expect.option("optim.new", "the optimizer", spec, "string|table")
  local kind = kinds[spec[1]]
  if not kind then
    fail.usage("there is no optimizer %q: %s%s", tostring(spec[1]),
      table.concat(names_of(kinds), ", "),
      rille.did_you_mean(tostring(spec[1]), names_of(kinds)))
  end
  local names = names_of(kind.defaults)
  table.move({ "clip", "clip_norm", "groups", "schedule" }, 1, 4, #names + 1, names)
  known(spec[1], spec, names)
  local o = {}
  for key, value in pairs(kind.defaults) do
    if spec[key] ~= nil then o[key] = spec[key] else o[key] = value end
  end
  check_numbers(spec[1], o, spec.clip)
  check_groups(spec[1], spec.groups)
  local clip_norm = spec.clip_norm or 2
  if clip_norm ~= 2 and clip_norm ~= "inf" and clip_norm ~= math.huge then
    fail.usage("%s: clip_norm must be 2 or \"inf\", got %s", spec[1], expect.describe(clip_norm))
  end
  local self = setmetatable({
    name = spec[1], kind = kind, options = o, clip = spec.clip,
    clip_norm = clip_norm, steps_done = 0, named = named,
    schedule = optim.schedule(spec.schedule or "constant"),
    groups = spec.groups or default_groups(o),
    replicas = replicas or 1,
  }, Optimizer)
  self:gather()
  return self
end

-- Sorts parameters into sets: one for each (group, dtype), in order of first appearance.
function Optimizer:gather()
  self.sets, self.places = {}, {}
  local by_key = {}
  for _, entry in ipairs(self.named) do
    local name, p = entry[1], entry[2]
    local g = group_of(self.groups, name, p)
    local key = g .. " " .. p:dtype() .. " " .. (entry.place or "")
    if not by_key[key] then
      by_key[key] = { group = self.groups[g], params = {}, names = {}, units = {}, cuts = {},
        place = entry.place }
      table.insert(self.sets, by_key[key])
    end
    local part = by_key[key]
    table.insert(part.params, p)
    table.insert(part.names, name)
    table.insert(part.units, entry.unit or 0)
    part.cuts[#part.params] = entry.cut
    table.insert(self.places, { name = name, part = part, index = #part.params, entry = entry })
  end
  for i, part in ipairs(self.sets) do
    part.set = core.weightset(part.params, i - 1, 0, self.replicas)
  end
end

--- Forgets all gradients.
function Optimizer:zero_grad()
  for _, part in ipairs(self.sets) do part.set:zero_grads() end
end

local function is_largest(clip_norm) return clip_norm == math.huge or clip_norm == "inf" end

--- What this rank's parameters contribute to the norm: a list of {order, value}: sums of squares in
--- f64, or largest magnitudes where the norm is the infinity norm.
function Optimizer:norms()
  local infinity, norms = is_largest(self.clip_norm), {}
  for _, part in ipairs(self.sets) do part.norms = part.set:grad_norms(infinity) end
  for _, place in ipairs(self.places) do
    if place.entry.is_counted ~= false then -- elsewhere, if several ranks have it
      table.insert(norms, { place.entry.order or #norms, place.part.norms[place.index] })
    end
  end
  return norms
end

--- The global norm from all parameters' contributions, summed in the model's order.
function Optimizer:norm_of(norms)
  local infinity, total = is_largest(self.clip_norm), 0.0
  for _, norm in ipairs(norms) do
    local value = norm[2]
    if not infinity then
      total = total + value
    elseif value > total or value ~= value then
      total = value
    end
  end
  return infinity and total or math.sqrt(total)
end

--- The global norm of all gradients of one process.
function Optimizer:grad_norm() return self:norm_of(self:norms()) end

--- The learning rate of a step (from 1).
function Optimizer:lr(step, total)
  expect("lr", "step", step, "number")
  expect("lr", "total", total, "number?")
  return self.options.lr * self.schedule(step, total)
end

-- What is kept of every parameter.
local function kept_names(self)
  return (self.name ~= "sgd" or self.options.momentum > 0) and self.kind.state or {}
end

--- One update, the gradients multiplied by `scale`; returns the learning rate. A schedule that
--- fails, or memory that is lacking for what the optimizer keeps, changes no weight.
function Optimizer:apply(scale, total)
  local step = self.steps_done + 1
  local lr = self:lr(step, total)
  for _, part in ipairs(self.sets) do part.set:prepare(#kept_names(self)) end
  for _, part in ipairs(self.sets) do
    self.kind.step(part.set, self.options, part.group, lr * (part.group.lr or 1), scale, step)
  end
  self.steps_done = step
  return lr
end

--- One update by gradients whose norm, multiplied by `scale`, is `norm`: they are clipped, if that
--- was asked for; returns the learning rate.
function Optimizer:update(norm, scale, total)
  if self.clip and norm > self.clip then scale = scale * (self.clip / norm) end
  return self:apply(scale, total)
end

--- One update. scale multiplies the gradients (default 1); returns the norm of the scaled gradients
--- before clipping, and the learning rate. With skip_nonfinite, a norm that is not finite changes
--- nothing. norms: the whole model's, where other ranks have a part of it.
function Optimizer:step(scale, total, skip_nonfinite, norms)
  expect("step", "scale", scale, "number?")
  expect("step", "total", total, "number?")
  scale = scale or 1
  local norm = self:norm_of(norms or self:norms()) * scale
  local finite = is_finite(norm)
  if not finite and skip_nonfinite then return norm, self:lr(self.steps_done + 1, total), false end
  return norm, self:update(norm, scale, total), finite
end

local MASTER = 2 -- the state index of the f32 copy of bf16 weights

--- The names of what is kept of a parameter: {"m", "v"}; for bf16 weights also their f32 copy, once
--- there is one (from the first step on).
function Optimizer:state_names(p)
  local names = table.move(kept_names(self), 1, #kept_names(self), 1, {})
  if p:dtype() == "bf16" and self.steps_done > 0 then table.insert(names, "master") end
  return names
end

--- State by name, for checkpoints: a list of {"m.h.0.mlp.up.weight", tensor, of = "h.0..."}.
function Optimizer:state()
  local list = {}
  for _, place in ipairs(self.places) do
    local set, p = place.part.set, place.part.params[place.index]
    for i, what in ipairs(self:state_names(p)) do
      local index = what == "master" and MASTER or i - 1
      set:state(index) -- made, if it is not there yet
      table.insert(list, { what .. "." .. place.name, set:state_of(p, index), of = place.name })
    end
  end
  return list
end

return optim
