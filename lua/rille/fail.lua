-- fail - errors of the library that name the script's line: fail("there is no file %s", path).

local function is_library(info)
  return info.what == "C" or info.source:find("^=rille/") ~= nil
end

--- Raises an error at the line of the innermost function that is not the library's.
---@param words string as for string.format
return function(words, ...)
  local level = 2
  local info = debug.getinfo(level, "S")
  while info and is_library(info) do
    level = level + 1
    info = debug.getinfo(level, "S")
  end
  error(select("#", ...) > 0 and words:format(...) or words, info and level or 0)
end
