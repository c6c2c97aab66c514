--- rille - the library as scripts see it: the functions made in C, and submodules loaded at first
--- use (rille.nn is require "rille.nn").
local rille <const> = ...
local core <const> = rille.core

--- Names at the top level and the module that brings each: a table of that name, or the module
--- itself.
local homes <const> = {
  nn = "rille.nn", optim = "rille.optim", data = "rille.data", cli = "rille.cli",
  Trainer = "rille.trainer", add_loss = "rille.trainer", help = "rille.help",
  gradcheck = "rille.gradcheck", options = "rille.cli", did_you_mean = "rille.cli",
  sample = "rille.sample", Metrics = "rille.metrics", load = "rille.state", save = "rille.state",
  cross_entropy = "rille.loss", mse = "rille.loss",
  schedule = "rille.schedule", schedule_from = "rille.schedule", schedules = "rille.schedule",
}

setmetatable(rille, {
  __index = function(self, key)
    local home = homes[key]
    if not home then return nil end
    local module = require(home)
    local value = rawget(self, key)
    if value == nil then
      value = "rille." .. key == home and type(module) == "table" and module[key] == nil and module
        or module[key]
      rawset(self, key, value)
    end
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
