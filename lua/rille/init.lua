--- rille - the library as scripts see it: the functions made in C, and submodules loaded at first
--- use (rille.nn is require "rille.nn").
local rille <const> = ...

--- Modules of the library, and names that a module provides at the top level.
local modules <const> = {
  nn = "rille.nn", optim = "rille.optim", data = "rille.data", cli = "rille.cli",
}
local members <const> = {
  Trainer = "rille.trainer", help = "rille.help", gradcheck = "rille.gradcheck",
}

setmetatable(rille, {
  __index = function(self, key)
    local value
    if modules[key] then value = require(modules[key])
    elseif members[key] then value = require(members[key])[key] end
    if value ~= nil then rawset(self, key, value) end
    return value
  end,
})

return rille
