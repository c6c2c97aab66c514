-- layout - how a model lies on the ranks: which units make which stage, which rank runs a stage,
-- which parameters a rank holds, and which samples a data-parallel replica takes.
--
-- Everything here is a function of the script's options and the world: every rank computes the same
-- tables.
local rille = require "rille"
local core = rille.core
local expect = require "rille.expect"
local nn = require "rille.nn"
local fail = require "rille.fail"
local known = require "rille.known"
local record = require "rille.record"
local schedules = require "rille.schedule"
local split = require "rille.split"
local targets = require "rille.targets"
local tensor_parallel = require "rille.tensor_parallel"

local layout = {}

---@class rille.Layout
local Layout = {}
Layout.__index = Layout

local parallel_names = {
  "bucket", "comm", "dp", "group", "pipeline", "pp", "sequence_parallel", "split",
  "stages_per_rank", "stall_timeout", "tp",
}

-- ---- options

local function positive(name, value, default)
  if value == nil then return default end
  if math.type(value) ~= "integer" or value < 1 then
    fail.usage("parallel.%s = %s must be a whole number from 1 on", name, tostring(value))
  end
  return value
end

-- Options as lines, in a fixed order.
local function add_lines(lines, prefix, value)
  if type(value) ~= "table" then
    local is_plain = type(value) == "number" or type(value) == "string" or type(value) == "boolean"
    if is_plain then table.insert(lines, ("%s %s"):format(prefix, value)) end
    return
  end
  local keys = {}
  for key in pairs(value) do table.insert(keys, key) end
  table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
  for _, key in ipairs(keys) do
    add_lines(lines, type(key) == "number" and prefix or (prefix .. " " .. key), value[key])
  end
end

--- Ends with an error, to which `hint` is added, unless all ranks of the group have these lines.
function layout.agree(group, lines, hint)
  local good, words = pcall(group.agree, group, lines)
  if good then return end
  local is_difference = tostring(words):find("the ranks disagree", 1, true)
  error(is_difference and ("%s\n    hint: %s"):format(words, hint) or words, 0)
end

-- What all ranks must have in common before the first message, as lines.
local function common_lines(model, parallel, n_global, micro, alike)
  local script = rawget(_G, "arg") and arg[0] or "?"
  local file = io.open(script, "rb")
  local lines = {
    "rille " .. core.version,
    ("script %s %016x"):format(script, core.hash(file and file:read("a") or "")),
    "options " .. table.concat(rawget(_G, "arg") or {}, " "),
    ("seed %s"):format(core.seed()),
    ("batch.global %d, batch.micro %d"):format(n_global, micro),
  }
  if file then file:close() end
  for _, name in ipairs(parallel_names) do
    local value = parallel[name]
    if type(value) == "number" or type(value) == "string" or type(value) == "boolean" then
      table.insert(lines, ("parallel.%s %s"):format(name, value))
    end
  end
  add_lines(lines, "option", alike or {})
  for _, entry in ipairs(model:named_parameters()) do
    table.insert(lines, ("%s %s[%s]"):format(entry[1], entry[2]:dtype(),
      table.concat(core.full_shape(entry[2]), ", ")))
  end
  return lines
end

local function make_mesh(comm, parallel)
  if parallel.stall_timeout then core.stall_timeout(parallel.stall_timeout) end
  local pp, tp = positive("pp", parallel.pp, 1), positive("tp", parallel.tp, 1)
  expect.option("Trainer: parallel", "sequence_parallel", parallel.sequence_parallel, "boolean?")
  return core.mesh(comm, { pp = pp, tp = tp, dp = positive("dp", parallel.dp, nil) })
end

-- ---- units and stages

-- What a unit is called: its place in the model, or its class where it is the model or in none.
local function unit_name(unit) return unit._path == "" and unit._class or unit._path end

-- The model's units, each once.
local function units_of(model, pp)
  local splits = model.units ~= nn.Module.units
  if not splits and pp > 1 then model:units() end -- raises, and shows how
  local units = { model }
  if splits then units = model:units() end
  if type(units) ~= "table" or nn.is_module(units) or #units == 0 then
    fail("units() of %s must return a list of modules, got %s", model._class,
      type(units) == "table" and #units == 0 and "an empty one" or expect.describe(units))
  end
  local seen = {}
  for i, unit in ipairs(units) do
    if not nn.is_module(unit) then
      fail("units() of %s: unit %d must be a module, got %s", model._class, i - 1,
        expect.describe(unit))
    end
    if seen[unit] then
      fail("units(): %s is there twice, as unit %d and as unit %d", unit_name(unit),
        seen[unit] - 1, i - 1)
    end
    seen[unit] = i
  end
  return units
end

-- Parameters by name, in the model's order: which units use them, and so which stages.
local function parameters_of(self)
  local list, by_name = {}, {}
  for i, entry in ipairs(self.model:named_parameters()) do
    local p = { name = entry[1], tensor = entry[2], index = i, units = {}, stages = {},
      shape = core.full_shape(entry[2]) }
    list[i], by_name[p.name] = p, p
  end
  for u, unit in ipairs(self.units) do
    for _, entry in ipairs(unit:used_parameters()) do
      local p = by_name[entry[1]]
      if not p then
        fail("unit %s uses the parameter %s, which is not the model's", unit_name(unit), entry[1])
      end
      if p.units[#p.units] ~= u - 1 then table.insert(p.units, u - 1) end
      local stage = self.stage_of[u]
      if p.stages[#p.stages] ~= stage then table.insert(p.stages, stage) end
    end
  end
  for _, p in ipairs(list) do
    if #p.units == 0 then
      fail("the parameter %s is in no unit: units() of %s must list every part that has parameters",
        p.name, self.model._class)
    end
  end
  return list
end

-- Named values: unit.writes and unit.reads. Gives the edges beside the chain, {from, to, names},
-- and the names that go to the next stage: those travel along with the chain, by their first stage.
local function named_edges(self)
  local writer, edges, by_pair, along = {}, {}, {}, {}
  for u, unit in ipairs(self.units) do
    for _, name in ipairs(unit.reads or {}) do
      local from = writer[name]
      if not from then
        fail("unit %s reads the value %q, but no unit before it writes it", unit_name(unit),
          name)
      end
      local a, b = self.stage_of[from], self.stage_of[u]
      local pair = a .. " " .. b
      if a ~= b and not by_pair[pair] then
        by_pair[pair] = { from = a, to = b, names = {}, has = {} }
        if b == a + 1 then along[a] = by_pair[pair].names
        else table.insert(edges, by_pair[pair]) end
      end
      if a ~= b and not by_pair[pair].has[name] then
        by_pair[pair].has[name] = true
        table.insert(by_pair[pair].names, name)
      end
    end
    for _, name in ipairs(unit.writes or {}) do
      if writer[name] then
        fail("units %s and %s both write the value %q", unit_name(self.units[writer[name]]),
          unit_name(unit), name)
      end
      writer[name] = u
    end
  end
  return edges, along
end

-- Groups of stages that share parameters: {stages = {...}, params = {...}}, by first parameter.
local function tied_groups(self)
  local groups, by_stages = {}, {}
  for _, p in ipairs(self.params) do
    if #p.stages > 1 then
      table.sort(p.stages)
      local key = table.concat(p.stages, " ")
      if not by_stages[key] then
        by_stages[key] = { stages = p.stages, params = {}, index = #groups }
        table.insert(groups, by_stages[key])
      end
      local group = by_stages[key]
      table.insert(group.params, p)
      p.tied, p.group = group, group.index
    end
  end
  return groups
end

-- ---- samples

--- The samples first, n of n_total that replica `index` of `parts` takes: sizes differ by at most
--- one, larger first.
function layout.share(n_total, parts, index)
  local base, extra = n_total // parts, n_total % parts
  return index * base + math.min(index, extra), base + (index < extra and 1 or 0)
end

--- n samples cut into microbatches of `micro`, the last one maybe smaller: a list of {first, n}.
function layout.cut(n, micro)
  local list = {}
  for first = 0, n - 1, micro do table.insert(list, { first, math.min(micro, n - first) }) end
  return list
end

-- ---- the whole

local function schedule_of(self, parallel, m, tied)
  local v = self.stages_per_rank
  if v and v > 1 and self.pp == 1 and not parallel.pipeline then
    fail.usage("stages_per_rank = %d needs a pipeline: pp is 1", v)
  end
  local recipe = parallel.pipeline or (v and v > 1 and self.pp > 1 and "interleaved") or "1f1b"
  if type(recipe) == "string" then recipe = rille.schedule_from(recipe) end
  local edges = {}
  for i, edge in ipairs(self.edges or {}) do edges[i] = { edge.from, edge.to, true } end
  return recipe:build {
    pp = self.pp, microbatches = m, stages_per_rank = v, group = parallel.group, edges = edges,
    tied = tied,
  }
end

-- Costs of the units as the first rank measures them, on all ranks.
local function measured_costs(self, example, loss)
  if not example then
    fail.usage("parallel.split = \"time\" measures the units: give the Trainer example = {inputs, "
      .. "targets}, a batch to run them on")
  end
  local COST <const>, words, costs, kept = "<dddd", {}, {}, {}
  local all = self.mesh:all()
  if all:rank() == 0 then
    local n = math.min(self.micro, targets.samples(example))
    local x, y = targets.rows(example, 1, 0, n), targets.rows(example, 2, 0, n)
    for i, c in ipairs(require "rille.profile"(self.units, loss, x, y)) do
      words[i] = COST:pack(c[1], c[2], c[3], c.kept)
    end
  end
  local text, at = all:broadcast(table.concat(words), 0), 1
  while at <= #text do
    local c = {}
    c[1], c[2], c[3], c.kept, at = COST:unpack(text, at)
    table.insert(costs, c)
    table.insert(kept, c.kept)
  end
  return costs, kept
end

-- Bytes that a rank may keep: the least of all ranks' limits.
local function bytes_for_a_rank(all)
  local least = math.huge
  for _, part in ipairs(all:all_gather(("<i8"):pack(core.memory().limit))) do
    least = math.min(least, (("<i8"):unpack(part)))
  end
  return least
end

-- Bytes of weights, gradients and AdamW's two moments of a unit.
local function state_of(unit)
  local bytes = 0
  for _, entry in ipairs(unit:used_parameters()) do
    bytes = bytes + entry[2]:numel() * (entry[2]:dtype() == "f64" and 32 or 16)
  end
  return bytes
end

local function choose_split(self, by, example, loss)
  local names, params = {}, {}
  for i, unit in ipairs(self.units) do
    names[i] = unit_name(unit)
    params[i] = unit:n_parameters()
  end
  local costs, kept, state, limit
  if by == "time" then
    costs, kept = measured_costs(self, example, loss)
    state, limit = {}, bytes_for_a_rank(self.mesh:all())
    for i, unit in ipairs(self.units) do state[i] = state_of(unit) end
  end
  return split.choose { names = names, params = params, by = by, sched = self.sched, costs = costs,
    kept = kept, state = state, limit = limit }
end

-- Which stage each unit is in, 0-based stages by 1-based unit.
local function assign(self, first_units)
  self.stage_of, self.first_unit, self.last_unit = {}, {}, {}
  for stage = 0, self.n_stages - 1 do
    self.first_unit[stage] = first_units[stage + 1] + 1
    self.last_unit[stage] = first_units[stage + 2]
    for u = self.first_unit[stage], self.last_unit[stage] do self.stage_of[u] = stage end
  end
end

--- Makes the model's modules belong to this layout's tp group, after those of another one did.
function Layout:bind()
  for _, module in ipairs(self.model:modules()) do
    rawset(module, "_tp", self.tp)
    rawset(module, "_keeps_time", module.time == "whole" or nil)
  end
end

-- A last unit that is a cut Linear ends the model: of its vocabulary this rank has tp.head,
-- {first, n} of tp.features.
local function find_head(self, plan)
  local last = self.units[#self.units]
  local form = rawget(last, "_tp_form")
  rawset(last, "_is_head", form and form ~= "row" and form ~= "replicate" or nil)
  if form ~= "vocab" then return end
  self.tp.features = last.d_out
  self.tp.head = plan.cuts[last.tied or last._path .. ".weight"].runs(self.tp.rank)[1]
end

-- A weight that is read both where activations are whole and where time is cut has two kinds of
-- gradient.
local function check_users(self, plan)
  for _, module in ipairs(self.model:modules()) do
    for _, entry in ipairs(module:shared_parameters()) do
      local owner = self.model:get(entry[1]:match("^(.*)%.[^.]*$") or "")
      if (plan.apart[owner] or false) ~= (plan.apart[module] or false) then
        fail.usage("sequence_parallel: %s is read by %s and by %s, of which one sees time whole "
          .. "and the other cut", entry[1], owner._path, module._path)
      end
    end
  end
end

-- Which part of each parameter a rank of a tp group holds, and what modules know of the group.
local function cut_parameters(self, loss, sequence)
  local size = self.mesh:size("tp")
  if size == 1 then
    if sequence then
      fail.usage("parallel.sequence_parallel shares time out over tp ranks, but tp is 1")
    end
    for _, module in ipairs(self.model:modules()) do
      rawset(module, "_tp", nil)
      rawset(module, "_keeps_time", nil)
    end
    return
  end
  self.tp = tensor_parallel.new(self.mesh:group("tp"), sequence or false)
  local last = self.units[#self.units]
  self.tp.last_unit = last
  local has_vocab = type(loss) == "table" and loss.name == "cross_entropy"
  local plan = tensor_parallel.plan(self.model, size,
    has_vocab and getmetatable(last) == nn.Linear._instance and last or nil)
  self:bind()
  find_head(self, plan)
  if sequence then check_users(self, plan) end
  for _, p in ipairs(self.params) do
    p.cut = plan.cuts[p.name]
    local owner = self.model:get(p.name:match("^(.*)%.[^.]*$") or "")
    p.is_partial = plan.partial[p.name]
      or not p.cut and self.tp.wants_sequence and not plan.apart[owner] or false
  end
end

local function hold(self)
  self.rank = self.mesh:at("pp")
  self.local_stages = {}
  for stage = 0, self.n_stages - 1 do
    if self.sched:holder(stage) == self.rank then table.insert(self.local_stages, stage) end
  end
  for _, p in ipairs(self.params) do
    for _, stage in ipairs(p.stages) do
      if self.sched:holder(stage) == self.rank then p.is_here = true end
    end
    p.owner = self.sched:holder(p.stages[1]) -- who counts it in norms and writes it to checkpoints
    core.elsewhere(p.tensor, not p.is_here and ("stage %d, on rank %d of the pipeline"):format(
      p.stages[1], p.owner) or nil)
    if not p.is_here then core.unplace(p.tensor) end
    if not p.cut and core.shard_of(p.tensor) then
      fail.usage("%s is cut over tp ranks by an earlier Trainer or Pipeline of this model: another "
        .. "tp needs a model of its own", p.name)
    end
    if p.is_here and p.cut then
      local have = core.shard_of(p.tensor) -- of an earlier Trainer or Pipeline
      local is_cut = have and have.dim == p.cut.dim and have.size == p.cut.size
      if not is_cut then core.shard(p.tensor, tensor_parallel.shard(p.cut, self.tp.rank)) end
    end
  end
end

--- How `model` lies on the ranks. parallel: as of the Trainer; n_global, micro: samples a step, a
--- microbatch; example and loss: a batch to measure units on, and what ends the last one; alike:
--- further options that are the same on all ranks.
---@return rille.Layout
function layout.new(model, parallel, n_global, micro, example, loss, alike)
  schedules.refuse_in_script("trains a model")
  parallel = record.layout(parallel or {})
  known("Trainer: parallel", parallel, parallel_names)
  local self = setmetatable({ model = model }, Layout)
  local comm = parallel.comm or core.comm_world()
  if comm:size() > 1 then
    layout.agree(comm, { "kernels " .. core.kernels() }, "other kernels give other bits, so that "
      .. "ranks drift apart: set RILLE_CPU on all ranks to kernels that each of them can run "
      .. "(amx, avx512, avx2, plain)")
    comm:agree(common_lines(model, parallel, n_global, micro, alike))
  end
  self.mesh = make_mesh(comm, parallel)
  self.pp, self.dp = self.mesh:size("pp"), self.mesh:size("dp")
  if n_global < self.dp then
    fail.usage("batch.global = %d samples cannot feed dp = %d replicas: give each at least one",
      n_global, self.dp)
  end
  self.n_global = n_global
  self.bucket = positive("bucket", parallel.bucket, 4 << 20) -- bytes of a reduction
  self.stages_per_rank = positive("stages_per_rank", parallel.stages_per_rank, nil)
  self.units = units_of(model, self.pp)
  self.first_sample, self.n_samples = layout.share(n_global, self.dp, self.mesh:at("dp"))
  self.micro = micro
  self.m = #layout.cut(self.n_samples, micro)
  self.sched = schedule_of(self, parallel, self.m, {})
  self.n_stages = self.sched:stages()
  self.split = choose_split(self, parallel.split, example, loss)
  assign(self, self.split.first)
  self.params = parameters_of(self)
  self.edges, self.along = named_edges(self)
  self.tied = tied_groups(self)
  local tied = {}
  for i, group in ipairs(self.tied) do tied[i] = group.stages end
  if #self.edges > 0 or #self.tied > 0 then
    self.sched = schedule_of(self, parallel, self.m, tied)
  end
  self.first_sched = self.sched -- of the first replica, which may have a microbatch more
  local _, n_first = layout.share(n_global, self.dp, 0)
  local m_first = #layout.cut(n_first, micro)
  if m_first ~= self.m then self.first_sched = schedule_of(self, parallel, m_first, tied) end
  if comm:size() > 1 then comm:agree { "split " .. table.concat(self.split.first, " ") } end
  if self.pp > 1 then -- replicas may differ by a microbatch
    self.mesh:group("pp"):agree { ("schedule %s %016x"):format(self.sched:name(),
      core.hash(self.sched:csv())) }
  end
  cut_parameters(self, loss, parallel.sequence_parallel)
  hold(self)
  return self
end

--- Whether this rank counts what all ranks of its tp group have alike.
function Layout:is_first_of_tp() return not self.tp or self.tp.rank == 0 end

--- The microbatches of all replicas for a batch of n samples: a list of {first, n}.
function Layout:microbatches(n)
  local list = {}
  for replica = 0, self.dp - 1 do
    local first, share = layout.share(n, self.dp, replica)
    for _, piece in ipairs(layout.cut(share, self.micro)) do
      table.insert(list, { first + piece[1], piece[2] })
    end
  end
  return list
end

--- The names of the stages' last units, stage 0's at 1; where a stage has none, of the one before.
function Layout:last_units()
  local names = {}
  for stage = 0, self.n_stages - 1 do
    local unit = self.units[self.last_unit[stage]]
    names[stage + 1] = unit and unit_name(unit) or false
  end
  return names
end

--- How the model lies on the ranks, in words.
function Layout:describe()
  local size = math.min(self.micro, self.n_samples)
  local rest = self.n_samples % size
  local tp = ""
  if self.tp then
    local is_cut = false
    for _, p in ipairs(self.params) do is_cut = is_cut or p.cut ~= nil end
    tp = (" x tp %d%s%s"):format(self.tp.size,
      self.tp.wants_sequence and " (sequence parallel)" or "",
      is_cut and "" or " (no layer is cut: see the option tp of nn.Linear)")
  end
  return ("layout: dp %d%s x pp %d, %s, %d microbatch%s of %d sample%s%s%s\n%s"):format(self.dp,
    tp, self.pp, self.sched:name(), self.m, self.m == 1 and "" or "es", size,
    size == 1 and "" or "s",
    self.dp > 1 and " a replica" or "", rest > 0 and (" (the last of %d)"):format(rest) or "",
    self.split.text)
end

--- What metrics say of it.
function Layout:summary()
  return {
    dp = self.dp, tp = self.mesh:size("tp"), pp = self.pp, stages = self.n_stages,
    microbatches = self.m,
    pipeline = self.sched:name(), sequence_parallel = self.tp and self.tp.wants_sequence or nil,
  }
end

return layout
