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
-- gradients of each step, reduced and whole, to folder/grads-STEP-N.safetensors, under the weights'
-- dtype and name.
--
-- On a tp group names end in " (tp rank N)", since a rank has parts; but for parameters that all of
-- its ranks have whole, with the same gradient: rank 0 writes their lines.
--
-- A Trainer's parameters are read after each update. A loop over a Pipeline updates them itself:
-- they are read when its next step begins, so those after its last step are not there.
local rille = require "rille"
local core = rille.core
local fail = require "rille.fail"
local tensor_parallel = require "rille.tensor_parallel"

local record = {}

---@class rille.Recorder
local Recorder = {}
Recorder.__index = Recorder

local numbers = {
  bucket = true, dp = true, group = true, pp = true, stages_per_rank = true, tp = true,
}
local words = { pipeline = true, split = true }

--- What a split is, from its words: "3,2, 2" -> {3, 2, 2}; a name stays as it is.
---@param text string
---@return string|integer[]
function record.split_of(text)
  local is_list = text:find("^[%d, ]+$") and text:find("%d")
  if not is_list or ("," .. text .. ","):find(",%s*,") then return text end
  local list = {}
  for n in text:gmatch("%d+") do table.insert(list, math.tointeger(n)) end
  return list
end

--- "pp=4 pipeline=zbv" (or pp-schedule=zbv) -> {pp = 4, pipeline = "zbv"}: the Trainer's option
--- `parallel`.
---@param text string
function record.parse_layout(text)
  local parallel, last = {}, nil
  for word in text:gmatch("%S+") do
    local name, value = word:match("^([%w_-]+)=(.+)$")
    name = name and name:gsub("-", "_")
    if name == "pp_schedule" then name = "pipeline" end -- as the command line has it
    if name and numbers[name] and math.tointeger(tonumber(value)) then
      parallel[name] = math.tointeger(tonumber(value))
    elseif name == "sequence_parallel" and (value == "true" or value == "false") then
      parallel[name] = value == "true"
    elseif name and words[name] then
      parallel[name] = value
    elseif last == "split" and word:find("^[%d,]+$") then -- split=2, 2
      parallel.split, name = parallel.split .. " " .. word, last
    else
      fail.usage("layout %q: %q must be dp=, tp=, pp=, stages_per_rank=, group= and a number, "
        .. "pipeline= or split= and a name, or sequence_parallel=true", text, word)
    end
    last = name
  end
  parallel.split = parallel.split and record.split_of(parallel.split)
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

local has_recorder = false

--- A recorder for a pipeline, or nil. A script has one pipeline that can be compared.
---@return rille.Recorder?
function record.new(layout)
  local folder, steps, _, tensor = wanted()
  if not folder then return nil end
  if has_recorder then
    fail("rille verify compares what one Trainer or Pipeline computes; the script makes a second")
  end
  has_recorder = true
  local rank = layout.mesh:all():rank()
  local self = setmetatable({ folder = folder, steps = steps, tensor = tensor, layout = layout,
    rank = rank, file = assert(io.open(("%s/rank-%d.txt"):format(folder, rank), "w")) }, Recorder)
  local params = {}
  for _, p in ipairs(layout.params) do params[p.name] = p end
  self.used = {} -- by stage: {unit, name, tensor, param = of the layout}
  for _, stage in ipairs(layout.local_stages) do
    self.used[stage] = {}
    for u = layout.first_unit[stage], layout.last_unit[stage] do
      for _, entry in ipairs(layout.units[u]:used_parameters()) do
        table.insert(self.used[stage], { unit = u - 1, name = entry[1], tensor = entry[2],
          param = params[entry[1]] })
      end
    end
  end
  return self
end

-- What a name gets behind it on a tp group; nil where another rank writes the line.
local function suffix(self, is_alike)
  local tp = self.layout.tp
  if not tp or is_alike and tp.rank == 0 then return "" end
  return not is_alike and (" (tp rank %d)"):format(tp.rank) or nil
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
      line(self, ("%d F %d %d %s%s%s"):format(place.step, at, unit, path == "" and "model" or path,
        i > 1 and "#" .. i or "", suffix(self, false)), values[i], ("%dF%d"):format(stage, mb))
    end
  end
end

--- A backward (kind B, I or W) has added to the gradients of a stage: those that it changed, since
--- W of a microbatch may come after I of later ones.
function Recorder:gradients(stage, mb, at, kind)
  if core.place().step < 0 then return end
  for _, used in ipairs(self.used[stage]) do
    local grad = core.unit_grad(used.tensor, used.unit)
    local digest = grad and core.digest(grad, 0)
    local behind = suffix(self, not used.param.cut and not used.param.is_partial)
    if grad and behind and digest ~= used.digest then
      used.digest = digest
      line(self, ("%d G %d %d %s%s"):format(core.place().step, at, used.unit, used.name, behind),
        grad, ("%d%s%d"):format(stage, kind, mb), digest)
    end
  end
end

-- The whole gradient of a parameter on the first rank of a tp group, all of whose ranks call this
-- alike; nil elsewhere and where there is none.
local function whole_grad(self, p)
  local tp, grad = self.layout.tp, p.tensor:grad()
  if tp and p.cut then
    local has_any = table.concat(tp.group:all_gather(grad and "1" or "")) ~= ""
    grad = has_any and tensor_parallel.gather(tp.group, p.cut,
      grad or rille.zeros { p.tensor:shape() }, p.shape)
  end
  return self.layout:is_first_of_tp() and grad or nil
end

--- A step's gradients are complete, over microbatches, tp ranks and replicas.
function Recorder:reduced()
  if self.tensor ~= "grads" or self.layout.mesh:at("dp") > 0 then return end
  local list = {}
  for _, p in ipairs(self.layout.params) do
    local grad = p.owner == self.layout.rank and whole_grad(self, p)
    if grad then table.insert(list, { p.tensor:dtype() .. " " .. p.name, grad }) end
  end
  if #list > 0 then
    rille.save(("%s/grads-%d-%d.safetensors"):format(self.folder, core.place().step, self.rank),
      list)
  end
end

--- The loss and the gradients' norm of a step.
function Recorder:told(step, loss, norm)
  if self.rank == 0 then
    self.file:write(("%d L 0 0 loss %.17g -\n%d L 0 0 norm %.17g -\n"):format(step, loss, step,
      norm))
  end
  self.file:flush()
end

--- The parameters are those after a step (0: before the first); after the last one that is wanted
--- the run ends.
function Recorder:updated(step)
  if step == 0 then return end
  for _, p in ipairs(self.layout.params) do
    local behind = suffix(self, not p.cut)
    if behind and p.owner == self.layout.rank and self.layout.mesh:at("dp") == 0 then
      line(self, ("%d P 0 0 %s%s"):format(step, p.name, behind), p.tensor, "STEP")
    end
  end
  self.file:flush()
  if step >= self.steps then
    self.file:close()
    self.layout.mesh:all():barrier()
    rille.exit(0)
  end
end

return record
