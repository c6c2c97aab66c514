-- verify - `rille verify script.lua --a "pp=1" --b "pp=4 pipeline=zbv"`: runs a script under two
-- layouts and says whether they compute the same, bit for bit, or what differs first.
--
-- Layouts with the same number of replicas are compared by digests (rille.record). Where they
-- differ, sums over the batch are taken in another order: then the gradients of the first step are
-- compared, |a - b| against the model's largest gradient.
local rille = require "rille"
local core = rille.core
local record = require "rille.record"

local verify = {}

local EXIT_DIFFERENT <const>, EXIT_USAGE <const> = 1, 2
local usage <const> = [[
rille verify script.lua --a LAYOUT --b LAYOUT [--steps 3] [the script's options]

Runs the script under two layouts, such as "pp=1" and "pp=4 pipeline=zbv", for a few steps, and
says whether losses, parameters, gradients and what every unit gives are equal bit for bit, or
which step, microbatch, action and parameter differ first, with both values.
]]

local function stop(code, words, ...)
  io.stderr:write("rille verify: ", words:format(...), "\n")
  rille.exit(code)
end

local function parse(args)
  local o, i = { steps = 3, rest = {} }, 2
  o.script = args[1]
  if not o.script or o.script == "--help" then
    io.stdout:write(usage)
    rille.exit(o.script and 0 or EXIT_USAGE)
  end
  while args[i] do
    local name = args[i]:match("^%-%-(%w+)$")
    if name == "a" or name == "b" or name == "steps" then
      if not args[i + 1] then stop(EXIT_USAGE, "--%s has no value", name) end
      o[name], i = args[i + 1], i + 2
    else
      table.insert(o.rest, args[i])
      i = i + 1
    end
  end
  if not o.a or not o.b then
    stop(EXIT_USAGE, "two layouts are needed, --a \"pp=1\" --b \"pp=4 pipeline=zbv\"")
  end
  record.parse_layout(o.a)
  record.parse_layout(o.b)
  o.steps = math.tointeger(tonumber(o.steps))
  if not o.steps or o.steps < 1 then
    stop(EXIT_USAGE, "--steps must be a whole number from 1 on")
  end
  return o
end

local function quote(word) return "'" .. word:gsub("'", "'\\''") .. "'" end

local function read_all(path)
  local file = io.open(path)
  local text = file and file:read("a") or ""
  if file then file:close() end
  return text
end

-- Runs the script under a layout; its lines by key, and the folder.
local function run(o, layout, tensor)
  local parallel = record.parse_layout(layout)
  local ranks = (parallel.pp or 1) * (parallel.tp or 1) * (parallel.dp or 1)
  parallel.dp = parallel.dp or 1
  local folder = os.tmpname()
  os.remove(folder)
  core.make_directory(folder)
  local words = { quote(arg[-1] or "rille") }
  if ranks > 1 then table.insert(words, "-n " .. ranks) end
  table.insert(words, quote(o.script))
  for _, word in ipairs(o.rest) do table.insert(words, quote(word)) end
  local command = ("RILLE_VERIFY=%s %s >%s/out 2>&1"):format(
    quote(("%s;%d;%s dp=%d;%s"):format(folder, o.steps, layout, parallel.dp, tensor or "")),
    table.concat(words, " "), quote(folder))
  local ok = os.execute(command)
  local lines, n = {}, 0
  for rank = 0, ranks - 1 do
    for text in read_all(("%s/rank-%d.txt"):format(folder, rank)):gmatch("[^\n]+") do
      local key, digest, action = text:match("^(.-) (%S+) (%S+)$")
      lines[key], n = { digest = digest, action = action, rank = rank }, n + 1
    end
  end
  return { ok = ok, lines = lines, n = n, folder = folder, dp = parallel.dp }
end

local function clean(result)
  os.execute("rm -rf " .. quote(result.folder))
end

local function must_run(o, layout, tensor)
  local result = run(o, layout, tensor)
  if result.ok and result.n > 0 then return result end
  local words = read_all(result.folder .. "/out")
  clean(result)
  stop(EXIT_DIFFERENT, "%s under %q did not run for %d steps:\n%s", o.script, layout, o.steps,
    words)
end

-- Keys in the order in which a step computes.
local kinds = { F = 1, G = 2, P = 3, L = 4 }
local function order_of(key)
  local step, kind, at, unit, name = key:match("^(%d+) (%a) (%d+) (%d+) (.*)$")
  unit = math.tointeger(unit)
  return {
    math.tointeger(step), kinds[kind], math.tointeger(at), kind == "G" and -unit or unit, name,
  }
end

local function is_before(a, b)
  for i = 1, #a do
    if a[i] ~= b[i] then return a[i] < b[i] end
  end
  return false
end

-- The first key that differs, or nil.
local function first_difference(a, b)
  local first, first_order
  for _, pair in ipairs { { a, b }, { b, a } } do
    for key, entry in pairs(pair[1].lines) do
      local other = pair[2].lines[key]
      if not other or other.digest ~= entry.digest then
        local order = order_of(key)
        if not first or is_before(order, first_order) then first, first_order = key, order end
      end
    end
  end
  return first
end

-- Both values where two tensors differ first.
local function both_values(o, key)
  local a, b = must_run(o, o.a, key), must_run(o, o.b, key)
  local x = rille.load(a.folder .. "/tensor.safetensors").tensor
  local y = rille.load(b.folder .. "/tensor.safetensors").tensor
  clean(a)
  clean(b)
  if x:numel() ~= y:numel() then return ("%s against %s"):format(x, y) end
  local differ = x:ne(y):logical_or(x:ne(x):ne(y:ne(y))):view(-1)
  local n = differ:to("i64"):sum():item()
  local at = n > 0 and differ:to("i64"):argmax():item() or 0
  return ("%d of %d elements differ, the first at %d: %.9g against %.9g"):format(n, x:numel(), at,
    x:view(-1)[at]:item(), y:view(-1)[at]:item())
end

local what = {
  F = "what %s gives", G = "the gradient of %s", P = "the parameter %s after the step",
  L = "the %s",
}

local function describe(o, a, b, key)
  local step, kind, at, unit, name = key:match("^(%d+) (%a) (%d+) (%d+) (.*)$")
  local x, y = a.lines[key], b.lines[key]
  local place = ""
  if kind == "F" or kind == "G" then
    place = (", microbatch from sample %s, unit %s"):format(at, unit)
  end
  local text = ("step %s%s: %s differs\n"):format(step, place, what[kind]:format(name))
  for _, side in ipairs { { o.a, x }, { o.b, y } } do
    text = text .. (side[2] and ("    %s: %s on rank %d%s\n"):format(side[1], side[2].action,
      side[2].rank, kind == "L" and ", " .. side[2].digest or "")
      or ("    %s: not there\n"):format(side[1]))
  end
  if kind ~= "L" and x and y then text = text .. "    " .. both_values(o, key) .. "\n" end
  return text
end

-- ---- to rounding, where replicas differ

local function load_grads(result)
  local grads = {}
  for name in io.popen("ls " .. quote(result.folder)):lines() do
    if name:find("^grads%-%d+%.safetensors$") then
      for key, tensor in pairs(rille.load(result.folder .. "/" .. name)) do grads[key] = tensor end
    end
  end
  return grads
end

local tolerances = { f32 = 1e-6, f64 = 1e-13, bf16 = 1e-6 }

local function compare_rounded(o)
  local a, b = must_run(o, o.a, "grads"), must_run(o, o.b, "grads")
  local x, y = load_grads(a), load_grads(b)
  clean(a)
  clean(b)
  local largest, worst, worst_name, dtype = 0.0, -1.0, nil, "f32"
  for name, grad in pairs(x) do
    if not y[name] then stop(EXIT_DIFFERENT, "%s has a gradient under %q alone", name, o.a) end
    largest = math.max(largest, grad:abs():max():item())
    local gap = (grad - y[name]):abs():max():item()
    dtype = grad:dtype()
    if gap > worst or gap ~= gap then worst, worst_name = gap, name end
  end
  local share = worst / largest
  local good = share <= tolerances[dtype]
  print(("%s to rounding: gradients of the first step differ by at most %.2g of the largest one "
    .. "(%s; allowed %.0e)\n    replicas add in another order: bits are not expected to be equal")
    :format(good and "equal" or "NOT equal", share, worst_name, tolerances[dtype]))
  rille.exit(good and 0 or EXIT_DIFFERENT)
end

--- The command; args as typed behind `rille verify`.
---@param args string[]
function verify.main(args)
  local o = parse(args)
  local a = must_run(o, o.a)
  local b = must_run(o, o.b)
  if a.dp ~= b.dp then
    clean(a)
    clean(b)
    return compare_rounded(o)
  end
  local key = first_difference(a, b)
  clean(a)
  clean(b)
  if not key then
    print(("equal bit for bit: %d steps, %d values compared (losses, norms, parameters, gradients "
      .. "after each microbatch, what each unit gives)\n    a: %s\n    b: %s"):format(o.steps, a.n,
      o.a, o.b))
    return
  end
  io.stdout:write("NOT equal\n", describe(o, a, b, key))
  rille.exit(EXIT_DIFFERENT)
end

return verify
