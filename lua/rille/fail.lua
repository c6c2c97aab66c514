-- fail - errors of the library that name the script's line: fail("there is no file %s", path).
-- fail.usage(...) is the same for an option that is refused: a script that it ends has exit code 2.
local rille = require "rille"
local core = rille.core

local fail = {}

local function is_library(info)
  return info.what == "C" or info.source:find("^=rille/") ~= nil
end

-- Words with the line of the innermost function that is not the library's.
local function located(words, ...)
  if select("#", ...) > 0 then words = words:format(...) end
  local level = 3
  local info = debug.getinfo(level, "Sl")
  while info and is_library(info) do
    level = level + 1
    info = debug.getinfo(level, "Sl")
  end
  return info and ("%s:%d: %s"):format(info.short_src, info.currentline, words) or words
end

--- An option's value is refused.
---@param words string as for string.format
function fail.usage(words, ...)
  words = located(words, ...)
  core.usage_words = words -- the program looks whether this is what ended the script
  error(words, 0)
end

--- Raises an error at the line of the innermost function that is not the library's.
---@param words string as for string.format
return setmetatable(fail, { __call = function(_, words, ...) error(located(words, ...), 0) end })
