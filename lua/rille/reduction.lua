-- reduction - gradients summed over stages that share a parameter, over ranks of a tp group that
-- have parts of one, and over replicas, while the last backward still runs.
--
-- What is reduced goes in buckets, the last units first: a bucket's sum starts when its units have
-- made their last contribution. All of it works on a pipeline (rille.pipeline), `self` here.
--
-- Invariant:
--  1. All ranks of a data-parallel group reduce the same buckets in the same order.
local rille = require "rille"
local core = rille.core

local reduction = {}

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
        bucket, bytes = { set = part.set, first = i, n = 0, unit = math.huge, shared = {},
          is_partial = part.place:find " partial$" ~= nil }, 0
        table.insert(list, bucket)
      end
      bucket.first, bucket.n = i, bucket.n + 1
      local cut = part.cuts[i]
      if cut and (cut.sharers or 1) > 1 then table.insert(bucket.shared, { p, cut }) end
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

-- Starts what is ready, in the common order (inv. 1).
local function start_ready(self)
  while self.next_bucket <= #self.buckets do
    local bucket = self.buckets[self.next_bucket]
    if not bucket.is_ready then return end
    self.next_bucket = self.next_bucket + 1
    local grad = bucket.set:finish_part(bucket.first, bucket.n)
    for _, shared in ipairs(bucket.shared) do -- key and value heads that several ranks have
      local p, cut = shared[1], shared[2]
      local whole = p:grad()
      if whole then
        self.sharers_comm[cut.sharers]:all_reduce(whole:slice(0, cut.shared, cut.size))
      end
    end
    local comm = bucket.is_partial and self.stage_comm or self.layout.dp > 1 and self.dp_comm
    if comm then table.insert(self.started, comm:all_reduce_start(grad)) end
  end
end

--- The last contribution to a stage or group has been made, or to its units above `unit`.
---@param kind "stage"|"tied"
function reduction.ready(self, kind, index, unit)
  for _, bucket in ipairs(self.buckets) do
    if bucket.kind == kind and bucket.index == index and (not unit or bucket.unit > unit) then
      bucket.is_ready = true
    end
  end
  start_ready(self)
end

--- What the last backward of a stage tells of finished units; nil where nobody waits for them. A
--- recorder reads this rank's gradients after it: then their sums over replicas start behind that.
function reduction.teller(self, stage)
  self.left[stage] = self.left[stage] - 1
  if self.left[stage] > 0 or self.layout.dp == 1 or self.recorder then return nil end
  return function(unit) reduction.ready(self, "stage", stage, unit) end
end

--- REDUCE_TIED: every holder gets all holders' gradients.
function reduction.tied(self, group)
  local tied = self.layout.tied[group + 1]
  if self.tied_comm[group] then
    for _, p in ipairs(tied.params) do
      core.tied_exchange(self.tied_comm[group], p.tensor, p.units, p.unit_ranks)
    end
  end
  reduction.ready(self, "tied", group)
end

--- Makes the groups of ranks that share parameters, and says which rank in it runs each unit.
function reduction.make_groups(self)
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

--- Makes the groups of ranks that hold the same key and value heads, where those are fewer than tp
--- ranks: by how many ranks that are.
function reduction.make_sharers(self)
  local l = self.layout
  self.sharers_comm = {}
  for _, p in ipairs(l.params) do
    local n = p.cut and p.cut.sharers or 1
    if n > 1 and not self.sharers_comm[n] then
      self.sharers_comm[n] = l.tp.group:split(l.tp.rank // n, l.tp.rank)
    end
  end
end

--- The buckets of this rank in the order in which they become ready on the first replica: the same
--- for all, whose schedules may differ by a microbatch.
function reduction.buckets(self, optimizer)
  local list = {}
  local kinds = { REDUCE_GRAD = "stage", REDUCE_TIED = "tied" }
  for _, action in ipairs(self.layout.first_sched:row(self.layout.rank)) do
    local kind = kinds[action.kind]
    if kind then
      local index, sets = kind == "stage" and action.stage or action.mb, {}
      for _, part in ipairs(optimizer.sets) do
        local place = kind .. " " .. index
        if part.place == place or part.place == place .. " partial" then
          table.insert(sets, part)
        end
      end
      for _, bucket in ipairs(buckets_of(sets, self.layout.bucket)) do
        bucket.kind, bucket.index = kind, index
        table.insert(list, bucket)
      end
    end
  end
  return list
end

return reduction
