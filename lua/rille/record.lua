-- record - what a run computes, in digests, so that two layouts of one script can be compared: the
-- part of `rille verify` that runs inside the ranks.
--
-- RILLE_VERIFY = "folder;steps;layout;tensor" switches it on: the layout takes the place of the
-- script's own, the run ends after that many steps, and each rank writes folder/rank-N.txt, a line
-- for everything that has the same bits under every layout:
--
--     step F at unit name digest action     what a unit gave for the microbatch that begins at
--                                           sample `at`
--     step G at unit name digest action     a parameter's gradient in a unit, after that microbatch
--     step P 0 0 name digest -              a parameter after the step
--     step L 0 0 loss value -               the loss; and the gradient's norm
--
-- The tensor of one line can be asked for: it goes to folder/tensor.safetensors; and "grads", all
-- gradients of the first step, reduced, to folder/grads-N.safetensors.
local rille = require "rille"
local core = rille.core
local fail = require "rille.fail"

local record = {}

---@class rille.Recorder
local Recorder = {}
Recorder.__index = Recorder

local numbers = {
  bucket = true, dp = true, group = true, pp = true, stages_per_rank = true, tp = true,
}
local words = { pipeline = true, split = true }

--- "pp=4 pipeline=zbv" -> {pp = 4, pipeline = "zbv"}: the Trainer's option `parallel`.
---@param text string
function record.parse_layout(text)
  local parallel = {}
  for word in text:gmatch("%S+") do
    local name, value = word:match("^([%w_-]+)=(.+)$")
    name = name and name:gsub("-", "_")
    if name and numbers[name] and math.tointeger(tonumber(value)) then
      parallel[name] = math.tointeger(tonumber(value))
    elseif name and words[name] then
      parallel[name] = value
    else
      fail.usage("layout %q: %q must be dp=, tp=, pp=, stages_per_rank=, group= and a number, or "
        .. "pipeline= or split= and a name", text, word)
    end
  end
  if parallel.split and parallel.split:find("^[%d,]+$") then
    local list = {}
    for n in parallel.split:gmatch("%d+") do table.insert(list, math.tointeger(n)) end
    parallel.split = list
  end
  return parallel
end

-- folder, steps, layout, tensor of the variable; nil if it is not set.
local function wanted()
  local text = os.getenv("RILLE_VERIFY")
  if not text then return nil end
  local folder, steps, layout, tensor = text:match("^([^;]*);(%d+);([^;]*);(.*)$")
  return folder, math.tointeger(steps), layout, tensor
end

--- The layout that takes the place of a script's own; the script's, if nothing is recorded.
function record.layout(parallel)
  local folder, _, layout = wanted()
  return folder and record.parse_layout(layout) or parallel
end

--- A recorder for a pipeline, or nil.
---@return rille.Recorder?
function record.new(layout)
  local folder, steps, _, tensor = wanted()
  if not folder then return nil end
  local rank = layout.mesh:all():rank()
  local self = setmetatable({ folder = folder, steps = steps, tensor = tensor, layout = layout,
    rank = rank, file = assert(io.open(("%s/rank-%d.txt"):format(folder, rank), "w")) }, Recorder)
  self.used = {} -- by stage: {unit, name, tensor}
  for _, stage in ipairs(layout.local_stages) do
    self.used[stage] = {}
    for u = layout.first_unit[stage], layout.last_unit[stage] do
      for _, entry in ipairs(layout.units[u]:used_parameters()) do
        table.insert(self.used[stage], { unit = u - 1, name = entry[1], tensor = entry[2] })
      end
    end
  end
  return self
end

local function line(self, key, tensor, action, digest)
  local plain = tensor:detach():contiguous()
  digest = digest or core.digest(plain, 0)
  self.file:write(("%s %016x %s\n"):format(key, digest, action))
  if self.tensor == key then
    rille.save(self.folder .. "/tensor.safetensors", { { "tensor", plain } })
  end
end

--- A unit gave values (packed) for a microbatch.
function Recorder:unit(stage, mb, at, unit, values)
  local place = core.place()
  if place.step < 0 or not rille.is_grad_enabled() then return end
  for i = 1, values.n do
    if rille.is_tensor(values[i]) then
      local path = self.layout.units[unit + 1]._path
      line(self, ("%d F %d %d %s%s"):format(place.step, at, unit, path == "" and "model" or path,
        i > 1 and "#" .. i or ""), values[i], ("%dF%d"):format(stage, mb))
    end
  end
end

--- A backward (kind B, I or W) has added to the gradients of a stage: those that it changed, since
--- W of a microbatch may come after I of later ones.
function Recorder:gradients(stage, mb, at, kind)
  for _, used in ipairs(self.used[stage]) do
    local grad = core.unit_grad(used.tensor, used.unit)
    local digest = grad and core.digest(grad, 0)
    if grad and digest ~= used.digest then
      used.digest = digest
      line(self, ("%d G %d %d %s"):format(core.place().step, at, used.unit, used.name), grad,
        ("%d%s%d"):format(stage, kind, mb), digest)
    end
  end
end

-- All reduced gradients of the parameters that this rank counts.
local function save_grads(self, step)
  local list = {}
  for _, p in ipairs(self.layout.params) do
    local grad = p.owner == self.layout.rank and self.layout.mesh:at("dp") == 0 and p.tensor:grad()
    if grad then table.insert(list, { p.name, grad }) end
  end
  if self.tensor == "grads" and step == 1 and #list > 0 then
    rille.save(("%s/grads-%d.safetensors"):format(self.folder, self.rank), list)
  end
end

--- A step is done: parameters, loss; after the last one that is wanted the run ends.
function Recorder:step(step, loss, norm)
  save_grads(self, step)
  for _, p in ipairs(self.layout.params) do
    if p.owner == self.layout.rank and self.layout.mesh:at("dp") == 0 then
      line(self, ("%d P 0 0 %s"):format(step, p.name), p.tensor, "STEP")
    end
  end
  if self.rank == 0 then
    self.file:write(("%d L 0 0 loss %.17g -\n%d L 0 0 norm %.17g -\n"):format(step, loss, step,
      norm))
  end
  self.file:flush()
  if step >= self.steps then
    self.file:close()
    self.layout.mesh:all():barrier()
    rille.exit(0)
  end
end

return record
