-- trainer_options - what rille.Trainer accepts; everything else is refused before anything is made.
local rille = require "rille"
local expect = require "rille.expect"
local fail = require "rille.fail"
local known = require "rille.known"

local names = {
  "batch", "checkpoint", "example", "fingerprint", "log", "loss", "model", "nonfinite", "optimizer",
  "out", "parallel", "recompute", "seed", "steps",
}

local kinds = {
  { "model", "module" }, { "loss", "function" }, { "optimizer", "string|table" },
  { "batch", "table" }, { "parallel", "table?" }, { "checkpoint", "table?" },
  { "example", "table?" },
  { "recompute", "boolean|string?" }, { "steps", "count?" }, { "seed", "integer?" },
  { "out", "path?" },
  { "log", "count?" }, { "fingerprint", "count?" }, { "nonfinite", "string?" },
}

local trainer_options = {}

--- Fails unless `options` may be given to rille.Trainer.
function trainer_options.check(options)
  known("Trainer", options, names)
  for _, row in ipairs(kinds) do
    local name, wanted = row[1], row[2]
    if options[name] == nil and wanted:sub(-1) ~= "?" then fail.usage("Trainer needs %s", name) end
    expect.option("Trainer", name, options[name], wanted)
  end
  local recompute = options.recompute
  if type(recompute) == "string" and recompute ~= "attention" then
    fail.usage("Trainer: recompute must be true, false or \"attention\", got %q", recompute)
  end
  local nonfinite = options.nonfinite
  if nonfinite and nonfinite ~= "stop" and nonfinite ~= "skip" then
    fail.usage("Trainer: nonfinite must be \"stop\" or \"skip\", got %q%s", nonfinite,
      rille.did_you_mean(nonfinite, { "stop", "skip" }))
  end
end

--- {global =, micro =} or {64, 4} -> both; micro is at most global.
---@return integer global, integer micro
function trainer_options.batch(batch)
  known("Trainer: batch", batch, { "global", "micro" })
  local global = batch.global or batch[1]
  local micro = batch.micro or batch[2] or global
  expect.option("Trainer", "batch.global (samples a step)", global, "positive")
  expect.option("Trainer", "batch.micro (samples a microbatch)", micro, "positive")
  return global, math.min(micro, global)
end

return trainer_options
