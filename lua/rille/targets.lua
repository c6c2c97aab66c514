-- targets - batches as the trainer reads them, and the loss contract.
--
-- A loss gives (sum, count). Backward is seeded with 1/C, where C is the number of target slots of
-- the step, the same for every layout; gradients are multiplied by C/N once, N the number of
-- targets that counted. A plain scalar loss counts as (mean x samples, samples).
local rille = require "rille"
local core = rille.core
local fail = require "rille.fail"

local targets = {}

-- ---- batches

--- Samples first .. first + n - 1 of part k of a batch; nil if it has no such part.
function targets.rows(batch, k, first, n)
  local part = batch[k]
  if part == nil then return nil end
  if rille.is_tensor(part) then return part:slice(0, first, first + n) end
  return part:rows(first, n)
end

--- How many samples a batch has.
function targets.samples(batch)
  local part = batch[1]
  if rille.is_tensor(part) then return part:size(0) end
  return part.n
end

-- ---- the loss contract

--- The loss of outputs: sum (a tensor), count, and whether the loss gave a mean over samples.
function targets.loss(loss, outputs, y, n_samples)
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

--- Whether a loss is not divided at all.
function targets.is_sum(loss)
  return type(loss) == "table" and loss.reduction == "sum"
end

--- How many target slots the whole step has: C.
function targets.slots(loss, y, n_samples, is_mean)
  if targets.is_sum(loss) then return 1 end
  if is_mean or y == nil then return n_samples end
  return math.max(y:numel(), 1)
end

--- How many targets of the whole step count, of a pipeline's pass. What is no tensor may give other
--- rows to another cut.
function targets.count(self)
  local now, total = self.now, 0
  if rille.is_tensor(now.batch[2]) then return self.loss.count(now.batch[2]) end
  for _, piece in ipairs(self.layout:microbatches(now.samples)) do
    total = total + self.loss.count(targets.rows(now.batch, 2, piece[1], piece[2]))
  end
  return total
end

--- N, before all of it has been seen: an added loss is seeded so that the final factor C/N cancels.
function targets.count_in_advance(self)
  local now, loss = self.now, self.loss
  if now.expected then return now.expected end
  local has_count = type(loss) == "table" and loss.count and not targets.is_sum(loss)
  now.expected = has_count and targets.count(self) or now.slots
  return now.expected
end

--- The step's loss from all ranks' sums (rille.report), and what gradients are to be multiplied by.
---@return number loss, number scale
function targets.finish(loss, sums)
  local is_sum = targets.is_sum(loss)
  local value = is_sum and sums.loss or sums.loss / sums.count
  for _, added in pairs(sums.added) do value = value + added end
  return value, is_sum and 1 or sums.slots / sums.count
end

return targets
