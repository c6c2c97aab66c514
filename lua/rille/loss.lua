-- loss - losses under the trainer's contract: a loss gives (sum, count), so that any cut of a batch
-- into microbatches or ranks gives the gradient of the one mean.
--
-- A loss is called as loss(output, target) -> sum, count. It may have
--   slots(target)   how many entries the target has: the divisor of backward, the same for every
--                   layout
--   count(target)   how many of them count, in advance (ignored ones do not)
--   reduction       "sum": not divided at all
--   cut(output, target, tp)  the same of an output whose last dimension ranks of a tp group share
local rille = require "rille"
local core = rille.core
local nn = require "rille.nn"
local expect = require "rille.expect"
local fail = require "rille.fail"
local known = require "rille.known"

local Loss = {}
Loss.__index = Loss

function Loss:__call(...)
  local output, target = ...
  if rille.is_tensor(output) then
    expect("nn." .. self.name, "the target", target, "tensor")
    return self.run(self.options, output, target)
  end
  return self.make(...) -- nn.cross_entropy{label_smoothing = 0.1}
end

local function define(name, defaults, run, count, cut)
  local names = {}
  for key in pairs(defaults) do table.insert(names, key) end
  table.sort(names)
  local function make(given)
    local options = {}
    for key, value in pairs(defaults) do options[key] = value end
    if given then known("nn." .. name, given, names) end
    for key, value in pairs(given or {}) do
      local kind = key == "ignore_index" and "integer" or type(defaults[key])
      expect.option("nn." .. name, key, value, kind)
      options[key] = value
    end
    if options.reduction ~= "mean" and options.reduction ~= "sum" then
      fail.usage("nn.%s: reduction is %q, valid are mean and sum", name,
        tostring(options.reduction))
    end
    local loss = setmetatable({ name = name, options = options, run = run, make = nil }, Loss)
    loss.make = make
    loss.reduction = options.reduction
    loss.slots = function(target) return target:numel() end
    loss.count = function(target) return count(options, target) end
    loss.cut = cut and function(...) return cut(options, ...) end
    return loss
  end
  nn[name] = make()
end

local function not_ignored(options, target)
  return rille.no_grad(function() return (target:ne(options.ignore_index)):sum():item() end)
end

-- Refuses targets that are no class: no rank would find them.
local function check_targets(o, target, classes)
  if target:dtype() ~= "i64" then
    fail("cross_entropy: targets must be i64, they are %s\n    hint: convert with "
      .. "targets:to(\"i64\")", target:dtype())
  end
  local is_wrong = target:lt(0):logical_or(target:ge(classes))
    :logical_and(target:ne(o.ignore_index))
  if not is_wrong:any():item() then return end
  local at = is_wrong:view(-1):to("i64"):argmax():item()
  fail("cross_entropy: targets holds %d at position %d, valid are 0 to %d",
    target:contiguous():view(-1)[at]:item(), at, classes - 1)
end

-- Logits that ranks of a tp group have cut along the last dimension: this one has tp.head[2]
-- classes from tp.head[1] on, then padding. Every rank gets the same sum.
local function cross_entropy_cut(o, logits, target, tp)
  rille.no_grad(check_targets, o, target, tp.features)
  local at, n = tp.head[1], tp.head[2]
  if logits:dtype() == "bf16" then logits = logits:to("f32") end
  local own, rows = logits, logits:size(-1)
  if n < rows then own = logits:masked_fill(rille.arange(rows):ge(n), -1e30) end
  local lse = core.gather_from(own:logsumexp { -1, keepdim = true }, { group = tp.group, dim = -1 })
    :logsumexp { -1 }
  local index = target - at
  local is_own = index:ge(0):logical_and(index:lt(n))
  local picked = logits:gather(rille.where(is_own, index, 0):unsqueeze(-1), -1):squeeze(-1)
  local right = core.reduce_from(rille.where(is_own, picked, 0), { group = tp.group })
  local each = lse - right * (1 - o.label_smoothing)
  if o.label_smoothing > 0 then
    local sums = logits:slice(-1, 0, n):sum { -1 }
    each = each - core.reduce_from(sums, { group = tp.group }) * (o.label_smoothing / tp.features)
  end
  if o.z_loss > 0 then each = each + lse:square() * o.z_loss end
  return rille.where(target:ne(o.ignore_index), each, 0):sum(), not_ignored(o, target)
end

--- logits[..., V], target[...] i64 -> sum over rows of -log softmax(logits)[target], number of rows
--- that count.
define("cross_entropy",
  { ignore_index = -100, label_smoothing = 0, z_loss = 0, reduction = "mean" },
  function(o, logits, target)
    local each = rille.cross_entropy_each(logits, target, {
      ignore_index = o.ignore_index, label_smoothing = o.label_smoothing, z_loss = o.z_loss,
    })
    return each:sum(), not_ignored(o, target)
  end, not_ignored, cross_entropy_cut)

--- (x - target)^2 summed over elements, their number.
define("mse", { reduction = "mean" },
  function(_, x, target) return (x - target):square():sum(), x:numel() end,
  function(_, target) return target:numel() end)

--- The mean loss as one tensor, for loops of one's own.
local losses = {}

function losses.cross_entropy(logits, target, options)
  expect("rille.cross_entropy", "logits", logits, "tensor")
  expect("rille.cross_entropy", "target", target, "tensor")
  local loss = options and nn.cross_entropy(options) or nn.cross_entropy
  local sum, count = loss(logits, target)
  if loss.reduction == "sum" then return sum end
  return sum / math.max(count, 1)
end

function losses.mse(x, target)
  expect("rille.mse", "x", x, "tensor")
  expect("rille.mse", "target", target, "tensor")
  local sum, count = nn.mse(x, target)
  return sum / math.max(count, 1)
end

return losses
