-- schedule - pipeline schedules: known ones by name, your own as an order of actions a rank, and
-- those of a file.
--
--     local recipe = rille.schedule {
--       name = "mine", stages_per_rank = 1,
--       order = function(r, p, m)          -- rank r of p, m microbatches: its list of actions
--         local list = {}
--         for i = 0, m - 1 do list[#list + 1] = r .. "F" .. i end
--         for i = 0, m - 1 do list[#list + 1] = r .. "B" .. i end
--         return list
--       end,
--     }
--     local sched = recipe:build { pp = 4, microbatches = 8 }
--     print(sched:text())
--
-- A recipe knows no sizes; build() binds it to them. What it gives has been checked and has its
-- messages; a schedule that breaks an invariant is refused with the checker's report.
local rille = require "rille"
local core = rille.core
local fail = require "rille.fail"
local known = require "rille.known"

local M = {}

---@class rille.Recipe
local Recipe = {}
Recipe.__index = Recipe
Recipe.__name = "rille.Recipe"

-- ---- known schedules

local function type_named(name)
  for _, t in ipairs(core.sched_types()) do
    if t.name == name then return t end
  end
end

--- The names of all known schedules, in the order of the documentation.
---@return string[]
function M.names()
  local names = {}
  for i, t in ipairs(core.sched_types()) do names[i] = t.name end
  return names
end

local function known_recipe(name)
  local found, nearest = core.sched_find(name)
  if not found then
    local hint = nearest and ("; did you mean %q?"):format(nearest) or "."
    fail.usage("there is no pipeline schedule %q%s There are %s; or a script (mine.lua) or a list "
      .. "of actions (mine.csv)", name, hint, table.concat(M.names(), ", "))
  end
  local t = type_named(found)
  return setmetatable({ name = found, type = t, stages_per_rank = nil }, Recipe)
end

-- ---- schedules of one's own

local words_of_placement = { loop = true, v = true, wave = true }

local function check_placement(placement)
  if placement == nil or type(placement) == "function" or words_of_placement[placement]
    or type(placement) == "table" then
    return placement or "loop"
  end
  fail("schedule: placement = %s, valid are \"loop\", \"v\", \"wave\", a list with the rank of "
    .. "each stage, or a function(p, v) that returns one", type(placement) == "string"
    and ("%q"):format(placement) or tostring(placement))
end

local function own_recipe(spec)
  known("schedule", spec, { "name", "placement", "stages_per_rank", "order", "memory" })
  local name = spec.name or "custom"
  if type(name) ~= "string" then fail("schedule: name must be a text, got %s", type(name)) end
  if type(spec.order) ~= "function" then
    fail("schedule %s needs order = function(r, p, m) that returns the list of rank r's actions, "
      .. "got %s", name, type(spec.order))
  end
  if spec.memory ~= nil and type(spec.memory) ~= "function" then
    fail("schedule %s: memory must be a function(r, p, m) that returns how many activations "
      .. "(stage, microbatch) rank r keeps at most; got %s", name, type(spec.memory))
  end
  local v = spec.stages_per_rank
  if v ~= nil and (math.type(v) ~= "integer" or v < 1) then
    fail("schedule %s: stages_per_rank = %s must be a whole number from 1 on", name, tostring(v))
  end
  return setmetatable({
    name = name, placement = check_placement(spec.placement), stages_per_rank = v,
    order = spec.order, memory = spec.memory,
  }, Recipe)
end

--- A recipe: of a known schedule by its name, or of your own from a table {name =, placement =,
--- stages_per_rank =, order =, memory =}.
---@param what string|table|rille.Recipe
---@return rille.Recipe
function M.schedule(what)
  if getmetatable(what) == Recipe then return what end
  if type(what) == "string" then return known_recipe(what) end
  if type(what) == "table" then return own_recipe(what) end
  fail("schedule takes a name or a table, got %s", type(what))
end

-- ---- files

local function read_csv(path)
  local file, why = io.open(path, "rb")
  if not file then fail.usage("the schedule %s cannot be read: %s", path, why) end
  local text = file:read("a")
  file:close()
  if not text then fail.usage("the schedule %s cannot be read", path) end
  return setmetatable({ name = path, csv = text }, Recipe)
end

local function run_script(path)
  local file, why = io.open(path, "rb")
  if not file then fail.usage("the schedule %s cannot be read: %s", path, why) end
  file:close()
  local chunk, wrong = loadfile(path, "t")
  if not chunk then fail("the schedule %s", wrong) end
  local _ <close> = setmetatable({}, { __close = function() M.script = nil end })
  M.script = path
  local recipe = chunk()
  if getmetatable(recipe) ~= Recipe then
    fail("the schedule %s must return a rille.schedule{...}; it returned %s", path, type(recipe))
  end
  return recipe
end

--- A recipe from what --pp-schedule may be: a known name, a script x.lua that returns a recipe, or
--- a file x.csv of actions, a row a rank.
---@param what string|rille.Recipe
---@return rille.Recipe
function M.from(what)
  if type(what) ~= "string" then return M.schedule(what) end
  if what:find("%.lua$") then return run_script(what) end
  if what:find("%.csv$") then return read_csv(what) end
  return known_recipe(what)
end

--- Refuses what does not belong in the script of a schedule, while one runs.
---@param what string
function M.refuse_in_script(what)
  if M.script then
    fail.usage("%s %s: the script of a schedule only returns a rille.schedule{...}", M.script, what)
  end
end

-- ---- sizes

local build_names = {
  "pp", "microbatches", "stages_per_rank", "group", "edges", "tied", "costs", "width",
}

local function check_size(name, value, words)
  if math.type(value) ~= "integer" or value < 1 or value > 1 << 24 then
    fail.usage("%s = %s must be a whole number from 1 on%s", name, tostring(value), words or "")
  end
end

local MICROBATCHES <const> = " (it is batch.global / (dp x batch.micro), rounded up)"

-- "1, 2, 3, ...", "2" or "2, 4, 6, ..."
local function valid_chunks(t)
  if t.chunks_max == t.chunks_min then return tostring(t.chunks_min) end
  return ("%d, %d, %d, ..."):format(t.chunks_min, t.chunks_min + t.chunks_step,
    t.chunks_min + 2 * t.chunks_step)
end

local function chunks_of_type(t, asked)
  local v = asked or t.chunks
  local is_valid = v >= t.chunks_min and (t.chunks_max == 0 or v <= t.chunks_max)
    and (v - t.chunks_min) % t.chunks_step == 0
  if is_valid then return v end
  local others = {}
  for _, other in ipairs(core.sched_types()) do
    if v >= other.chunks_min and (other.chunks_max == 0 or v <= other.chunks_max)
      and (v - other.chunks_min) % other.chunks_step == 0 then
      others[#others + 1] = other.name
    end
  end
  fail.usage("stages_per_rank = %d: the schedule %s has %s stage%s a rank; with %d there are %s", v,
    t.name, valid_chunks(t), t.chunks_max == 1 and "" or "s", v, table.concat(others, ", "))
end

-- Groups that cost interleaved nothing: N >= p that divides m or leaves a rest of at least p.
local function good_groups(p, m)
  local good = {}
  for n = math.min(p, m), m do
    if m % n == 0 or m % n >= p then good[#good + 1] = n end
  end
  return table.concat(good, ", ")
end

local function chunks_of(recipe, asked)
  if asked ~= nil then check_size("stages_per_rank", asked) end
  if recipe.type then return chunks_of_type(recipe.type, asked) end
  local own = recipe.stages_per_rank
  if own and asked and own ~= asked then
    fail.usage("stages_per_rank = %d, but the schedule %s has stages_per_rank = %d", asked,
      recipe.name, own)
  end
  return own or asked or 1
end

local function check_sizes(recipe, o)
  check_size("pp", o.pp)
  check_size("microbatches", o.microbatches, MICROBATCHES)
  if o.group ~= nil then
    check_size("group", o.group)
    if not recipe.type or recipe.name ~= "interleaved" then
      fail.usage("group = %d: only the schedule interleaved has groups, this is %s", o.group,
        recipe.name)
    end
  end
  return chunks_of(recipe, o.stages_per_rank)
end

-- ---- building

local function placement_of(recipe, p, v)
  local placement = recipe.placement
  if type(placement) == "function" then placement = placement(p, v) end
  if type(placement) ~= "table" then return check_placement(placement) end
  if #placement ~= p * v then
    fail("schedule %s: placement names the ranks of %d stages, but pp = %d with stages_per_rank = "
      .. "%d make %d", recipe.name, #placement, p, v, p * v)
  end
  for i, rank in ipairs(placement) do
    if math.type(rank) ~= "integer" or rank < 0 or rank >= p then
      fail("schedule %s: placement puts stage %d on rank %s; ranks are 0 to %d", recipe.name, i - 1,
        tostring(rank), p - 1)
    end
  end
  return placement
end

local function push_order(recipe, box, p, m)
  for r = 0, p - 1 do
    local call = ("schedule %s: order(%d, %d, %d)"):format(recipe.name, r, p, m)
    local list = recipe.order(r, p, m)
    if type(list) ~= "table" then
      fail("%s must return a list of actions like \"%dF0\", got %s", call, r, type(list))
    end
    for i = 1, #list do
      if type(list[i]) ~= "string" then
        fail("%s[%d] is %s; actions are texts like \"%dF0\"", call, i, tostring(list[i]), r)
      end
    end
    local _, words, i = core.sched_push(box, r, list)
    if words then
      fail("%s[%d] is %q, which is no action of rank %d; they look like 2F0, 2I0, 2W0, 2B0 (stage, "
        .. "kind, microbatch) or (2F5;1B3)OVERLAP_F_B", call, i, list[i], r)
    end
    if recipe.memory then
      local chunks = recipe.memory(r, p, m)
      if math.type(chunks) ~= "integer" or chunks < 0 then
        fail("schedule %s: memory(%d, %d, %d) must be a number of activations (stage, microbatch), "
          .. "got %s", recipe.name, r, p, m, tostring(chunks))
      end
      core.sched_declare(box, r, chunks)
    end
  end
end

local function made(box, words)
  if not box then fail("schedule: %s", words) end
  return box
end

-- The schedule before it is checked and gets its messages.
local function make(recipe, o)
  if recipe.csv then
    local box, words = core.sched_new { name = recipe.name, csv = recipe.csv }
    if not box then fail.usage("the schedule %s: %s", recipe.name, words) end
    return box
  end
  local v = check_sizes(recipe, o)
  local p, m = o.pp, o.microbatches
  if recipe.type then
    return made(core.sched_new { name = recipe.name, type = recipe.name, ranks = p, chunks = v,
      mbs = m, group = o.group or 0 })
  end
  local box = made(core.sched_new { name = recipe.name, ranks = p, chunks = v, mbs = m,
    placement = placement_of(recipe, p, v) })
  push_order(recipe, box, p, m)
  return box
end

-- What a file says about sizes must be what the options say.
local function check_csv_sizes(recipe, sched, o)
  local has = { pp = sched:ranks(), microbatches = sched:mbs(), stages_per_rank = sched:chunks() }
  for _, name in ipairs { "pp", "microbatches", "stages_per_rank" } do
    if o[name] and o[name] ~= has[name] then
      fail.usage("%s = %d%s, but the schedule %s is for %s = %d", name, o[name],
        name == "microbatches" and MICROBATCHES or "", recipe.name, name, has[name])
    end
  end
end

local function refuse(recipe, o, words)
  local hint = ""
  if recipe.name == "interleaved" and o.group then
    hint = ("\n    hint: group = %d does not suit microbatches = %d and pp = %d; good values are "
      .. "%s"):format(o.group, o.microbatches, o.pp, good_groups(o.pp, o.microbatches))
  end
  fail.usage("%s", "the schedule is refused: " .. words .. hint)
end

--- Binds the recipe to sizes: generated, checked, lowered to messages, checked again.
---   pp               ranks of the pipeline
---   microbatches     of one pipeline and step
---   stages_per_rank  default: the schedule's own
---   group            of interleaved: microbatches of a group
---   edges            {{from, to, has_grad}, ...}: values that flow beside stage s -> s + 1
---   tied             {{stage, stage, ...}, ...}: stages that share a weight
---   costs            F, I, W, hop, ... as for :simulate; they order the messages
---@param o table
---@return userdata schedule
function Recipe:build(o)
  known("schedule:build", o, build_names)
  local box = make(self, o)
  for _, edge in ipairs(o.edges or {}) do
    local has_grad = edge.has_grad
    if has_grad == nil then has_grad = edge[3] end
    made(core.sched_edge(box, edge.from or edge[1], edge.to or edge[2], has_grad ~= false))
  end
  for _, stages in ipairs(o.tied or {}) do made(core.sched_tied(box, stages)) end
  local _, words = core.sched_finish(box, o.costs, o.width or 100)
  if words then refuse(self, o, words) end
  if self.csv then check_csv_sizes(self, box, o) end
  return box
end

function Recipe:__tostring() return "recipe of schedule " .. self.name end

--- For `rille schedule x.lua`, which checks and reports itself.
function M.unchecked(path, o)
  return make(M.from(path), o)
end

M.schedules = M.names
M.Recipe = Recipe
M.schedule_from = M.from

return M
