-- state - tensors in safetensors files, by name.
local rille = require "rille"
local state = {}
local core = rille.core

--- Writes tensors to a safetensors file: a list of {name, tensor}, or a table name -> tensor
--- (sorted by name).
--- The file appears whole or not at all. metadata: table of strings.
function state.save(path, tensors, metadata)
  local list = {}
  if #tensors > 0 then
    list = tensors
  else
    for name, tensor in pairs(tensors) do table.insert(list, { name, tensor }) end
    table.sort(list, function(a, b) return a[1] < b[1] end)
  end
  core.safetensors_write(path, list, metadata)
end

--- Reads a safetensors file (or the index of a sharded one): a table name -> tensor, and its
--- metadata.
function state.load(path)
  local file = core.safetensors_open(path)
  local tensors = {}
  for _, name in ipairs(file:names()) do tensors[name] = file:read(name) end
  return tensors, file:metadata()
end

return state
