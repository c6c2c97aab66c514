--- help - what an op does, from the table that the bindings are made from.
local rille <const> = require "rille"
local expect <const> = require "rille.expect"

local M <const> = {}

local function rows()
  local list = rille.core.ops()
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

--- "sum(x, dims:list=all, keepdim:bool=false)"
local function signature(row)
  local parts = {}
  for word in row.inputs:gmatch("%S+") do parts[#parts + 1] = word end
  for word in row.args:gmatch("%S+") do parts[#parts + 1] = word end
  return ("%s(%s)"):format(row.name, table.concat(parts, ", "))
end

local function describe(row)
  local notes = {}
  if row.outputs > 1 then notes[#notes + 1] = row.outputs .. " results" end
  if not row.differentiable then notes[#notes + 1] = "no gradient" end
  if row.in_place then notes[#notes + 1] = ("in place: x:%s_()"):format(row.name) end
  local tail = #notes > 0 and "\n    " .. table.concat(notes, "; ") or ""
  return ("%s\n    %s%s"):format(signature(row), row.help, tail)
end

-- The op whose name a word may mean: a misspelling, or a part of it.
local function suggest(word, list)
  local names <const> = {}
  for i, row in ipairs(list) do names[i] = row.name end
  local near <const> = rille.core.nearest(word, names)
  if near then return near end
  for _, name in ipairs(names) do
    if name:find(word, 1, true) or word:find(name, 1, true) then return name end
  end
end

--- help("softmax") prints one op, help() all of them in a line each.
---@param name? string
function M.help(name)
  expect("rille.help", "name", name, "string?")
  local list <const> = rows()
  if name == nil then
    for _, row in ipairs(list) do print(("%-20s %s"):format(row.name, row.help)) end
    print('rille.help("name") says more; each is rille.name(x, ...) and x:name(...)')
    return
  end
  for _, row in ipairs(list) do
    if row.name == name then return print(describe(row)) end
  end
  local near <const> = suggest(name, list)
  print(("there is no op %q%s"):format(name, near and (", did you mean %q?"):format(near) or ""))
end

return M
