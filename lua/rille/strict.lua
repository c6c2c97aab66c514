-- strict - tables of functions whose misspelt fields are told: "nn has no field LayerNrm; did you
-- mean "LayerNorm"?". Whoever wants to know whether a field is there asks rawget.
local rille = require "rille"
local fail = require "rille.fail"

--- Makes `module` strict. `find(key)` looks further for fields that come at first use; `names()`
--- lists those for the message.
---@param name string what users call it
---@param module table
---@param find? fun(key: any): any
---@param names? fun(): string[]
---@return table module
return function(name, module, find, names)
  return setmetatable(module, { __index = function(_, key)
    local value = find and find(key)
    if value ~= nil then return value end
    if type(key) ~= "string" then return nil end
    local known = names and names() or {}
    for field in pairs(module) do
      if type(field) == "string" then table.insert(known, field) end
    end
    table.sort(known)
    fail("%s has no field %q%s", name, key, rille.did_you_mean(key, known))
  end })
end
