-- expect - what the arguments of public functions must be, in words that a user understands.
--
--     expect("rille.load", "path", path, "path")
--     expect("sample", "ids", ids, "ids")
--     expect("Trainer:evaluate", "n", n, "count?")        -- ?: may be absent
local rille = require "rille"
local fail = require "rille.fail"

local expect = {}

local function is_callable(v)
  local meta = type(v) == "table" and getmetatable(v)
  return type(v) == "function" or type(meta) == "table" and meta.__call ~= nil
end

local function is_integer(v, min) return math.type(v) == "integer" and (not min or v >= min) end

local function is_table(v) return type(v) == "table" end

local kinds = {
  string = { "a string", function(v) return type(v) == "string" end },
  path = { "a path", function(v) return type(v) == "string" end },
  table = { "a table", is_table },
  list = { "a list", is_table },
  ids = { "a list or a tensor of ids", function(v) return is_table(v) or rille.is_tensor(v) end },
  ["function"] = { "a function", is_callable },
  boolean = { "true or false", function(v) return type(v) == "boolean" end },
  number = { "a number", function(v) return type(v) == "number" end },
  integer = { "an integer", is_integer },
  count = { "an integer from 0 on", function(v) return is_integer(v, 0) end },
  positive = { "an integer from 1 on", function(v) return is_integer(v, 1) end },
  tensor = { "a tensor", function(v) return rille.is_tensor(v) end },
  module = { "a module", function(v) return is_table(v) and rawget(v, "_items") ~= nil end },
}

--- What a value is, short: `nil`, `the string "a"`, `3`, `a tensor f32[2]`, `a Linear`, `a table`.
---@return string
function expect.describe(v)
  if v == nil or type(v) == "boolean" then return tostring(v) end
  if type(v) == "number" then return tostring(v) end
  if type(v) == "string" then
    return ("the string %q"):format(#v > 40 and v:sub(1, 40) .. "..." or v)
  end
  if rille.is_tensor(v) then
    return ("a tensor %s[%s]"):format(v:dtype(), table.concat({ v:shape() }, ", "))
  end
  if kinds.module[2](v) then return "a module " .. v._class end
  return "a " .. type(v)
end

-- nil if the value is of one of the kinds, else the words for what it must be.
local function refusal(value, wanted)
  if wanted:sub(-1) == "?" then
    if value == nil then return nil end
    wanted = wanted:sub(1, -2)
  end
  local words = {}
  for name in wanted:gmatch("[^|]+") do
    if kinds[name][2](value) then return nil end
    table.insert(words, kinds[name][1])
  end
  return table.concat(words, " or ")
end

local function words_for(where, name, words, value)
  return ("%s: %s must be %s, got %s"):format(where, name, words, expect.describe(value))
end

--- Refuses an option (exit code 2 if it ends the script); `name` is the option's.
---@param where string
---@param name string
---@param value any
---@param wanted string kinds, as for expect itself
function expect.option(where, name, value, wanted)
  local words = refusal(value, wanted)
  if words then fail.usage("%s", words_for(where, name, words, value)) end
end

--- Fails unless a value is of one of the kinds.
---@param where string the function, as users call it
---@param name string the argument
---@param value any
---@param wanted string kinds with | between them, and ? at the end if it may be absent
return setmetatable(expect, { __call = function(_, where, name, value, wanted)
  local words = refusal(value, wanted)
  if words then fail("%s", words_for(where, name, words, value)) end
end })
