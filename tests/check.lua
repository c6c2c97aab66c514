--- check - the library of the Lua tests.
--
--     local check <const> = require "tests.check"
--     check.test("relu: negative values become 0", function()
--       check.equal(rille.tensor{-1, 2}:relu():tolist(), {0, 2})
--     end)
--     check.done()
--
-- A test is named by its claim. done() prints the counts that scripts/check sums.
local check = {}

local n_passed, n_failed, n_skipped = 0, 0, 0

--- A value as a message shows it: tables in full, keys in a stable order.
---@param value any
---@return string
local function show(value)
  if type(value) == "string" then return string.format("%q", value) end
  if type(value) == "number" and math.type(value) == "float" then
    local short = string.format("%.14g", value)
    if tonumber(short) ~= value then short = string.format("%.17g", value) end
    return short:find("^-?%d+$") and short .. ".0" or short
  end
  if type(value) ~= "table" then return tostring(value) end
  local keys, parts = {}, {}
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b)
    if type(a) == "number" and type(b) == "number" then return a < b end
    return tostring(a) < tostring(b)
  end)
  for _, key in ipairs(keys) do
    if key == #parts + 1 then parts[#parts + 1] = show(value[key])
    else parts[#parts + 1] = "[" .. show(key) .. "] = " .. show(value[key]) end
  end
  return "{" .. table.concat(parts, ", ") .. "}"
end

--- The first place where two values differ, or nil. Numbers fit within `tolerance`; two NaN fit.
local function difference(a, b, tolerance, path)
  if type(a) == "number" and type(b) == "number" then
    if a == b or (a ~= a and b ~= b) or math.abs(a - b) <= tolerance then return nil end
  elseif type(a) == "table" and type(b) == "table" then
    for key in pairs(b) do
      if a[key] == nil then return path .. "[" .. show(key) .. "]", nil, b[key] end
    end
    for key in pairs(a) do
      local place, x, y = difference(a[key], b[key], tolerance, path .. "[" .. show(key) .. "]")
      if place then return place, x, y end
    end
    return nil
  elseif type(a) == type(b) and rawequal(a, b) then
    return nil
  end
  return path, a, b
end

--- Tensors and the like are compared as the nested tables they give.
local function plain(value)
  if type(value) == "userdata" and value.tolist then return value:tolist() end
  return value
end

local function compare(got, want, tolerance, note)
  got, want = plain(got), plain(want)
  local place, x, y = difference(got, want, tolerance, "")
  if not place then return end
  local where = place == "" and "" or " at " .. place
  local words = ("got %s, expected %s%s"):format(show(x), show(y), where)
  if tolerance > 0 then words = words .. (" (tolerance %g)"):format(tolerance) end
  error((note and note .. ": " or "") .. words, 3)
end

--- Runs one test; its failure is printed with the claim and the script's line.
---@param claim string
---@param fn fun()
function check.test(claim, fn)
  local passed, trace = xpcall(fn, function(err)
    return type(err) == "string" and debug.traceback(err, 2) or debug.traceback(show(err), 2)
  end)
  if passed then
    n_passed = n_passed + 1
  else
    n_failed = n_failed + 1
    print(("not ok %s\n%s"):format(claim, trace:gsub("[^\n]*", "    %0")))
  end
end

--- Fails unless `condition` is true.
function check.ok(condition, note)
  if not condition then error(note or "the condition does not hold", 2) end
end

--- Fails unless the two are equal, tables member by member, numbers exactly.
function check.equal(got, want, note) compare(got, want, 0, note) end

--- Fails unless all numbers fit within `tolerance` (absolute).
---@param tolerance number
function check.near(got, want, tolerance, note) compare(got, want, tolerance, note) end

--- Fails unless fn raises an error whose words match every one of the Lua patterns.
---@param fn fun()
---@return string words of the error
function check.raises(fn, ...)
  local passed, err = pcall(fn)
  if passed then error("no error was raised", 2) end
  err = tostring(err)
  for _, pattern in ipairs{...} do
    if not err:find(pattern) then
      error(("the error %s does not match %s"):format(show(err), show(pattern)), 2)
    end
  end
  return err
end

--- Says why something is not tested on this machine, and counts it.
---@param why string
function check.skip(why)
  n_skipped = n_skipped + 1
  print("skipped: " .. why)
end

--- Prints the counts and ends the process; the last call of a test file.
function check.done()
  local skips = n_skipped > 0 and (", %d skipped"):format(n_skipped) or ""
  print(("%d passed, %d failed%s"):format(n_passed, n_failed, skips))
  os.exit(n_failed == 0 and n_passed + n_skipped > 0, true)
end

return check
