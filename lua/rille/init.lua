--- rille - the library as scripts see it: the functions made in C, and submodules loaded at first
--- use (rille.nn is require "rille.nn").
local rille <const> = ...
local core <const> = rille.core

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

--- Ends the script: 0 ok, 1 error, 2 usage, 3 non-finite loss, 75 stopped with a checkpoint.
---@param code? integer
function rille.exit(code)
  os.exit(code or 0, true)
end

--- print from every rank, each line with the rank's number; print itself is rank 0's.
function rille.print_all(...)
  local words = table.pack(...)
  for i = 1, words.n do words[i] = tostring(words[i]) end
  local tag = core.world > 1 and ("[rank %d] "):format(core.rank) or ""
  io.stdout:write(tag, table.concat(words, "\t"), "\n")
  io.stdout:flush()
end

return rille
