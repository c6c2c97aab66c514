-- verify - `rille verify script.lua --a "pp=1" --b "pp=4 pipeline=zbv"`: runs a script under two
-- layouts and says whether they compute the same, bit for bit, or what differs first.
--
-- Layouts with the same number of replicas and the same tp are compared by digests (rille.record).
-- Where they differ, sums over the batch or over features are taken in another order: then each
-- step's whole gradients are compared, |a - b| against the model's largest one, and the losses.
local rille = require "rille"
local record = require "rille.record"

local verify = {}

local EXIT_DIFFERENT <const>, EXIT_USAGE <const> = 1, 2
local usage <const> = [[
rille verify script.lua --a LAYOUT --b LAYOUT [--steps 3] [the script's options]

Runs the script under two layouts, such as "pp=1" and "pp=4 pipeline=zbv", for a few steps, and
says whether losses, parameters, gradients and what every unit gives are equal bit for bit, or
which step, microbatch, action and parameter differ first, with both values. With another number of
replicas, another tp or sequence_parallel on one side alone, the losses and the whole gradients of
every step are compared to rounding.
]]

local folders = {} -- of runs, until the end

local function clean()
  for _, folder in ipairs(folders) do os.execute("rm -rf '" .. folder .. "'") end
  folders = {}
end

local function stop(code, words, ...)
  clean()
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

local function replicas(layout) return record.parse_layout(layout).dp or 1 end

-- Who adds in another order under the one layout than under the other; nil: nobody.
local function who_adds_otherwise(a, b)
  local function tp_of(layout)
    local parallel = record.parse_layout(layout)
    local tp = parallel.tp or 1
    return tp > 1 and parallel.sequence_parallel and -tp or tp
  end
  local who = {}
  if replicas(a) ~= replicas(b) then table.insert(who, "replicas") end
  if tp_of(a) ~= tp_of(b) then table.insert(who, "tp ranks") end
  return who[1] and table.concat(who, " and ")
end

local function quote(word) return "'" .. word:gsub("'", "'\\''") .. "'" end

local function read_all(path)
  local file = io.open(path)
  local text = file and file:read("a") or ""
  if file then file:close() end
  return text
end

local function new_folder()
  local pipe <close> = assert(io.popen("mktemp -d"))
  local folder = assert(pipe:read("l"), "no temporary folder")
  table.insert(folders, folder)
  return folder
end

-- Runs the script under a layout; its lines by key, and the folder.
local function run(o, layout, tensor)
  local parallel = record.parse_layout(layout)
  local ranks = (parallel.pp or 1) * (parallel.tp or 1) * (parallel.dp or 1)
  local folder = new_folder()
  local words = { quote(arg[-1] or "rille") }
  if ranks > 1 then table.insert(words, "-n " .. ranks) end
  table.insert(words, quote(o.script))
  for _, word in ipairs(o.rest) do table.insert(words, quote(word)) end
  local command = ("RILLE_VERIFY=%s %s >%s/out 2>&1"):format(
    quote(("%s;%d;%s dp=%d;%s"):format(folder, o.steps, layout, replicas(layout), tensor or "")),
    table.concat(words, " "), quote(folder))
  local ok, _, code = os.execute(command)
  local result = { ok = ok, code = code, lines = {}, n = 0, folder = folder, kinds = {},
    steps = 0, updates = 0 }
  for rank = 0, ranks - 1 do
    for text in read_all(("%s/rank-%d.txt"):format(folder, rank)):gmatch("[^\n]+") do
      local key, digest, action = text:match("^(.-) (%S+) (%S+)$")
      result.lines[key], result.n = { digest = digest, action = action, rank = rank }, result.n + 1
      local step, kind = key:match("^(%d+) (%a)")
      step, result.kinds[kind] = math.tointeger(step), (result.kinds[kind] or 0) + 1
      if kind == "L" then result.steps = math.max(result.steps, step) end
      if kind == "P" then result.updates = math.max(result.updates, step) end
    end
  end
  return result
end

local function must_run(o, layout, tensor)
  local result = run(o, layout, tensor)
  if result.ok and result.steps > 0 then return result end
  local words = read_all(result.folder .. "/out")
  if result.ok then
    stop(EXIT_DIFFERENT, "%s under %q ran no step of a Trainer or of Pipeline:step: nothing can be "
      .. "compared\n%s", o.script, layout, words)
  end
  stop(result.code == EXIT_USAGE and EXIT_USAGE or EXIT_DIFFERENT,
    "%s under %q did not run for %d steps:\n%s", o.script, layout, o.steps, words)
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

-- ---- what was compared, in words

-- "3 steps", or that the script ends before.
local function count_steps(o, result)
  local text = ("%d step%s"):format(result.steps, result.steps == 1 and "" or "s")
  if result.steps >= o.steps then return text end
  return text .. (" (the script ends there, before %d)"):format(o.steps)
end

local function compared(result)
  local list = { "losses, norms" }
  if result.kinds.P then
    table.insert(list, "parameters" .. (result.updates < result.steps
      and (" but for those after step %d, which no step follows"):format(result.steps) or ""))
  end
  if result.kinds.G then table.insert(list, "gradients after each microbatch") end
  if result.kinds.F then table.insert(list, "what each unit gives") end
  if not result.kinds.P then table.insert(list, "no parameters") end
  return table.concat(list, ", ")
end

-- ---- to rounding, where replicas or tp differ

-- |a - b| allowed, as a share of the model's largest gradient, in the first step; and in the
-- later ones, each time the number of updates before: weights have moved apart by then, under AdamW
-- also where a gradient is nothing but rounding.
local first_tolerance <const> = { f32 = 1e-6, f64 = 1e-13, bf16 = 1e-2 }
local later_tolerance <const> = { f32 = 1e-5, f64 = 1e-12, bf16 = 1e-2 }

local function tolerance(step, dtype)
  return step == 1 and first_tolerance[dtype] or later_tolerance[dtype] * (step - 1)
end

-- All gradients of a step by "dtype name", and how many they are.
local function load_grads(result, step)
  local grads, n = {}, 0
  for name in io.popen("ls " .. quote(result.folder)):lines() do
    if name:find(("^grads%%-%d%%-%%d+%%.safetensors$"):format(step)) then
      for key, tensor in pairs(rille.load(result.folder .. "/" .. name)) do
        grads[key], n = tensor, n + 1
      end
    end
  end
  return grads, n
end

-- How far a step's gradients are apart, as a share of the largest: {share, name, dtype, n}.
local function compare_grads(o, step, a, b)
  local x, n = load_grads(a, step)
  local y = load_grads(b, step)
  for name in pairs(y) do
    if not x[name] then
      stop(EXIT_DIFFERENT, "step %d: %s has a gradient under %q alone", step, name, o.b)
    end
  end
  local largest, worst = 0.0, { gap = 0.0, name = "the same everywhere", n = n, dtype = "f32" }
  local n_seen = 0
  for name, grad in pairs(x) do
    if not y[name] then
      stop(EXIT_DIFFERENT, "step %d: %s has a gradient under %q alone", step, name, o.a)
    end
    largest = math.max(largest, grad:abs():max():item())
    local gap = (grad - y[name]):abs():max():item()
    local dtype, plain_name = name:match("^(%w+) (.*)$")
    if later_tolerance[dtype] > later_tolerance[worst.dtype] or n_seen == 0 then
      worst.dtype = dtype -- of mixed weights the coarsest
    end
    n_seen = n_seen + 1
    if gap > worst.gap or gap ~= gap then worst.gap, worst.name = gap, plain_name end
  end
  worst.share = worst.gap == 0 and 0.0 or worst.gap / largest
  return worst
end

local function loss_of(result, step)
  return tonumber(result.lines[step .. " L 0 0 loss"].digest)
end

local function compare_rounded(o, a, b, who)
  local good, words, n = true, {}, 0
  local steps = math.min(a.steps, b.steps)
  if a.steps ~= b.steps then
    stop(EXIT_DIFFERENT, "%s runs %d steps under %q and %d under %q", o.script, a.steps, o.a,
      b.steps, o.b)
  end
  for step = 1, steps do
    local worst = compare_grads(o, step, a, b)
    local allowed, x, y = tolerance(step, worst.dtype), loss_of(a, step), loss_of(b, step)
    local loss_allowed = allowed * math.max(1, math.abs(x))
    local is_good = worst.share <= allowed and math.abs(x - y) <= loss_allowed
    good, n = good and is_good, n + worst.n
    table.insert(words, ("    step %d: gradients differ by at most %.2g of the largest one (%s; "
      .. "allowed %.0e), losses by %.2g (allowed %.0e)%s\n"):format(step, worst.share, worst.name,
      allowed, math.abs(x - y), loss_allowed, is_good and "" or ": NOT equal"))
  end
  if n == 0 then
    stop(EXIT_DIFFERENT, "%s has no gradients: nothing can be compared", o.script)
  end
  clean()
  io.stdout:write(good and "equal" or "NOT equal", (" to rounding: %s, %d gradients and the losses "
    .. "compared\n"):format(count_steps(o, a), n), table.concat(words),
    ("    %s add in another order: bits are not expected to be equal\n"):format(who))
  rille.exit(good and 0 or EXIT_DIFFERENT)
end

--- The command; args as typed behind `rille verify`.
---@param args string[]
function verify.main(args)
  local o = parse(args)
  local who = who_adds_otherwise(o.a, o.b)
  local tensor = who and "grads" or nil
  local a, b = must_run(o, o.a, tensor), must_run(o, o.b, tensor)
  if who then return compare_rounded(o, a, b, who) end
  local key = first_difference(a, b)
  local words = key and describe(o, a, b, key)
  clean()
  if key then
    io.stdout:write("NOT equal\n", words)
    rille.exit(EXIT_DIFFERENT)
  end
  print(("equal bit for bit: %s, %d values compared (%s)\n    a: %s\n    b: %s"):format(
    count_steps(o, a), a.n, compared(a), o.a, o.b))
end

return verify
