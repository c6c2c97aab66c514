-- nn - modules: classes whose parameters and children register in order of creation.
--
-- A module is a table whose class has a method forward; calling the module calls it. Its children
-- and parameters are the fields assigned to it; their path from the root ("h.3.attn.weight") names
-- them in state dicts, error messages and random streams. Nothing here holds values: a parameter is
-- declared with a shape and a recipe, and gets storage when it is first touched or an optimizer
-- gathers it.
--
-- Invariants:
--  1. Order is order of assignment, everywhere (parameters, units, state dict); never pairs().
--  2. A module has one parent; its path, and the names of its parameters, follow when it gets one.

local rille = require "rille"
local core = rille.core
local expect = require "rille.expect"
local fail = require "rille.fail"
local known = require "rille.known"
local strict = require "rille.strict"

-- What the trainer sets while a step runs; absent otherwise, which is no misspelling.
local of_the_step = { staged_updates = true, added_losses = true }

---@class rille.nn
local nn = strict("nn", {}, function(key) if of_the_step[key] then return false end end)

---@class rille.Module
---@field forward fun(self: rille.Module, ...): any
local Module = {}
nn.Module = Module

-- ---- classes

local function is_module(v) return type(v) == "table" and rawget(v, "_items") ~= nil end
nn.is_module = is_module

local function is_parameter(v) return rille.is_tensor(v) and v:is_param() end

local function join(path, name) return path == "" and name or path .. "." .. name end

-- Gives a module, and all below it, the path that its place implies (inv. 2).
local function set_path(module, path)
  rawset(module, "_path", path)
  for _, name in ipairs(module._order) do
    local item = module._items[name]
    if is_module(item) then
      set_path(item, join(path, name))
    else
      item:rename(join(path, name))
    end
  end
end

local function remember(module, name, item)
  if module._items[name] == nil then table.insert(module._order, name) end
  module._items[name] = item
end

local function forget(module, name)
  if module._items[name] == nil then return end
  module._items[name] = nil
  for i, present in ipairs(module._order) do
    if present == name then return table.remove(module._order, i) end
  end
end

local function new_index(module, name, value)
  if is_module(value) then
    if value._parent and value._parent ~= module then
      fail("%s already belongs to %s as %q; make a second module, or tie its parameters",
        value._class, value._parent._class, value._path)
    end
    remember(module, name, value)
    rawset(value, "_parent", module)
    set_path(value, join(module._path, name))
  elseif is_parameter(value) then
    remember(module, name, value)
    value:rename(join(module._path, name))
  else
    forget(module, name)
    rawset(module, name, value)
  end
end

-- forward; of a module with time = "whole", where time is cut, on whole activations.
local function run_forward(module, ...)
  if rawget(module, "_keeps_time") then return module._tp:whole(module, ...) end
  return module:forward(...)
end

-- forward, then the hooks; what a hook returns replaces the results.
local function forward_with_hooks(module, ...)
  local results = table.pack(run_forward(module, ...))
  local hooks = rawget(module, "_hooks")
  for _, hook in ipairs(table.move(hooks, 1, #hooks, 1, {})) do -- a hook may remove itself
    local replaced = table.pack(hook(module, table.unpack(results, 1, results.n)))
    if replaced.n > 0 and replaced[1] ~= nil then results = replaced end
  end
  return table.unpack(results, 1, results.n)
end

local function call(module, ...)
  local forward = rawget(module, "_hooks") and forward_with_hooks
    or rawget(module, "_keeps_time") and run_forward or module.forward
  return core.module_call(module._path, forward, module, ...)
end

local function new_instance(class, ...)
  local module = {
    _items = {}, _order = {}, _path = "", _class = class._name, training = true, _buffers = {},
  }
  setmetatable(module, class._instance)
  module:init(...)
  return module
end

--- A new class of modules: `local Block = nn.class "Block"`, then Block:init(...) and
--- Block:forward(...).
---@param name string
---@param base table? a class to inherit from
function nn.class(name, base)
  if type(name) ~= "string" then
    fail("nn.class needs a name, as in nn.class \"Block\"; got %s", expect.describe(name))
  end
  if base ~= nil and (type(base) ~= "table" or not rawget(base, "_instance")) then
    fail("nn.class: the base of %s must be a class of modules, got %s", name, expect.describe(base))
  end
  local class = setmetatable({ _name = name }, { __index = base or Module, __call = new_instance,
    __tostring = function() return "class " .. name end })
  class._instance = {
    __index = function(module, key)
      local v = class[key]
      if v ~= nil then return v end
      local items = rawget(module, "_items")
      return items and items[key]
    end,
    __newindex = new_index,
    __call = call,
    __tostring = function(module) return module:describe() end,
    __name = name,
  }
  return class
end

function Module.init() end

function Module:forward()
  fail("%s has no forward: define function %s:forward(x)", self._class, self._class)
end

-- ---- walking

--- Children in order: for name, module in m:children() do
function Module:children()
  local i = 0
  return function()
    while true do
      i = i + 1
      local name = self._order[i]
      if name == nil then return nil end
      if is_module(self._items[name]) then return name, self._items[name] end
    end
  end
end

--- The module itself and all below it, parents first.
function Module:modules()
  local list = { self }
  for _, child in self:children() do
    table.move(child:modules(), 1, #child:modules(), #list + 1, list)
  end
  return list
end

--- Parameters as a list of {name, tensor}; one that is used twice (tied) is there once.
---@return table[]
function Module:named_parameters()
  local list = {}
  for _, module in ipairs(self:modules()) do
    for _, name in ipairs(module._order) do
      local item = module._items[name]
      if not is_module(item) then table.insert(list, { join(module._path, name), item }) end
    end
  end
  return list
end

--- Parameters of other modules that this one uses too: a list of {name, tensor}. By default what
--- its field `tied` names; a class that uses more redefines it.
function Module:shared_parameters()
  local path = rawget(self, "tied")
  if type(path) ~= "string" then return {} end
  local tensor = self:root():get(path)
  if not is_parameter(tensor) then
    error(("%s: tied = %q is no parameter"):format(self._path, path), 0)
  end
  return { { path, tensor } }
end

--- All parameters that the module's forward reads, its own and shared ones, with their full names.
function Module:used_parameters()
  local list, seen = self:named_parameters(), {}
  for _, entry in ipairs(list) do seen[entry[1]] = true end
  for _, module in ipairs(self:modules()) do
    for _, entry in ipairs(module:shared_parameters()) do
      if not seen[entry[1]] then
        seen[entry[1]] = true
        table.insert(list, entry)
      end
    end
  end
  return list
end

--- The parameters alone.
function Module:parameters()
  local list = {}
  for i, entry in ipairs(self:named_parameters()) do list[i] = entry[2] end
  return list
end

--- The number of elements of all parameters, also of what other ranks hold.
function Module:n_parameters()
  local n = 0
  for _, p in ipairs(self:parameters()) do
    local elements = 1
    for _, length in ipairs(core.full_shape(p)) do elements = elements * length end
    n = n + elements
  end
  return n
end

--- Says how ranks of a tp group share the module's own parameters (rille.tensor_parallel's plan):
--- by default not at all. Its children say it for theirs.
function Module.tensor_parallel(_, _) end

--- The module or parameter at a path below this one: m:get("h.3.attn").
function Module:get(path)
  expect("get", "path", path, "string")
  local at = self
  for name in path:gmatch("[^.]+") do
    local below = is_module(at) and at._items[name]
    if not below then
      fail("there is no %q in %s: %q has %s", path, self._class, is_module(at) and
        (at._path == "" and at._class or at._path) or name,
        is_module(at) and table.concat(at._order, ", ") or "no parts")
    end
    at = below
  end
  return at
end

--- The root of the tree that this module is in.
function Module:root()
  local at = self
  while rawget(at, "_parent") do at = at._parent end
  return at
end

--- fn(module, ...results) after every forward of the module at `path`; what it returns replaces the
--- results.
---@return fun() remove
function Module:on(path, fn)
  expect("on", "path", path, "string")
  expect("on", "fn", fn, "function")
  local module = path == "" and self or self:get(path)
  local hooks = rawget(module, "_hooks") or {}
  rawset(module, "_hooks", hooks)
  table.insert(hooks, fn)
  return function()
    for i, hook in ipairs(hooks) do
      if hook == fn then table.remove(hooks, i) break end
    end
    if #hooks == 0 then rawset(module, "_hooks", nil) end
  end
end

--- The parts that a pipeline may put on different ranks: a list of modules, called in order.
function Module:units()
  fail([[%s has no units to split: list the modules that its forward calls, in order, like
  function %s:units() return {self.embed, self.block0, self.block1, self.head} end]],
    self._class, self._class)
end

-- ---- modes and precision

--- Dropout and the like are on (default) or off.
function Module:train(on)
  for _, module in ipairs(self:modules()) do rawset(module, "training", on ~= false) end
  return self
end

function Module:eval() return self:train(false) end

--- Parameters want gradients (default) or are frozen.
function Module:requires_grad_(on)
  for _, p in ipairs(self:parameters()) do p:freeze(on == false) end
  return self
end

-- ---- buffers: values written by forward, applied once a step in microbatch order

--- Declares a tensor that belongs to the module but is no parameter (running statistics), when the
--- module is made. Over several ranks a model with buffers waits in each step for all ranks' word
--- that the step counts, before its weights are updated.
function Module:buffer(name, tensor)
  expect("buffer", "name", name, "string")
  expect("buffer", "tensor", tensor, "tensor")
  self._buffers[name] = tensor
  table.insert(self._buffers, name)
  rawset(self, name, tensor)
end

--- Changes a buffer: fn(old) -> new. Within a trainer step it is applied at the step's end, in the
--- order of microbatches, if the step updates the weights; a recomputation never applies it.
function Module:update_buffer(name, fn)
  if self._buffers[name] == nil then
    fail("update_buffer: %s has no buffer %s", self._class, expect.describe(name))
  end
  expect("update_buffer", "fn", fn, "function")
  local function apply()
    rille.no_grad(function() self._buffers[name]:copy_(fn(self._buffers[name])) end)
  end
  if core.recomputing() then return end
  local staged = nn.staged_updates
  if not staged then return apply() end
  table.insert(staged, {
    mb = core.place().microbatch, apply = apply, buffer = self._buffers[name],
  })
end

-- ---- state

--- Buffers as a list of {name, tensor}.
function Module:named_buffers()
  local list = {}
  for _, module in ipairs(self:modules()) do
    for _, name in ipairs(module._buffers) do
      table.insert(list, { join(module._path, name), module._buffers[name] })
    end
  end
  return list
end

--- All parameters and buffers as a list of {name, tensor}; nothing is copied.
function Module:state_dict()
  local list = self:named_parameters()
  for _, entry in ipairs(self:named_buffers()) do table.insert(list, entry) end
  return list
end

local function shape_text(t) return "[" .. table.concat({ t:shape() }, ", ") .. "]" end

-- Of a parameter the whole's, where ranks have parts of it.
local function whole_shape_text(t)
  if not is_parameter(t) then return shape_text(t) end
  return "[" .. table.concat(core.full_shape(t), ", ") .. "]"
end

-- Copies values into a tensor: of a parameter that is cut the part that this rank has.
local function copy_whole(target, value)
  local shard = is_parameter(target) and core.shard_of(target)
  if not shard then return target:copy_(value) end
  local cut = { dim = shard.dim, runs = function() return shard.runs end }
  require "rille.tensor_parallel".take(cut, 0, value, target)
end

--- Copies values from a list of {name, tensor}, a table name -> tensor, or a path of a safetensors
--- file. A rank that has parts of parameters takes them from the whole ones.
--- One error reports all that is missing, superfluous or of another shape; nothing is changed then.
---@param state string|table
---@param options? {strict: boolean?}
function Module:load_state_dict(state, options)
  expect("load_state_dict", "state", state, "path|table")
  if options ~= nil then known("load_state_dict", options, { "strict" }) end
  local source = {}
  if type(state) == "string" then state = rille.load(state) end
  for _, entry in ipairs(require "rille.state".list_of(state, "load_state_dict")) do
    source[entry[1]] = entry[2]
  end
  local problems, expected, copies = {}, {}, {}
  for _, entry in ipairs(self:state_dict()) do
    local name, target = entry[1], entry[2]
    expected[name] = true
    local value = source[name]
    if not value then
      table.insert(problems, ("  %s %s is missing"):format(name, whole_shape_text(target)))
    elseif shape_text(value) ~= whole_shape_text(target) then
      table.insert(problems, ("  %s is %s here and %s there"):format(name,
        whole_shape_text(target), shape_text(value)))
    else
      table.insert(copies, { target, value })
    end
  end
  local extra = {}
  for name in pairs(source) do
    if not expected[name] then table.insert(extra, name) end
  end
  table.sort(extra)
  for _, name in ipairs(extra) do
    table.insert(problems, ("  %s %s is not in the model"):format(name, shape_text(source[name])))
  end
  local is_strict = not options or options.strict ~= false
  if #problems > 0 and is_strict then
    fail("load_state_dict: %d of the names do not match\n%s\n"
      .. "  hint: {strict = false} copies the rest", #problems, table.concat(problems, "\n"))
  end
  rille.no_grad(function()
    for _, pair in ipairs(copies) do copy_whole(pair[1], pair[2]) end
  end)
  return problems
end

--- Writes parameters and buffers to a safetensors file, by name.
function Module:save(path)
  expect("save", "path", path, "path")
  for _, entry in ipairs(self:named_parameters()) do
    if core.shard_of(entry[2]) then
      fail("save: this rank has a part of %s, %s of %s\n  hint: trainer:export(path) writes all of "
        .. "the model", entry[1], shape_text(entry[2]), whole_shape_text(entry[2]))
    end
  end
  rille.save(path, self:state_dict())
end

function Module.extra() return "" end

--- A tree of the module's parts with the shapes of parameters.
function Module:describe(indent, name)
  indent = indent or ""
  local head = indent .. (name and name .. ": " or "") .. self._class .. self:extra()
  local lines = { head }
  for _, key in ipairs(self._order) do
    local item = self._items[key]
    if is_module(item) then
      table.insert(lines, item:describe(indent .. "  ", key))
    else
      table.insert(lines, ("%s  %s %s%s"):format(indent, key, item:dtype(), shape_text(item)))
    end
  end
  return table.concat(lines, "\n")
end

-- ---- containers

--- Calls a unit: it gets the values of the one before it, then the named values that it reads
--- (`reads`, a list of names); the last ones that it returns are those it writes (`writes`). Named
--- values reach units far behind: skip connections, an encoder's output.
---@param run fun(unit: rille.Module, ...): ... how to call it
---@param values table what the unit before it returned, packed
---@param named table<string, rille.Tensor> read and written
---@return table values packed
function nn.call_unit(run, unit, values, named)
  local reads, writes = unit.reads, unit.writes
  if reads then
    values = table.pack(table.unpack(values, 1, values.n))
    for _, name in ipairs(reads) do
      if named[name] == nil then
        error(("%s reads the value %q, which no unit before it has written"):format(
          unit._path == "" and unit._class or unit._path, name), 0)
      end
      values.n = values.n + 1
      values[values.n] = named[name]
    end
  end
  local results = table.pack(run(unit, table.unpack(values, 1, values.n)))
  if writes then
    if results.n <= #writes then
      error(("%s returned %d values; it writes %d named ones (%s), which come after the others")
        :format(unit._path == "" and unit._class or unit._path, results.n, #writes,
          table.concat(writes, ", ")), 0)
    end
    for i, name in ipairs(writes) do
      local at = results.n - #writes + i
      named[name], results[at] = results[at], nil
    end
    results.n = results.n - #writes
  end
  return results
end

local function call_module(module, ...) return module(...) end

local chain_values -- named values of the outermost chain that runs

-- Runs modules one after the other: what one returns, the next one gets.
local function run_chain(modules, ...)
  local outer <const> = chain_values
  local _ <close> = setmetatable({}, { __close = function() chain_values = outer end })
  chain_values = outer or {}
  local values = table.pack(...)
  for _, module in ipairs(modules) do
    values = nn.call_unit(call_module, module, values, chain_values)
  end
  return table.unpack(values, 1, values.n)
end

local function chain_units(self)
  local list = {}
  for _, child in self:children() do
    if child.units ~= Module.units then
      for _, unit in ipairs(child:units()) do table.insert(list, unit) end
    else
      table.insert(list, child)
    end
  end
  return list
end

local function chain_forward(self, ...)
  local modules = {}
  for _, child in self:children() do table.insert(modules, child) end
  return run_chain(modules, ...)
end

--- Modules in a row: nn.Sequential{{"wte", embedding}, {"h", blocks}} or nn.Sequential{a, b} (named
--- "0", "1").
local Sequential = nn.class "Sequential"
nn.Sequential = Sequential

function Sequential:init(list)
  if type(list) ~= "table" or is_module(list) then
    fail("nn.Sequential takes one table: nn.Sequential{{\"name\", module}, ...}")
  end
  for i, entry in ipairs(list) do
    local name, module = tostring(i - 1), entry
    if not is_module(entry) and type(entry) == "table" then name, module = entry[1], entry[2] end
    if not is_module(module) then
      fail("nn.Sequential: entry %d is %s, not a module or {name, module}", i - 1,
        expect.describe(module))
    end
    expect("nn.Sequential", "a name", name, "string")
    if self._items[name] then fail("nn.Sequential: %q is there twice", name) end
    self[name] = module
  end
end
Sequential.forward = chain_forward
Sequential.units = chain_units

--- n modules in a row made by fn(i), i = 0 .. n-1; each is a unit.
local Repeat = nn.class "Repeat"
nn.Repeat = Repeat

function Repeat:init(...)
  local o = nn.arguments("Repeat", { ... }, { "n", "fn" }, {},
    { n = "count", fn = "function" })
  local n, fn = o.n, o.fn
  for i = 0, n - 1 do
    local module = fn(i)
    if not is_module(module) then
      fail("nn.Repeat: the function gave %s for i = %d, not a module", expect.describe(module), i)
    end
    self[tostring(i)] = module
  end
end
Repeat.forward = chain_forward
Repeat.units = chain_units

--- A list of modules to call as one likes: self.blocks[0], #self.blocks, for i, m in
--- self.blocks:each().
local List = nn.class "List"
nn.List = List

function List:init(list)
  expect("nn.List", "the argument", list, "list?")
  for _, module in ipairs(list or {}) do self:append(module) end
end

function List:append(module)
  expect("nn.List", "an entry", module, "module")
  self[tostring(#self._order)] = module
  return self
end

function List:each()
  local i = -1
  return function()
    i = i + 1
    local module = self._items[tostring(i)]
    if module then return i, module end
  end
end

List._instance.__len = function(list) return #list._order end
do
  local index = List._instance.__index
  List._instance.__index = function(list, key)
    if math.type(key) == "integer" then
      local n = #rawget(list, "_order")
      local module = list._items[tostring(key < 0 and key + n or key)]
      if not module then fail("List: index %d, valid are 0 to %d", key, n - 1) end
      return module
    end
    return index(list, key)
  end
end

-- ---- options of constructors

-- Every value is of the kind that `kinds` says, or of its default's type.
local function check_kinds(class, out, defaults, kinds)
  for name, kind in pairs(kinds) do expect.option(class, name, out[name], kind) end
  for name, default in pairs(defaults) do
    local kind = math.type(default) == "integer" and "integer" or type(default)
    if not kinds[name] and default ~= nn.none then
      expect.option(class, name, out[name], kind)
    end
  end
end

--- Positional arguments, or one table whose array part is positional and whose hash part is
--- options:
--- arguments("Linear", {...}, {"d_in", "d_out"}, {bias = true}, {d_in = "count"}) -> table by name.
--- Unknown ones are refused, and values that are not of the kind that `kinds` (see expect) or the
--- default's type says.
---@param class string
---@param given table
---@param names string[] of the positional ones, which must be there
---@param defaults table of the options; nn.none: none
---@param kinds? table<string, string>
---@return table
function nn.arguments(class, given, names, defaults, kinds)
  local function is_plain(v) return type(v) == "table" and getmetatable(v) == nil end
  local out = {}
  for key, value in pairs(defaults) do
    if value ~= nn.none then out[key] = value end
  end
  local list, options = given, nil
  if #given == 1 and is_plain(given[1]) then
    list = given[1]
    options = given[1]
  elseif is_plain(given[#given]) then
    options = given[#given]
    list = table.move(given, 1, #given - 1, 1, {})
  end
  if #list > #names then
    fail("%s takes %s, got %d values", class, table.concat(names, ", "), #list)
  end
  for i, value in ipairs(list) do out[names[i]] = value end
  if options then
    local all = table.move(names, 1, #names, 1, {})
    for name in pairs(defaults) do table.insert(all, name) end
    table.sort(all)
    known(class, options, all)
    for key, value in pairs(options) do
      if type(key) == "string" then out[key] = value end
    end
  end
  for _, name in ipairs(names) do
    if out[name] == nil and defaults[name] == nil then
      fail("%s needs %s", class, name)
    end
  end
  check_kinds(class, out, defaults, kinds or {})
  return out
end
nn.none = setmetatable({}, { __tostring = function() return "none" end })

--- A parameter: shape, then options dtype and init, a function of the parameter.
function nn.Parameter(shape, options)
  options = options or {}
  expect("nn.Parameter", "shape", shape, "list")
  known("nn.Parameter", options, { "dtype", "init" })
  expect("nn.Parameter", "init", options.init, "function?")
  local p = core.param("parameter", shape, { dtype = options.dtype or "f32" })
  if options.init then options.init(p) end
  return p
end

package.loaded["rille.nn"] = nn -- the layers and losses below add to it
require "rille.layers"
require "rille.loss"

return nn
