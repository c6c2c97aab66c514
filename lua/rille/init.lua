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
  split = "rille.split", Pipeline = "rille.pipeline",
}

-- A field that is there, or that a submodule brings; nil if there is none.
function core.find(key)
  local value, home = rawget(rille, key), homes[key]
  if value ~= nil or not home then return value end
  local module = require(home)
  value = rawget(rille, key)
  if value == nil then
    value = type(module) == "table" and rawget(module, key)
    if "rille." .. key == home and not value then value = module end
    rille[key] = value
  end
  return value
end

setmetatable(rille, {
  __index = function(_, key)
    local value = core.find(key)
    if value ~= nil or type(key) ~= "string" then return value end
    local names = {}
    for name in pairs(homes) do table.insert(names, name) end
    for name in pairs(rille) do table.insert(names, name) end
    table.sort(names)
    require "rille.fail"("rille has no field %q%s", key, rille.did_you_mean(key, names))
  end,
})

--- Ends the script: 0 ok, 1 error, 2 usage, 3 non-finite loss, 75 stopped with a checkpoint.
---@param code? integer
function rille.exit(code)
  require "rille.expect"("rille.exit", "code", code, "count?")
  os.exit(code or 0, true)
end

--- print from every rank, each line with the rank's number; print itself is rank 0's.
function rille.print_all(...)
  local words = table.pack(...)
  for i = 1, words.n do words[i] = tostring(words[i]) end
  local tag = core.world > 1 and ("[rank %d] "):format(core.rank) or ""
  io.stdout:write(tag .. table.concat(words, "\t") .. "\n") -- at once: lines of ranks may not mix
  io.stdout:flush()
end

return rille
