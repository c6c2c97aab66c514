-- added - losses that layers add to the main one, and how they get out of a recomputed region.
--
-- A region that is recomputed in backward has no graph in forward: what is added in it leaves it as
-- a further result, so that its gradient goes the way of the others.
local rille = require "rille"
local core = rille.core
local nn = require "rille.nn"
local expect = require "rille.expect"
local tensor_parallel = require "rille.tensor_parallel"

local added = {}

--- Adds weight x value to the loss of the running microbatch, from within any layer; value is a
--- mean over the microbatch's samples. Its running value shows in the metrics under `name`.
function added.add_loss(name, value, weight)
  expect("rille.add_loss", "name", name, "string")
  expect("rille.add_loss", "value", value, "tensor")
  expect("rille.add_loss", "weight", weight, "number?")
  local list = nn.added_losses
  if not list then return end
  if not list.is_region then value = value:keep() end
  local tp = tensor_parallel.running
  table.insert(list, { name = name, value = value, weight = weight or 1,
    unit = core.place().unit, is_part = tp ~= nil and tp.sequence })
end

-- fn with what it adds behind its results. The losses of the first call go to `losses`; the second
-- one makes the same again.
local function with_added(fn, losses)
  return function(...)
    local outer <const> = nn.added_losses
    local _ <close> = setmetatable({}, { __close = function() nn.added_losses = outer end })
    nn.added_losses = { is_region = true }
    local results = table.pack(fn(...))
    local n = results.n
    for i, loss in ipairs(nn.added_losses) do
      if outer then losses[i] = loss end
      results[n + i] = loss.value
    end
    return table.unpack(results, 1, n + #nn.added_losses)
  end
end

local plain_checkpoint <const> = rille.checkpoint

--- rille.checkpoint(fn, ...), which may add losses.
function added.checkpoint(fn, ...)
  local list, tp = nn.added_losses, tensor_parallel.running
  if tp then fn = tp:as_now(fn) end
  if not list then return plain_checkpoint(fn, ...) end
  local losses = {}
  local results = table.pack(plain_checkpoint(with_added(fn, losses), ...))
  local n = results.n - #losses
  for i, loss in ipairs(losses) do
    loss.value = list.is_region and results[n + i] or results[n + i]:keep()
    table.insert(list, loss)
  end
  return table.unpack(results, 1, n)
end

rille.checkpoint = added.checkpoint

return added
