-- state - tensors in safetensors files, by name.
local rille = require "rille"
local expect = require "rille.expect"
local fail = require "rille.fail"
local state = {}
local core = rille.core

--- Writes tensors to a safetensors file: a list of {name, tensor}, or a table name -> tensor
--- (sorted by name).
--- The file appears whole or not at all. metadata: table of strings.
---@param path string
---@param tensors table
---@param metadata? table<string, string>
function state.save(path, tensors, metadata)
  expect("rille.save", "path", path, "path")
  expect("rille.save", "tensors", tensors, "table")
  expect("rille.save", "metadata", metadata, "table?")
  core.safetensors_write(path, state.list_of(tensors, "rille.save"), metadata)
end

--- A list of {name, tensor} from such a list or from a table name -> tensor, sorted by name.
---@param tensors table
---@param where string the function that wants it, for messages
---@return table[]
function state.list_of(tensors, where)
  local list = {}
  for key, value in pairs(tensors) do
    local entry = math.type(key) == "integer" and value or { key, value }
    if type(entry) ~= "table" or type(entry[1]) ~= "string" or not rille.is_tensor(entry[2]) then
      fail("%s: entry %s is %s, where {name, tensor} or name = tensor is wanted", where,
        tostring(key), expect.describe(value))
    end
    if entry ~= value then table.insert(list, entry) end
  end
  table.sort(list, function(a, b) return a[1] < b[1] end)
  table.move(list, 1, #list, #tensors + 1)
  return table.move(tensors, 1, #tensors, 1, list)
end

--- Reads a safetensors file (or the index of a sharded one): a table name -> tensor, and its
--- metadata.
---@param path string
function state.load(path)
  expect("rille.load", "path", path, "path")
  local file = core.safetensors_open(path)
  local tensors = {}
  for _, name in ipairs(file:names()) do tensors[name] = file:read(name) end
  return tensors, file:metadata()
end

return state
