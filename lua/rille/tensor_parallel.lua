-- tensor_parallel - how the layers of a model are cut over the ranks of a tp group, and what a cut
-- layer computes.
--
--     x --copy_to--> column: rows of the weight --> row: columns of the weight --reduce_from--> y
--
-- A layer's form says how its weight is cut: "column" and "row" as drawn (the names are those of
-- the product x W, arXiv:1909.08053); "heads" is a column form by q, k and v heads; "vocab" one
-- whose last parts are padded; "replicate": not at all. With sequence parallelism what lies between
-- such pairs is cut along dimension 1, time (arXiv:2205.05198): copy_to becomes all_gather,
-- reduce_from reduce_scatter.
--
-- Invariants:
--  1. All ranks of the group run the same layers in the same order on the same samples.
--  2. A parameter is cut; or it is whole and has the same gradient on all ranks; or it is whole and
--     each rank has a part of its gradient (plan.partial), which is summed before replicas'.
local rille = require "rille"
local core = rille.core
local fail = require "rille.fail"

local tensor_parallel = {}

-- ---- the plan: which part of which parameter a rank holds

---@class rille.TpPlan
---@field cuts table<string, table> by parameter: {dim =, full =, size = local length, form =,
---  runs = function(rank) -> {{at, n, is_counted}, ...}, sharers = how many ranks hold the same
---  runs from `shared` (an index of the local dimension) on}
---@field partial table<string, boolean> whole parameters of which each rank has a part of the
---  gradient, whatever lies between layers
---@field apart table<rille.Module, boolean> modules in which activations are whole
local Plan = {}
Plan.__index = Plan

local function name_of(module, field)
  return module._path == "" and field or module._path .. "." .. field
end

local function refuse(self, module, words, ...)
  fail.usage("tp = %d does not fit %s (%s): %s\n    hint: a tp that divides it, or tp = "
    .. "\"replicate\" for this layer", self.size, module._path, module._class, words:format(...))
end

-- The length of a dimension of a whole parameter; nil if the module has none of that name.
local function length(module, field, dim)
  local p = module._items[field]
  return p and core.full_shape(p)[dim + 1]
end

--- A dimension in equal parts. what: its name in words.
function Plan:even(module, field, dim, what)
  local full = length(module, field, dim)
  if not full then return end
  if full % self.size ~= 0 then
    refuse(self, module, "its %s = %d does not divide into %d parts", what, full, self.size)
  end
  local size = full // self.size
  self.cuts[name_of(module, field)] = { dim = dim, full = full, size = size,
    form = dim == 0 and "column" or "row",
    runs = function(rank) return { { rank * size, size, true } } end }
end

--- A dimension in parts of equal length, the last ones padded.
function Plan:padded(module, field, dim)
  local full = length(module, field, dim)
  if not full then return end
  local size = (full + self.size - 1) // self.size
  self.cuts[name_of(module, field)] = { dim = dim, full = full, size = size,
    form = "vocab",
    runs = function(rank)
      local at = math.min(rank * size, full)
      return { { at, math.min(size, full - at), true } }
    end }
end

--- Dimension 0 as heads q, then kv heads k, then as many v, of `size` each. Fewer kv heads than
--- ranks: each is held by several, the first of which counts it.
function Plan:heads(module, field, heads, kv_heads, size)
  local full, n = length(module, field, 0), self.size
  if not full then return end
  if heads % n ~= 0 then refuse(self, module, "%d heads do not divide into %d parts", heads, n) end
  if kv_heads % n ~= 0 and n % kv_heads ~= 0 then
    refuse(self, module, "of %d kv heads and %d ranks neither divides the other", kv_heads, n)
  end
  local q, kv = heads // n, math.max(kv_heads // n, 1)
  local sharers = math.max(n // kv_heads, 1)
  self.cuts[name_of(module, field)] = { dim = 0, full = full, size = (q + 2 * kv) * size,
    form = "heads", sharers = sharers, shared = q * size,
    runs = function(rank)
      local first, is_counted = rank * kv_heads // n, rank % sharers == 0
      return {
        { rank * q * size, q * size, true },
        { (heads + first) * size, kv * size, is_counted },
        { (heads + kv_heads + first) * size, kv * size, is_counted },
      }
    end }
end

--- Whole, and each rank has a part of the gradient.
function Plan:sums(module, field)
  if module._items[field] then self.partial[name_of(module, field)] = true end
end

--- Activations are whole in a module and below it, also with sequence parallelism.
function Plan:keep_whole(module)
  for _, below in ipairs(module:modules()) do self.apart[below] = true end
end

--- How a model's parameters are cut for tp groups of `size` ranks. head: a module that is to be cut
--- by "vocab" if it says nothing of its own.
---@return rille.TpPlan
function tensor_parallel.plan(model, size, head)
  local self = setmetatable({ size = size, cuts = {}, partial = {}, apart = {}, head = head }, Plan)
  for is_tied = 0, 1 do -- a tied weight is cut as the module that owns it says
    for _, module in ipairs(model:modules()) do
      if (rawget(module, "tied") and 1 or 0) == is_tied then module:tensor_parallel(self) end
      if type(module.time) == "string" and module.time ~= "whole" then
        fail.usage("%s (%s): time = %q means nothing, \"whole\" does", module._path, module._class,
          module.time)
      end
      if module.time == "whole" and is_tied == 0 then self:keep_whole(module) end
    end
  end
  return self
end

-- ---- parts and wholes

--- The table that core.shard takes for a rank's part.
function tensor_parallel.shard(cut, rank)
  return { dim = cut.dim, full = cut.full, size = cut.size, runs = cut.runs(rank) }
end

--- Calls fn(here, there, n, is_counted) for each run of a rank's part: n entries from `here` on in
--- the part, from `there` on in the whole.
function tensor_parallel.each_run(cut, rank, fn)
  local at = 0
  for _, run in ipairs(cut.runs(rank)) do
    if run[2] > 0 then fn(at, run[1], run[2], run[3]) end
    at = at + run[2]
  end
end

-- Calls fn(of the part, of the whole) for the stretches that they have in common.
local function each_stretch(cut, rank, whole, part, fn)
  rille.no_grad(function()
    tensor_parallel.each_run(cut, rank, function(here, there, n)
      fn(part:slice(cut.dim, here, here + n), whole:slice(cut.dim, there, there + n))
    end)
  end)
end

--- Copies a rank's part out of a whole tensor; padding is left as it is.
function tensor_parallel.take(cut, rank, whole, part)
  each_stretch(cut, rank, whole, part, function(mine, all) mine:copy_(all) end)
end

--- Copies a rank's part into its place in a whole tensor.
function tensor_parallel.put(cut, rank, part, whole)
  each_stretch(cut, rank, whole, part, function(mine, all) all:copy_(mine) end)
end

--- The whole of which every rank of the group has a part; for all of them. One part is on its way
--- at a time. shape: of the whole.
function tensor_parallel.gather(group, cut, part, shape)
  local whole = rille.zeros(shape, { dtype = part:dtype() })
  for rank = 0, group:size() - 1 do
    local theirs = rank == group:rank() and part:detach():contiguous()
      or rille.zeros({ part:shape() }, { dtype = part:dtype() })
    group:broadcast(theirs, rank)
    tensor_parallel.put(cut, rank, theirs, whole)
  end
  return whole
end

--- "f32[2, 3]", for messages.
function tensor_parallel.describe(x)
  return ("%s[%s]"):format(x:dtype(), table.concat({ x:shape() }, ", "))
end

-- ---- what a cut layer computes

---@class rille.Tp
---@field size integer ranks of the group
---@field rank integer this one's place in it
---@field group rille.Group
---@field wants_sequence boolean the option sequence_parallel
---@field sequence boolean whether activations between layers are cut along time, now
---@field keeps_cut boolean whether a last layer's output may stay cut: in a pass of a Trainer
local Tp = {}
Tp.__index = Tp

local TIME <const> = 1

--- What modules see of the group as module._tp.
---@return rille.Tp
function tensor_parallel.new(group, sequence)
  return setmetatable({ size = group:size(), rank = group:rank(), group = group,
    wants_sequence = sequence, sequence = false, keeps_cut = false }, Tp)
end

-- Runs fn(...) with other settings.
local function with(self, sequence, keeps_cut, fn, ...)
  local before <const> = { self.sequence, self.keeps_cut, tensor_parallel.running }
  local _ <close> = setmetatable({}, { __close = function()
    self.sequence, self.keeps_cut, tensor_parallel.running = before[1], before[2], before[3]
  end })
  self.sequence, self.keeps_cut, tensor_parallel.running = sequence, keeps_cut, self
  return fn(...)
end

--- Runs fn(...), a pass of a Trainer: outside, activations and outputs are whole. any_length: time
--- is not cut.
function Tp:pass(any_length, fn, ...)
  self.last, self.open = nil, nil
  return with(self, self.wants_sequence and not any_length, true, fn, ...)
end

--- Runs fn(...) within a pass as if it were outside: a loss that calls a model.
function Tp:outside(fn, ...) return with(self, false, false, fn, ...) end

--- fn for a second run in backward, when this pass is over: with the settings of now.
function Tp:as_now(fn)
  local sequence <const>, keeps_cut <const> = self.sequence, self.keeps_cut
  return function(...) return with(self, sequence, keeps_cut, fn, ...) end
end

--- Remembers what a column form gave last: cut_by, whose output it is, if it is cut. Only so can be
--- told what ends a model.
function Tp:note_last(y, cut_by)
  self.last, self.open = self.keeps_cut and { y = y, cut_by = cut_by }, cut_by
end

--- The model's output, whole, from what its last unit gave for a batch of `T` positions (nil: not
--- known); but for the vocabulary of a head whose loss takes it cut.
function Tp:finish(y, last_unit, T, keeps_vocab)
  local last, linear = self.last, self.open
  self.last, self.open = nil, nil
  local is_last = last and rawequal(last.y, y)
  if linear and (is_last or linear == last_unit) then -- as it is, or changed by a hook
    if keeps_vocab and linear == last_unit then return y end
    if rawget(linear, "_tp_form") == "heads" then
      fail("%s (Linear) is cut by heads and ends the model: its parts make no whole\n    hint: "
        .. "tp = \"column\" for it, or a \"row\" Linear behind it", linear._path)
    end
    return self:whole_features(y, linear.d_out)
  elseif linear then
    fail("%s (Linear) is cut by its features, and what is made of them ends the model, as %s\n"
      .. "    hint: a \"row\" Linear behind it, or let it be the last itself", linear._path,
      tensor_parallel.describe(y))
  end
  local has_ended = rawget(last_unit, "_keeps_time") and (y:ndim() < 3 or y:size(TIME) ~=
    (T and T // self.size))
  if is_last or not self.sequence or has_ended then return y end
  if y:ndim() < 2 or T and y:size(TIME) * self.size ~= T then
    fail("sequence_parallel: the model gives %s, whose dimension 1 is no part of the T = %d "
      .. "positions that tp ranks share out\n    hint: a module that mixes time or ends it says "
      .. "time = \"whole\": it sees all of it", tensor_parallel.describe(y), T or -1)
  end
  return self:join(y)
end

local function is_activation(x)
  return rille.is_tensor(x) and x:ndim() >= 3 and x:dtype():find "^b?f" ~= nil
end

-- What a module with time = "whole" gives: cut again. Without all of time it can only end a model.
local function cut_again(self, module, values, T)
  for i = 1, values.n do
    local x = values[i]
    if is_activation(x) and x:size(TIME) == T then
      values[i] = self:part(x)
    elseif rille.is_tensor(x) and x:ndim() > 0 and module ~= self.last_unit then
      fail("%s (%s) sees time whole and gives %s, which has not its T = %d positions: what comes "
        .. "behind it takes it for a part\n    hint: only the model's last unit may end time: put "
        .. "what follows into it", module._path, module._class, tensor_parallel.describe(x), T)
    end
  end
end

--- Runs a module's forward on whole activations: arguments that are parts of time are joined, ids
--- are whole as they are. What comes out is cut again.
function Tp:whole(module, first, ...)
  if not self.sequence then return module:forward(first, ...) end
  local values = table.pack(first, ...)
  local T = is_activation(first) and first:size(TIME) * self.size
    or rille.is_tensor(first) and first:ndim() > 1 and first:size(TIME) or -1
  for i = 1, values.n do
    local x = values[i]
    local is_part = is_activation(x) and x:size(TIME) * self.size == T
    if is_part and (x:ndim() == first:ndim() or not is_activation(first)) then
      values[i] = self:join(x)
    end
  end
  values = table.pack(with(self, false, self.keeps_cut, module.forward, module,
    table.unpack(values, 1, values.n)))
  cut_again(self, module, values, T)
  return table.unpack(values, 1, values.n)
end

--- Where this rank's part of n entries begins and ends.
function Tp:range(n, what)
  if n % self.size ~= 0 then
    fail("sequence_parallel: %s = %d does not divide into the %d parts of tp", what, n, self.size)
  end
  return n // self.size * self.rank, n // self.size * (self.rank + 1)
end

--- What a column form reads: the whole activation, whose gradients are summed.
function Tp:enter(x)
  if self.sequence then return core.all_gather(x, { group = self.group, dim = TIME }) end
  return core.copy_to(x, { group = self.group })
end

--- The sum of what a row form has computed: whole, or this rank's part of time.
function Tp:leave(y)
  if not self.sequence then return core.reduce_from(y, { group = self.group }) end
  self:range(y:size(TIME), "T")
  return core.reduce_scatter(y, { group = self.group, dim = TIME })
end

--- Every rank's part of time, of values that go on whole and alike on all ranks; and back.
function Tp:join(x)
  if not self.sequence then return x end
  return core.gather_from(x, { group = self.group, dim = TIME })
end

function Tp:part(x)
  if not self.sequence then return x end
  self:range(x:size(TIME), "T")
  return core.scatter_to(x, { group = self.group, dim = TIME })
end

--- This rank's part of time of what every rank has whole (dim: of time, default 1), without a
--- gradient from the others.
function Tp:mine(x, dim)
  if not self.sequence then return x end
  return x:slice(dim or TIME, self:range(x:size(dim or TIME), "T"))
end

--- All features of a column form's output, without the padding beyond `full`.
function Tp:whole_features(y, full)
  y = core.gather_from(y, { group = self.group, dim = -1 })
  if y:size(-1) == full then return y end
  return y:slice(-1, 0, full)
end

--- y = act(x weight' + bias) of a column form.
function Tp:column(x, weight, bias, act)
  local column = self.sequence and core.column_linear_time or core.column_linear
  return column(x, weight, bias, { group = self.group, act = act })
end

--- y = x weight' + bias of a row form: the bias is added once, to the sum.
function Tp:row(x, weight, bias)
  local y = self:leave(rille.linear(x, weight))
  self.open = nil
  return bias and y + bias or y
end

--- The part of the whole sample that an activation is, for random masks; nil: it is whole. is_cut:
--- its features are.
function Tp:place(x, is_cut)
  local dim = is_cut and -1 or self.sequence and TIME
  if not dim then return nil end
  local n = x:size(dim)
  return { dim = dim, at = n * self.rank, full = n * self.size }
end

return tensor_parallel
