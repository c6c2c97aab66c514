-- known - tables of options hold known names only: a typo is refused with the nearest one.
local rille = require "rille"
local expect = require "rille.expect"
local fail = require "rille.fail"

--- Fails unless `given` is a table all of whose string keys are among `names`.
---@param what string whose options they are, for the message
---@param given any
---@param names string[]
return function(what, given, names)
  if type(given) ~= "table" then
    fail.usage("%s takes a table, got %s", what, expect.describe(given))
  end
  for key in pairs(given) do
    local found = type(key) ~= "string"
    for _, name in ipairs(names) do found = found or name == key end
    if not found then
      fail.usage("%s has no option %q%s", what, key, rille.did_you_mean(key, names))
    end
  end
end
